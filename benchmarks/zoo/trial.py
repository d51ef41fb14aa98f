"""One rank of a trial: an architecture trained unsharded, then sharded, and the two compared.

    {"library", "name", "variant": "plain"}  ──> what unsharded training gave is kept
    {"library", "name", "variant": "fsdp2"}  ──> {"verdict", "why", "error"} against what is kept

The model is built from one seed. Each rank has a batch of its own, drawn with a seed of step and
rank just before its forward, so that dropout is drawn alike. The unsharded model takes both
batches, half of each loss; halves are exact in floating point, so the sums are those of an average
over two ranks, and equality to the bit is to be expected.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import random
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import variants, workers
from benchmarks.zoo import architectures
from benchmarks.zoo.instances import Instance, NotBuiltError

RANKS = 2
STEPS = 3
# The largest relative error, by norm, of what counts as close. Sums of the same numbers in another
# order differ by 1e-7 a step; AdamW's division makes more of it, for which `EPS` is large.
CLOSE = 1e-4
EPS = 1e-4
TIMEOUT = datetime.timedelta(seconds=40)  # of a collective

VERDICTS = ("exact", "close", "differs", "fails")


@dataclass
class Trained:
    """What training leaves.

    Attributes:
        losses: a step's, of each rank's batch that was seen here: {(step, rank): loss}.
        gradients: of the first step, by name; None where the parameter got none.
        params: after the last step, by name.
        names: of the state dict.
    """

    losses: dict[tuple[int, int], Tensor]
    gradients: dict[str, Tensor | None]
    params: dict[str, Tensor]
    names: list[str]


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    warnings.simplefilter("ignore")
    rank = workers.join_ranks(spec, RANKS, TIMEOUT)
    mesh = init_device_mesh("cpu", (RANKS,))
    kept: dict[str, Trained] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        key = f"{request['library']}/{request['name']}"
        try:
            made = _build(request["library"], request["name"])
            if request["variant"] == "plain":
                kept.clear()
                kept[key] = train_unsharded(made)
                return {"verdict": "built", **_facts(made)}
            found = train_sharded(made, request["variant"], mesh, rank)
            return worst_of_ranks(compare(kept[key], found))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, NotBuiltError):
                traceback.print_exc()
            return {"verdict": "fails", "why": " ".join(why.split())[:400]}

    return handle


def _build(library: str, name: str) -> Instance:
    torch.manual_seed(0)
    made = architectures.build(library, name)
    made.model.float()
    return made


def _facts(made: Instance) -> dict[str, Any]:
    params = list(made.model.parameters())
    return {"parameters": sum(p.numel() for p in params), "blocks": len(made.blocks)}


def _seed(step: int, rank: int) -> None:
    number = 1000 * step + rank + 1
    torch.manual_seed(number)
    random.seed(number)
    importlib.import_module("numpy").random.seed(number)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS, foreach=True)


def train_unsharded(made: Instance) -> Trained:
    optimizer = _adamw(made.model)
    losses: dict[tuple[int, int], Tensor] = {}
    gradients: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        for rank in range(RANKS):
            _seed(step, rank)
            loss = made.loss(made.inputs())
            (loss / RANKS).backward()
            losses[step, rank] = loss.detach()
        if step == 0:
            for name, param in made.model.named_parameters():
                gradients[name] = None if param.grad is None else param.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.detach() for name, param in made.model.named_parameters()}
    return Trained(losses, gradients, params, list(made.model.state_dict()))


def train_sharded(made: Instance, variant: str, mesh: DeviceMesh, rank: int) -> Trained:
    fully_shard, _ = variants.fsdp2_api(variant)
    for block in reversed(made.blocks):  # inner ones first
        fully_shard(block, mesh=mesh)
    fully_shard(made.model, mesh=mesh)
    optimizer = _adamw(made.model)
    losses: dict[tuple[int, int], Tensor] = {}
    gradients: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        _seed(step, rank)
        loss = made.loss(made.inputs())
        loss.backward()
        losses[step, rank] = loss.detach()
        if step == 0:
            gradients = _full_gradients(made.model)
        optimizer.step()
        optimizer.zero_grad()
    params = {name: _full(param.detach()) for name, param in made.model.named_parameters()}
    return Trained(losses, gradients, params, list(made.model.state_dict()))


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """All ranks gather the same names, or all raise."""
    found = {name: param.grad for name, param in model.named_parameters()}
    present = [name for name, grad in found.items() if grad is not None]
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, present)
    odd = set(everywhere[0]) ^ set(everywhere[1])
    if odd:
        raise RuntimeError(f"{sorted(odd)[0]} has a gradient on one rank only")
    return {name: None if grad is None else _full(grad) for name, grad in found.items()}


def compare(expected: Trained, found: Trained) -> dict[str, Any]:
    """The worst of losses, gradients, parameters and names, as this rank sees them."""
    error, why = 0.0, ""
    if expected.names != found.names:
        why = "the state dict's names"
    parts: list[tuple[str, Mapping[Any, Tensor | None], Mapping[Any, Tensor | None]]] = [
        ("loss", expected.losses, found.losses),
        ("gradient", expected.gradients, found.gradients),
        ("parameter", expected.params, found.params),
    ]
    exact = True
    for kind, wanted, got in parts:
        for key, value in got.items():
            reference = wanted[key]
            if (reference is None) != (value is None):
                why = why or f"{kind} {key}: {'none' if value is None else 'not none'}"
            elif value is not None and reference is not None:
                away = _relative_error(reference, value)
                exact = exact and torch.equal(reference, value)
                if not away <= CLOSE and not why:
                    why = f"{kind} {key}: {away:.1e} off"
                error = max(error, away)
    verdict = "differs" if why else "exact" if exact else "close"
    return {"verdict": verdict, "why": why, "error": error}


def worst_of_ranks(mine: dict[str, Any]) -> dict[str, Any]:
    answers: list[Any] = [None] * RANKS
    dist.all_gather_object(answers, mine)
    return max(answers, key=lambda answer: VERDICTS.index(answer["verdict"]))


def _relative_error(expected: Tensor, found: Tensor) -> float:
    """By norm; of nothing it is the norm, so that noise around zero is small."""
    if expected.shape != found.shape:
        return float("inf")
    both_nan = expected.isnan() & found.isnan()
    difference = torch.where(both_nan, 0, found - expected).double().norm()
    return float(difference / expected.double().nan_to_num().norm().clamp(min=EPS))

"""The remaining controls of a unit: gathers on request, windows, storage, events, getters.

Where this torch has a method, the same scenario with it must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import FSDPMeshInfo, MixedPrecisionPolicy, ShardPlacementResult, share_comm_ctx
from fsdp2.core.modules.registry import require_record
from tests.common import meshes, models, parity, running
from tests.common.backends import packs
from tests.common.workers import ranks

VOCAB = 13
STEPS = 3

mlp_batches = partial(parity.regression_batches, models.DIM, 4, steps=STEPS)
Change = Callable[[Any], object]


def _train(api: Any, change: Change = lambda model: None, **arguments: Any) -> Any:
    model = parity.shard(api, running.mlp(), **arguments)
    change(model)
    return parity.train_sharded(model, parity.adamw, parity.regression_loss, mlp_batches())


def _one() -> tuple[Tensor, Tensor]:
    part: tuple[Tensor, Tensor] = parity.my_part(mlp_batches()[0])
    return part


def _gathers(run: Callable[[], Any]) -> int:
    with parity.CountCollectives() as counted:
        run()
    return counted.all_gathers


# -- unshard_in_backward --------------------------------------------------------------------------


def _language_model(api: Any, **settings: Any) -> Any:
    model: Any = models.seeded(partial(models.Transformer, vocab=VOCAB))
    model.embed.is_unit = True
    return parity.shard(api, model, **settings)


@packs
@ranks(2)
def test_embedding_is_not_gathered_in_backward() -> None:
    def train(api: Any, gathers: bool) -> Any:
        model = _language_model(api)
        model.embed.set_unshard_in_backward(gathers)
        counts: list[int] = []

        def loss(model: nn.Module, ids: Tensor) -> Tensor:
            value = parity.language_loss(model, ids)
            counts.append(_gathers(partial(value.backward, retain_graph=True)))
            model.zero_grad()
            return value

        return parity.train_sharded(
            model, parity.adamw, loss, parity.language_batches(VOCAB, steps=STEPS)
        ), counts

    ours, fewer = train(parity.OURS, False)
    usual, more = train(parity.OURS, True)
    parity.assert_equal(ours, usual)
    assert [a - b for a, b in zip(more, fewer, strict=True)] == [1] * STEPS
    theirs, counts = train(parity.TORCH, False)
    parity.assert_equal(ours, theirs, "torch")
    assert counts == fewer


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_embedding_that_is_recomputed(reentrant: bool) -> None:
    """Then backward does run its forward, which needs the parameters."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, models.DIM)
            self.head = nn.Linear(models.DIM, VOCAB)

        def forward(self, ids: Tensor, start: Tensor) -> Tensor:
            def embed(ids: Tensor, start: Tensor) -> Tensor:
                return torch.sin(self.embed(ids) + start)

            return self.head(checkpoint(embed, ids, start, use_reentrant=reentrant))

    def train(gathers: bool) -> Any:
        model: Any = models.seeded(Checkpointed)
        fsdp2.fully_shard(model.embed)
        fsdp2.fully_shard(model)
        model.embed.set_unshard_in_backward(gathers)
        results = []
        for ids in parity.language_batches(VOCAB, steps=STEPS):
            start = torch.zeros(models.DIM, requires_grad=True)
            model.zero_grad()
            model(parity.my_part(ids), start).square().mean().backward()
            results.append([parity.full_grads(model), start.grad])
        return results

    parity.assert_equal(train(False), train(True))


@ranks(2)
def test_linear_that_is_not_gathered_in_backward() -> None:
    """Wrong, and said so before freed memory is read; nothing is left behind after a reset."""
    model: Any = parity.shard(parity.OURS, running.mlp())
    model.layers[1].set_unshard_in_backward(False)
    loss = parity.regression_loss(model, _one())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    model.layers[1].set_unshard_in_backward(True)
    parity.regression_loss(model, _one()).backward()
    plain = parity.shard(parity.OURS, running.mlp())
    parity.regression_loss(plain, _one()).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


# -- prefetch -------------------------------------------------------------------------------------


class TwoMeshes(nn.Module):
    """Units of two groups each: weights over all ranks, biases over one rank's copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@ranks(4)
def test_prefetch_of_units_with_several_groups() -> None:
    mesh = meshes.mesh("a", "b", shape=(2, 2))
    wide = init_device_mesh("cpu", (4,))

    def train(ahead: int) -> Any:
        model: Any = models.seeded(TwoMeshes)

        def place(param: nn.Parameter) -> ShardPlacementResult | None:
            if param.ndim > 1:
                return None
            info = FSDPMeshInfo(mesh["a", "b"], shard_mesh_dim=1, replicate_mesh_dim=0)
            return ShardPlacementResult(Shard(0), info)

        for layer in model.layers:
            fsdp2.fully_shard(layer, mesh=wide, shard_placement_fn=place)
            assert len(require_record(layer).unit.own_groups) == 2
        fsdp2.fully_shard(model, mesh=wide)
        layers = list(model.layers)
        for i, layer in enumerate(layers if ahead else ()):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])
        counts: list[int] = []

        def loss(model: nn.Module, part: Any) -> Tensor:
            value: list[Tensor] = []
            counts.append(_gathers(lambda: value.append(parity.regression_loss(model, part))))
            return value[0]

        batches = parity.regression_batches(models.DIM, models.DIM, steps=STEPS)
        steps = parity.train_sharded(model, parity.adamw, loss, batches)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        return steps, counts

    expected = train(0)
    assert expected[1] == [8] * STEPS
    for ahead in (1, 2):
        parity.assert_equal(train(ahead), expected)


@packs
@ranks(2)
def test_is_last_backward_and_what_is_gathered_for_the_next() -> None:
    """Two forwards, two backwards: the first leaves a unit gathered for the second."""

    def count(last: bool) -> list[int]:
        model: Any = running.mlp()
        model.head.is_unit = True
        parity.shard(parity.OURS, model)
        counts = []
        for _ in range(2):
            losses = [parity.regression_loss(model, _one()) for _ in range(2)]
            model.set_is_last_backward(last)
            counts.append(_gathers(losses[1].backward))
            model.set_is_last_backward(True)
            counts.append(_gathers(losses[0].backward))
            model.zero_grad()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        return counts[2:]

    # Four units each; the head, first in the second backward, is gathered ahead by the first.
    assert count(last=False) == [5, 3]
    assert count(last=True) == [5, 4]


# -- what alters no result ------------------------------------------------------------------------


@ranks(2)
def test_a_control_that_alters_no_result() -> None:
    """The same with torch's, where it has the method."""
    usual = {frees: _train(parity.OURS, reshard_after_forward=frees) for frees in (None, True)}
    for method, arguments, frees in (
        ("set_reduce_scatter_max_input_buffers", [2], None),
        ("set_reduce_scatter_max_input_buffers", [5], None),
        ("set_separate_reduce_scatter_group", [], None),
        ("set_keep_unsharded_storage", [True], True),
    ):

        def train(
            api: Any, method: str = method, arguments: Any = arguments, frees: Any = frees
        ) -> Any:
            change = methodcaller(method, *arguments)
            return _train(api, change, reshard_after_forward=frees)

        ours = train(parity.OURS)
        parity.assert_equal(ours, usual[frees], method)
        if hasattr(parity.TORCH.FSDPModule, method):
            parity.assert_like_torch(ours, train(parity.TORCH))


# -- memory ---------------------------------------------------------------------------------------


@ranks(2)
def test_kept_storage_has_the_same_address() -> None:
    model: Any = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=True)
    addresses: dict[str, set[int]] = {}

    def note(name: str, module: nn.Module, args: Any) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        assert not isinstance(weight, DTensor)
        addresses.setdefault(name, set()).add(weight.data_ptr())

    for name, layer in model.layers.named_children():
        layer.register_forward_pre_hook(partial(note, name))

    def sizes() -> list[int]:
        return [
            param.unsharded.untyped_storage().size()
            for m in (*model.layers, model)
            for group in require_record(m).unit.own_groups
            for param in group.params
            if param.unsharded is not None
        ]

    model.set_keep_unsharded_storage(True)
    optimizer = parity.adamw(model.parameters())
    for _ in range(STEPS):
        parity.regression_loss(model, _one()).backward()
        optimizer.step()
        model.zero_grad()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert all(sizes())
    assert {name: len(found) for name, found in addresses.items()} == {"0": 1, "1": 1, "2": 1}
    model.set_keep_unsharded_storage(False)
    parity.regression_loss(model, _one()).backward()
    assert not any(sizes())


# -- other streams, other roots -------------------------------------------------------------------


@ranks(2)
def test_post_optim_event() -> None:
    """On the CPU there is nothing to wait for; the event is let go after one forward."""
    model: Any = parity.shard(parity.OURS, running.mlp())
    optimizer = parity.adamw(model.parameters())
    event = object()
    for _ in range(2):
        parity.regression_loss(model, _one()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_post_optim_event(event)
    scheduler = require_record(model).scheduler
    assert scheduler is not None
    assert scheduler.post_optim_event is event
    with mock.patch.object(scheduler.streams, "wait", wraps=scheduler.streams.wait) as wait:
        model(_one()[0])
    assert sum(call.args[1] is event for call in wait.call_args_list) == 1
    assert scheduler.post_optim_event is None


@ranks(2)
def test_share_comm_ctx() -> None:
    """Two roots that are trained in turn, as the stages of a pipeline on one rank."""

    def train(api: Any, share: bool) -> Any:
        roots: Any = [parity.shard(api, models.seeded(models.MLP, seed)) for seed in range(2)]
        if share:
            api.share_comm_ctx(roots)
        optimizers = [parity.adamw(model.parameters()) for model in roots]
        for batch in mlp_batches():
            losses = [parity.regression_loss(model, parity.my_part(batch)) for model in roots]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parity.full_params(model) for model in roots]

    ours = train(parity.OURS, True)
    parity.assert_equal(ours, train(parity.OURS, False))
    parity.assert_like_torch(
        ours, train(parity.TORCH, False)
    )  # whose roots must not take turns like this
    share_comm_ctx([])


# -- settings that a report shows ------------------------------------------------------------------


@ranks(2)
def test_settings_in_a_report() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model: Any = models.seeded(models.MLP)
    for layer in model.layers:
        fsdp2.fully_shard(layer, mp_policy=policy)
    fsdp2.fully_shard(model)

    def reshards() -> list[bool | int]:
        return [group.reshard_after_forward for group in fsdp2.report(model).groups]

    root, first, *_ = fsdp2.report(model).groups
    assert (root.mp_policy, first.mp_policy) == (MixedPrecisionPolicy(), policy)
    assert reshards()[:2] == [False, True]
    model(_one()[0])
    assert reshards()[:2] == [False, True]
    model.set_reshard_after_forward(True)
    assert all(reshards())
    model.layers[0].set_reshard_after_forward(False)
    assert reshards()[:2] == [True, False]

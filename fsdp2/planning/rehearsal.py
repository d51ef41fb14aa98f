"""One step of a model on paper: made on ``meta``, sharded, run, and noted.

    make_model ──meta──> fully_shard(…) ──> a step that is forgotten ──> a step that is noted
                                            (orders, optimizer states)      Rehearsal

The engine, its hooks, autograd and the optimizer are the real ones; the device is
`fsdp2.tracing.paper`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from fsdp2.core.errors import coded
from fsdp2.core.facts import Counts, Unit, functions_of_shards, local_of, record_of
from fsdp2.interop import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.optim.norms import clip_grad_norm_
from fsdp2.planning.reasons import explaining
from fsdp2.sharding.api import apply_calls, plan_calls
from fsdp2.sharding.module import FSDPModule
from fsdp2.tracing.paper.devices import NamedDevices, no_autocast
from fsdp2.tracing.paper.operators import Operators, fused_optimizers, kernels_of
from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.paper.stage import module_of_meta, noting, on_paper
from fsdp2.tracing.paper.values import Following, Values
from fsdp2.tracing.record.categories import ACTIVATIONS, GRADIENTS, MODEL
from fsdp2.tracing.reports import GroupReport, report
from fsdp2.wrap import Choice, ModuleWrapPolicy, chosen_modules
from fsdp2.wrap.choices import Policy

Batch = object
MakeModel = Callable[[], nn.Module]
Shard = Callable[[nn.Module, DeviceMesh], object]
Loss = Callable[[nn.Module, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Settings:
    """How a model is trained: the settings that `Plan.with_` changes and `Plan.fit` varies.

    Attributes:
        mesh: ranks: ``(shard,)`` or ``(replicate, shard)``.
        batch: the argument of ``make_batch``, if it takes one: sequences, images.
        accumulate: micro-batches per step; gradients are reduced in the last.
        reduce_each: whether they are reduced in every micro-batch, so that unsharded gradients are
            not kept.
        reshard_after_forward: as for `fully_shard`, for units below the root.
        kept: names of units that stay unsharded from forward to backward in any case.
        reshard_after_backward: ``False``: gathered once per step, and not resharded after forward
            either.
        window: units that are prefetched (`FSDPModule.set_tuning`).
        checkpointing: whether units are recomputed in backward; a number n: every n-th.
        precision: mixed precision of all units; ``None``: none.
        offload: whether shards and optimizer are in CPU memory.
        clip: the largest norm of gradients; ``None``: they are not clipped.
    """

    mesh: tuple[int, ...] = (8,)
    batch: int = 1
    accumulate: int = 1
    reduce_each: bool = False
    reshard_after_forward: bool | int | None = None
    kept: tuple[str, ...] = ()
    reshard_after_backward: bool = True
    window: int = 1
    checkpointing: bool | int = False
    precision: MixedPrecisionPolicy | None = None
    offload: bool = False
    clip: float | None = None

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return self.mesh[0] * (self.mesh[1] if len(self.mesh) > 1 else 1)


@dataclass(frozen=True)
class Subject:
    """The model to plan; see `plan`."""

    make_model: MakeModel
    make_batch: Callable[..., Batch]
    units: Policy | None
    shard: Shard | None
    loss: Loss
    optimizer: MakeOptimizer
    tokens: int | None
    rehearsals: dict[object, Rehearsal] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Rehearsal:
    """A recorded step."""

    recording: Recording
    reports: tuple[GroupReport, ...]
    parameters: int
    tokens: int
    units: tuple[str, ...]


def rehearse(subject: Subject, settings: Settings, device: str, backend: str) -> Rehearsal:
    """Run a step on paper."""
    _check(settings)
    recorder = Recording(asynchronous=device != "cpu")
    with ExitStack() as stack:
        stack.enter_context(on_paper(recorder, backend, settings.world))
        stack.enter_context(kernels_of(device))
        stack.enter_context(fused_optimizers())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        mesh = _mesh(settings)
        stack.enter_context(module_of_meta())
        values = Values()
        stack.enter_context(no_autocast())
        stack.enter_context(NamedDevices())
        with torch.device("meta"), Following(values), explaining("make_model"):
            model = subject.make_model()
        if not isinstance(model, nn.Module):
            raise coded(
                TypeError,
                "plan-no-model",
                f"plan() takes a model or a function that returns one, but the function returned "
                f"{type(model).__name__}; let it return an nn.Module",
            )
        values.forget(model.parameters())
        with Following(values), explaining("make_batch"):
            batch = _make_batch(subject, settings)
        with Operators(recorder, values):
            return _rehearse(subject, settings, device, recorder, model, mesh, batch)


def _check(settings: Settings) -> None:
    for name in ("batch", "accumulate", "window"):
        value = getattr(settings, name)
        if not isinstance(value, int) or value < 1:
            raise coded(
                ValueError,
                "plan-count",
                f"{name}={value!r} cannot be planned; pass an integer from 1",
            )


def _check_units(subject: Subject, settings: Settings, found: Mapping[str, nn.Module]) -> None:
    """Names that no unit has would silently have no effect, and operators of graphs no cost."""
    units = set(found)
    records = filter(None, map(record_of, found.values()))
    groups = [group for record in records for group in record.unit.own_groups]
    if any(param in functions_of_shards for group in groups for param in group.params):
        raise coded(
            ValueError,
            "plan-graph-mode",
            "shard=… of plan() calls graph_mode, whose operators plan() does not run; leave it out "
            "there: a compiled graph launches, waits and frees as hooks do",
        )
    lost = [name for name in settings.kept if name not in units]
    if lost:
        raise coded(
            ValueError,
            "plan-kept",
            f"kept={settings.kept!r} names no unit '{lost[0]}'; the units are "
            f"{', '.join(sorted(units))}",
        )
    if subject.units is not None and units == {"(root)"}:
        raise coded(
            ValueError,
            "plan-units",
            "units=… matches no module of the model, so the model would be one unit; leave it "
            "out if you want one unit, or pass classes that the model has",
        )


def _mesh(settings: Settings) -> DeviceMesh:
    names = ("replicate", "shard")[-len(settings.mesh) :]
    return init_device_mesh("meta", settings.mesh, mesh_dim_names=names)


def _rehearse(
    subject: Subject,
    settings: Settings,
    device: str,
    recorder: Recording,
    model: nn.Module,
    mesh: DeviceMesh,
    batch: Batch,
) -> Rehearsal:
    parameters = sum(param.numel() for param in model.parameters())
    recorder.tag((*model.parameters(), *model.buffers()), MODEL)
    _shard(subject, settings, model, mesh)
    units = _units(model)
    _check_units(subject, settings, units)
    _watch(units, recorder)
    shards = [_Rows(param) for param in model.parameters()]
    optimizer = _make_optimizer(subject, shards)
    if device != "cpu":
        for group in optimizer.param_groups:
            if group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True  # as torch chooses on an accelerator
    recorder.tag(tensors_in(batch), ACTIVATIONS)
    parts = (subject, settings, recorder, model, shards, optimizer, batch)
    _run_step(*parts)
    recorder.forget_units()
    recorder.start()
    _run_step(*parts)
    recorder.stop()
    tokens = subject.tokens or _count_tokens(batch)
    return Rehearsal(recorder, report(model).groups, parameters, tokens, tuple(units))


# ---- making it


def _make_optimizer(subject: Subject, shards: Sequence[_Rows]) -> torch.optim.Optimizer:
    optimizer = subject.optimizer([rows.param for rows in shards])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise coded(
            TypeError,
            "plan-optimizer",
            f"optimizer=… of plan() returned {type(optimizer).__name__}; let it return one "
            f"torch.optim.Optimizer",
        )
    return optimizer


def _shard(subject: Subject, settings: Settings, model: nn.Module, mesh: DeviceMesh) -> None:
    if subject.shard is None:
        shard_as_planned(model, mesh, settings, subject.units)
        return
    _checkpoint(chosen_modules(model, subject.units), settings.checkpointing)
    subject.shard(model, mesh)
    _set_flags(model, settings)


def shard_as_planned(
    model: nn.Module, mesh: DeviceMesh, settings: Settings, units: Policy | None
) -> None:
    """Shard a model as settings say.

    Args:
        model: the model, on any device.
        mesh: of the shape that settings name.
        settings: how it is trained.
        units: which modules become units.

    Example::

        shard_as_planned(model, mesh, plan.settings, {Block})
    """
    choices = chosen_modules(model, units)
    calls = plan_calls(_calls(model, choices, mesh, settings))
    _checkpoint(choices, settings.checkpointing)
    apply_calls(calls)
    _set_flags(model, settings)


def _calls(
    model: nn.Module, choices: Sequence[Choice], mesh: DeviceMesh, settings: Settings
) -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
    """The calls of `fully_shard`, on what is chosen and then on the model."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": settings.reshard_after_forward,
        "mp_policy": settings.precision,
        "offload_policy": CPUOffloadPolicy() if settings.offload else None,
    }
    for choice in choices:
        own = dict(options)
        if choice.name in settings.kept or not settings.reshard_after_backward:
            own["reshard_after_forward"] = False
        yield choice.module, {**own, **choice.options}
    yield model, {**options, "reshard_after_forward": False}


def _set_flags(model: nn.Module, settings: Settings) -> None:
    assert isinstance(model, FSDPModule)
    if not settings.reshard_after_backward:
        model.set_reshard_after_backward(False)
    if settings.window != 1:
        model.set_tuning(prefetch_window=settings.window)


def _checkpoint(choices: Sequence[Choice], which: bool | int) -> None:
    """Let every n-th unit recompute its forward in backward, inside of its hooks."""
    every = int(which)
    if not every:
        return
    for choice in choices[::every]:
        choice.module.forward = functools.partial(
            checkpoint, choice.module.forward, use_reentrant=False, preserve_rng_state=False
        )


def _units(model: nn.Module) -> dict[str, nn.Module]:
    named = {name: module for name, module in model.named_modules() if record_of(module)}
    return {name or "(root)": module for name, module in named.items()}


def _watch(units: Mapping[str, nn.Module], recorder: Recording) -> None:
    """Tell the recorder whose forward runs, and for which unit the engine works."""
    seen: set[Unit] = set()
    observer = noting(recorder)
    for name, module in units.items():
        record = record_of(module)
        assert record is not None
        module.register_forward_pre_hook(lambda *_, unit=name: recorder.enter(unit), prepend=True)
        module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
        if record.unit not in seen:
            seen.add(record.unit)
            record.unit.put_around(observer, wanted=True)


def _make_batch(subject: Subject, settings: Settings) -> Batch:
    with torch.device("meta"):
        given = (settings.batch,) if takes_count(subject.make_batch) else ()
        batch = subject.make_batch(*given)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)


def takes_count(make_batch: Callable[..., Batch]) -> bool:
    """Whether a function that makes a batch takes the number of samples."""
    return bool(inspect.signature(make_batch).parameters)


def tensors_in(batch: Batch) -> list[torch.Tensor]:
    """The tensors of a batch: itself, or in lists, tuples and mappings."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _count_tokens(batch: Batch) -> int:
    """From the first tensor: its elements if they are integers, otherwise its length."""
    found = tensors_in(batch)
    if not found:
        return 1
    first = found[0]
    if first.is_floating_point() or not first.dim():
        return first.shape[0] if first.dim() else 1
    return first.numel()


# ---- running it


class _Rows:
    """This rank's rows of a parameter as a plain parameter, which the optimizer steps.

    Operations of an optimizer on a DTensor run on its rows, because a DTensor on ``meta`` does not
    support them.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self._sharded = param
        self.param = nn.Parameter(local_of(param).detach(), requires_grad=param.requires_grad)

    def take(self) -> None:
        """Have the gradient that was reduced."""
        grad = self._sharded.grad
        self.param.grad = None if grad is None else local_of(grad)

    def drop(self) -> None:
        """As ``zero_grad``."""
        self.param.grad = self._sharded.grad = None


def _run_step(
    subject: Subject,
    settings: Settings,
    recorder: Recording,
    model: nn.Module,
    shards: Sequence[_Rows],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
) -> None:
    """Micro-batches and the optimizer's step."""
    count = settings.accumulate
    for micro in range(count):
        if count > 1 and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(settings.reduce_each or micro == count - 1)
            model.set_is_last_backward(micro == count - 1)
        with recorder.during("forward"), explaining("loss", model):
            loss = subject.loss(model, batch)
            if not loss.requires_grad:
                raise coded(
                    ValueError,
                    "plan-loss",
                    "the loss does not require a gradient, so the plan would have no "
                    "backward; let loss=… return a tensor that depends on parameters that "
                    "require gradients",
                )
        with recorder.during("backward"), explaining("backward", model):
            loss.backward()
        del loss
    found = [param.grad for param in model.parameters() if param.grad is not None]
    recorder.tag(map(local_of, found), GRADIENTS)
    del found
    with recorder.during("optimizer"):
        if settings.clip is not None:
            clip_grad_norm_(model.parameters(), settings.clip)
        for rows in shards:
            rows.take()
        optimizer.step()
        Counts.steps += 1  # nobody sees that it holds managed parameters
        for rows in shards:
            rows.drop()


def default_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean of what the model returns, or its ``loss``."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:
        found = tensors_in(output)[0]
    return found if found.dim() == 0 else found.float().mean()


def default_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([param for param in params if param.requires_grad])


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model without its memory."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            bare = nn.Parameter(bare, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = bare
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def policy_of(units: Policy | Iterable[str] | None) -> Policy | None:
    """Classes, names of classes, or a policy."""
    if units is None or callable(units) or isinstance(units, ModuleWrapPolicy):
        return units
    found = list(units) if isinstance(units, Iterable) else units
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        names = set(found)

        def named(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return recurse or type(module).__name__ in names

        return named
    return found  # type: ignore[return-value]  # classes, or torch's own policy

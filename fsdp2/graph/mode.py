"""`graph_mode`: which models it takes, and the units that it changes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    ParamGroup,
    Transport,
    UnitHooks,
    UnitRecord,
    functions_of_shards,
    records_below,
    require_record,
    start,
)
from fsdp2.graph.placement import register
from fsdp2.graph.units import GraphUnit


def graph_mode(
    model: nn.Module, enabled: bool = True, *, compile: bool | Mapping[str, Any] = False
) -> None:
    """Make unsharded parameters differentiable functions of their shards, or end that.

    The model's units gather and reduce by the operators ``fsdp2::unshard`` and ``fsdp2::reduce``,
    which autograd differentiates and ``torch.compile`` traces, in place of hooks. Units, layouts,
    precision, state dicts, optimizers and checkpoints are the same; losses and gradients are
    bitwise identical. Call it on all ranks, between steps. It communicates nothing.

    Eagerly, all derivatives exist: ``torch.autograd.grad`` with respect to parameters, gradients of
    gradients, ``torch.func``. Collectives then wait in place.

    With ``compile``, the model's forward is one graph, and so is its backward: each gather is
    launched before the unit ahead of it computes, and each reduction is waited for one unit later.
    The groups of parameters enter the graph as what collectives read, so that torch neither guards
    nor saves single parameters. A graph has first derivatives alone. If you compile a larger
    function that calls the model, its graph takes each parameter: it costs more, and collectives
    wait in place unless you pass ``backend="fsdp2"``.

    Args:
        model: the root: the module whose forward you call.
        enabled: ``False`` returns to hooks. Default ``True``.
        compile: ``True``, or arguments of ``torch.compile`` besides ``fullgraph=True`` and
            ``backend="fsdp2"``: for example ``{"dynamic": True}``. Default ``False``.

    Raises:
        ShardingStateError: the model is in a forward or backward, is below another root, or has
            something that graph mode does not support; the message names it. Nothing has changed.
        ValueError: ``fully_shard`` was not called on it.
        TypeError: ``torch.compile`` has no such argument. Nothing has changed.

    Example::

        fsdp2.graph_mode(model, compile=True)
        model(batch).sum().backward()

        fsdp2.graph_mode(model)
        loss = model(batch).sum()
        gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        penalty = sum(gradient.full_tensor().square().sum() for gradient in gradients)
    """
    register()
    arguments: dict[str, Any] = {"backend": "fsdp2", "fullgraph": True}
    arguments |= {} if isinstance(compile, bool) else compile
    compiler = functools.partial(torch.compile, **arguments)
    if compile:
        compiler(model.forward)  # for its errors: it compiles when it is called
    record = require_record(model)
    scheduler = record.scheduler or start(record)
    records = [below for below in records_below(model) if isinstance(below, UnitHooks)]
    before = {below: found for below in records if (found := _graph_unit(below)) is not None}
    if not record.unit.is_root:
        _refuse(record, "is below another root", "call graph_mode on the module that you call")
    if scheduler.is_running:
        _refuse(record, "is in a forward or backward", "call graph_mode between steps")
    if enabled:
        for below in records:
            _check(below)
    for unit in before.values():
        unit.end()
    params = {param for group in scheduler.groups for param in group.params}
    functions_of_shards.difference_update(params)
    if enabled:
        functions_of_shards.update(params)
        for group in scheduler.groups:
            group.reshard()
            if not any(param.is_meta for param in group.params):
                group.follow_params()
        scheduler.wait_for_reductions()
        made: dict[UnitRecord, GraphUnit] = {below: GraphUnit(below) for below in records}
        inner = [unit for below, unit in made.items() if below is not record]
        made[record].begin_here(inner, compiler if compile else None)


def _graph_unit(record: UnitRecord) -> GraphUnit | None:
    module = record.modules[0]
    found = [module.__dict__.get("forward"), *module._forward_hooks.values()]
    for hook in found:
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, GraphUnit):
            return owner
    return None


def _check(record: UnitRecord) -> None:
    """Refuse what the operators do not do."""
    unit = record.unit
    if unit.ties:
        _refuse(
            record,
            "shares a parameter with another unit",
            "call fully_shard on a module that holds both places where it is used",
        )
    if not (unit.sync and unit.all_reduce):
        _refuse(
            record, "accumulates without communication", "call set_requires_gradient_sync(True)"
        )
    for group in unit.own_groups:
        for found, way_out in _unsupported(group):
            _refuse(record, found, way_out)


def _unsupported(group: ParamGroup) -> list[tuple[str, str]]:
    options, layout = group.options, group.layout
    transports = {segment.transport for segment in layout.segments}
    cases = (
        (
            Transport.EXTENSION in transports,
            "has parameters with all-gather hooks",
            "leave them out of graph mode's model",
        ),
        (bool(options.wire.gather or options.wire.reduce), "has a wire format", "reset it"),
        (group.between is not None, "is sharded over two levels", "shard it over one mesh dim"),
        (
            group.smaller_group is not None,
            "reshards to a smaller group",
            "call set_reshard_after_forward(True)",
        ),
        (group.offload is not None, "is offloaded", "leave offload_policy out"),
        (
            options.all_gather is not None or options.reduce_scatter is not None,
            "has custom collectives",
            "leave them out",
        ),
        (
            options.all_reduce_hook is not None or options.average is not None,
            "has a hook on its all-reduce",
            "remove it",
        ),
    )
    return [(found, way_out) for applies, found, way_out in cases if applies]


def _refuse(record: UnitRecord, found: str, way_out: str) -> None:
    raise coded(
        ShardingStateError,
        "graph-mode-refuses",
        f"unit '{record.unit.title}' {found}, which graph mode does not support; {way_out}",
    )

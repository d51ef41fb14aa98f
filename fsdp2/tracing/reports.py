"""Reports about a sharded model.

model ──> report ──> Report: printed as a table, with totals
                     groups: GroupReport("(root)", …), GroupReport("blocks.0", …), …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.facts import CODED as GATHERS
from fsdp2.core.facts import (
    COLLECTIVE_ALIGN_BYTES,
    MixedPrecisionPolicy,
    ParamGroup,
    Segment,
    Slot,
    Transport,
    Wire,
    codec_of,
    record_of,
    round_up,
    window_of,
)
from fsdp2.core.facts import DTYPE as FEEDBACK_DTYPE
from fsdp2.tracing.summaries import amount, table

WHOLE = "whole"
"""The transport of parameters that stay whole on every rank."""


@dataclass(frozen=True)
class GroupReport:
    """One parameter group.

    Attributes:
        name: name of its module below the model, "(root)" for the model itself.
        num_params: number of parameters.
        numel: number of elements, over all ranks.
        shard_bytes: bytes of its flat shard on one rank, including padding.
        unsharded_bytes: bytes while it is unsharded, including padding.
        padding_bytes: how many of ``shard_bytes`` hold no parameter, on average over ranks.
        copied_bytes: bytes of packed parameters that each rank copies into their slots after an
            all-gather. A reduction copies as many elements before its collective, in its dtype.
        transport: how it is gathered: "coalesced", "packed", "coded", "local", "extension" (tensor
            subclasses with all-gather hooks; their bytes are those of the tensors of a shard, which
            hooks may send in another dtype), or several joined with "+"; "whole" for parameters
            that are replicated on every rank: nothing is gathered.
        dims: shard dims of the parameters that are not sharded only on dim 0, by their name in the
            model; ``shard_placement_fn`` chose them, or dim 0 would have padded too much.
        window: how many units are prefetched while one computes; one number for all units below a
            root (`FSDPModule.set_tuning`).
        mp_policy: the mixed-precision policy that was passed to `fully_shard`.
        reshard_after_forward: whether forward reshards the parameters at its end: a bool, or the
            number of ranks to whose groups it reshards them. The default is ``False`` for the root:
            before the first forward, for ``model`` itself.
        gathers: all-gathers per step of one micro-batch: 2 if parameters are resharded after
            forward, otherwise 1; also 1 if all rows are kept and backward reuses them; 0 on one
            rank.
        gathered_bytes: bytes of the output of one all-gather, including padding.
        reduced_bytes: bytes of the input of one reduction on each rank, in the reduce dtype,
            including padding and without parameters that are frozen now. For "whole" parameters:
            their part of the one all-reduce of all such groups below a root.
        packed: the reason why parameters are packed, by their name in the model; the others are not
            listed.
        gather_format: the wire format of parameters (`FSDPModule.set_wire_format`), ``None`` if
            none is encoded; "int8 differences" if messages hold differences.
        reduce_format: the same for gradients, with additional options, as in "int4 rotated".
        residual_bytes: bytes of the residuals of error feedback on each rank, from the first
            backward on.
        exact: names in the model of the parameters that are sent without the format.
        levels: nodes, and ranks per node, if masters are sharded over both (`fsdp2.Levels`): the
            fields above then describe the level inside a node; otherwise ``None``.
        between_gathers: all-gathers between nodes per step of one micro-batch: one if node rows are
            kept, and further micro-batches do not add to it.
        between_format: formats of all-gathers and reductions between nodes, as in "int8 / int4";
            ``None`` if nothing is encoded.
        between_bytes: bytes of the output of these all-gathers and the input of one reduce-scatter
            between nodes on each rank, including padding and marks.
        flattened: names of the mesh dims from which the shard axis was flattened
            (`DataParallelMeshDims`): its collectives do not distinguish nodes, because ranks hold
            pieces in the order of ranks, node by node. `fsdp2.Levels` shards by node.
        kept_bytes: bytes of the rows that stay on each rank after an all-gather and are reused.
        reused_bytes: how many of ``gathered_bytes`` are sent only in a step's first all-gather.
    """

    name: str
    num_params: int
    numel: int
    shard_bytes: int
    unsharded_bytes: int
    padding_bytes: int
    copied_bytes: int
    transport: str
    dims: Mapping[str, tuple[int, ...]]
    window: int
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int
    gathers: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    packed: Mapping[str, str] = field(default_factory=dict)
    gather_format: str | None = None
    reduce_format: str | None = None
    residual_bytes: int = 0
    exact: Sequence[str] = ()
    levels: tuple[int, int] | None = None
    between_gathers: int = 0
    between_format: str | None = None
    between_bytes: int = 0
    flattened: Sequence[str] = ()
    kept_bytes: int = 0
    reused_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes of the collectives per step of one micro-batch, counted as full tensors."""
        again = max(self.gathers - 1, 0) * (self.gathered_bytes - self.reused_bytes)
        return min(self.gathers, 1) * self.gathered_bytes + again + self.reduced_bytes


@dataclass(frozen=True)
class Report:
    """A sharded model as a readable table: ``print(report(model))``.

    Attributes:
        groups: one row per group, in the order of registration of their modules.
    """

    groups: tuple[GroupReport, ...]

    def __str__(self) -> str:
        header = (
            "group",
            "params",
            "elements",
            "shard",
            "gathered",
            "padding",
            "per step",
            "travels",
        )
        whole = [group for group in self.groups if group.transport == WHOLE]
        others = [group for group in self.groups if group.transport != WHOLE]
        rows = [_row(group) for group in (*others, *whole)]
        total = (
            "all",
            f"{sum(g.num_params for g in self.groups):,}",
            f"{sum(g.numel for g in self.groups):,}",
            *(
                amount(sum(getattr(group, name) for group in self.groups))
                for name in ("shard_bytes", "unsharded_bytes", "padding_bytes", "step_bytes")
            ),
            "",
        )
        lines = table(header, [*_alike(rows), total], last=True)
        return "\n".join([*lines[:-1], lines[1], lines[-1]])


def _row(found: GroupReport) -> tuple[str, ...]:
    how = found.transport
    if found.gather_format or found.reduce_format:
        said = [f"{found.gather_format or 'exact'} / {found.reduce_format or 'exact'}"]
        said += [f"keeps {amount(found.kept_bytes)}"] if found.kept_bytes else []
        said += [f"{amount(found.residual_bytes)} of residuals"] if found.residual_bytes else []
        said += [f"{len(found.exact)} exact"] if found.exact else []
        how += f" ({', '.join(said)})"
    if found.levels is not None:
        nodes, local = found.levels
        often = "once" if found.between_gathers == 1 else f"{found.between_gathers} times"
        often += f", {found.between_format}" if found.between_format else ""
        how += f" in nodes of {local}, {amount(found.between_bytes)} between {nodes} ({often})"
    if found.flattened:
        how += f" (over {' x '.join(found.flattened)} at once)"
    if found.packed:
        reasons = dict.fromkeys(found.packed.values())
        how += f" ({len(found.packed)} packed: {'; '.join(reasons)})"
    return (
        found.name,
        f"{found.num_params:,}",
        f"{found.numel:,}",
        amount(found.shard_bytes),
        amount(found.unsharded_bytes),
        amount(found.padding_bytes),
        amount(found.step_bytes),
        how,
    )


def _alike(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge consecutive rows that differ only in their names."""
    found: list[tuple[str, ...]] = []
    runs: list[list[str]] = []
    for row in rows:
        if found and found[-1][1:] == row[1:]:
            runs[-1].append(row[0])
        else:
            found.append(row)
            runs.append([row[0]])
    return [
        (names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} alike", *row[1:])
        for names, row in zip(runs, found, strict=True)
    ]


def report(model: nn.Module) -> Report:
    """Return the units and groups of a model: print it before training.

    "per step" in the table is the number of bytes of the collectives per step of one micro-batch,
    counted as full tensors: the unsharded parameters, twice if they are resharded after forward,
    and the gradients.

    Args:
        model: a module that is sharded or contains sharded modules.

    Example::

        print(fsdp2.report(model))
        for group in fsdp2.report(model).groups:
            print(group.name, group.shard_bytes, group.transport)
    """
    names: dict[ParamGroup, list[str]] = {}
    windows: dict[ParamGroup, int] = {}
    freed: dict[ParamGroup, bool | int] = {}
    for name, module in model.named_modules():
        record = record_of(module)
        if record is None:
            continue
        units = [record.unit] if record.scheduler is None else record.scheduler.units
        for group in record.unit.own_groups:
            names.setdefault(group, []).append(name or "(root)")
            windows[group] = window_of(units)
            is_root = not name if record.scheduler is None else record.unit.is_root
            frees = record.unit.reshard_after_forward
            freed[group] = not is_root if frees is None else frees
            if freed[group] and group.smaller_group is not None:
                freed[group] = group.smaller_group.collectives.size
    params = {param: name for name, param in model.named_parameters()}
    return Report(
        tuple(
            _report(group, ", ".join(where), params, windows[group], freed[group])
            for group, where in names.items()
        )
    )


def _report(
    group: ParamGroup,
    name: str,
    params: Mapping[nn.Parameter, str],
    window: int,
    reshards: bool | int,
) -> GroupReport:
    gathers = 2 if reshards else 1
    layout, masters = group.layout, group.shard_layout
    assert layout is not None
    assert masters is not None
    between = gathers if group.between is not None and not group.keeps_rows else 1
    dims = group.params[0].axes.dims
    ranks = layout.world_size
    trained = {i for i, param in enumerate(group.params) if param.sharded.requires_grad}
    kept = reused = 0
    packed = {}
    extended = sum(_nbytes(param.local) for param in group.params if param.is_extended)
    gathered = extended * ranks
    for segment in layout.segments:
        gathered += _row_bytes(group, segment) * ranks
        if _stays(group, segment):
            reused += _row_bytes(group, segment) * ranks
            kept += segment.shard_numel * segment.full_dtype.itemsize * ranks
        for slot in segment.slots:
            if segment.transport is Transport.PACKED:
                param = group.params[slot.index]
                named = params.get(param.sharded, param.name)
                packed[named] = _why_packed(group, slot)
    sharded = ranks > 1
    wire = group.options.wire
    coded = sharded and (wire.gather or wire.reduce)
    return GroupReport(
        name=name,
        num_params=len(group.params),
        numel=sum(slot.numel for slot in layout.slots),
        shard_bytes=masters.shard_bytes + extended,
        unsharded_bytes=layout.gathered_bytes + extended * ranks,
        padding_bytes=masters.padding_bytes,
        copied_bytes=layout.copied_bytes,
        transport=WHOLE if group.is_whole else layout.transports,
        dims={
            params.get(param.sharded, param.name): param.cut.dims
            for param in group.params
            if param.cut.dims != (0,)
        },
        window=window,
        mp_policy=group.options.precision,
        reshard_after_forward=reshards,
        gathers=(1 if reused == gathered else gathers) if sharded else 0,
        gathered_bytes=gathered if sharded else 0,
        reduced_bytes=_reduced(group, trained) if sharded or group.replicas is not None else 0,
        packed=packed,
        gather_format=_gather_format(wire) if sharded else None,
        reduce_format=_reduce_format(wire) if sharded else None,
        residual_bytes=_residuals(group, trained) if coded and wire.feedback else 0,
        exact=[params.get(p.sharded, p.name) for p in group.params if p.exact] if coded else (),
        levels=None if group.between is None else (group.between.size, ranks),
        between_gathers=0 if group.between is None else between,
        between_format=_between_format(wire),
        between_bytes=_between(group, trained, between),
        flattened=() if dims is None or len(dims.shard_names) < 2 else dims.shard_names,
        kept_bytes=kept,
        reused_bytes=reused,
    )


def _nbytes(local: torch.Tensor) -> int:
    """Bytes of the plain tensors that it wraps, or its own."""
    if not is_traceable_wrapper_subclass(local):
        return local.nbytes
    return sum(_nbytes(getattr(local, name)) for name in local.__tensor_flatten__()[0])


def _gather_format(wire: Wire) -> str | None:
    return f"{wire.gather} differences" if wire.differences else wire.gather


def _stays(group: ParamGroup, segment: Segment) -> bool:
    """Whether its rows are kept after an all-gather; never for rows of a custom all-gather."""
    if segment.transport is Transport.CODED:
        return group.options.wire.differences
    travels = segment.transport not in (Transport.LOCAL, Transport.EXTENSION)
    return travels and group.keeps_whole_rows and group.options.all_gather is None


def _row_bytes(group: ParamGroup, segment: Segment) -> int:
    """Bytes of one rank's input of an all-gather."""
    numel, itemsize = segment.shard_numel, segment.full_dtype.itemsize
    wire = group.options.wire.gather
    if segment.transport is Transport.CODED and wire is not None:
        return GATHERS[wire].nbytes(numel)
    return numel * itemsize


def _reduce_format(wire: Wire) -> str | None:
    if wire.reduce is None:
        return None
    return wire.reduce + " rotated" * wire.rotate + " with feedback" * wire.feedback


def _reduced(group: ParamGroup, trained: Set[int]) -> int:
    """Bytes that one reduction's collectives take."""
    layout, wire = group.layout, group.options.wire
    assert layout is not None
    exact, coded = _reduced_numel(group, trained)
    nbytes = sum(numel * dtype.itemsize for dtype, numel in exact.items())
    if wire.reduce is not None:
        nbytes += sum(map(codec_of(wire.reduce, wire.rotate).nbytes, coded.values()))
    return nbytes * layout.world_size


def _residuals(group: ParamGroup, trained: Set[int]) -> int:
    """Bytes of a residual for each rank."""
    assert group.layout is not None
    _, coded = _reduced_numel(group, trained)
    return sum(coded.values()) * group.layout.world_size * FEEDBACK_DTYPE.itemsize


def _reduced_numel(
    group: ParamGroup, trained: Set[int]
) -> tuple[Counter[torch.dtype], Counter[torch.dtype]]:
    """Elements of a rank's pieces by reduce dtype: of exact gradients, and of one message each."""
    layout = group.layout
    assert layout is not None
    exact: Counter[torch.dtype] = Counter()
    coded: Counter[torch.dtype] = Counter()
    for segment in layout.segments:
        dtype = group.options.precision.reduce_dtype or segment.full_dtype
        for slot in segment.slots:
            if slot.index in trained:
                whole = group.options.wire.reduce is None or layout.world_size == 1
                found = exact if whole or group.params[slot.index].exact else coded
                found[dtype] += slot.shard_numel
    return exact, coded


def _between_format(wire: Wire) -> str | None:
    if wire.between_gather is None and wire.between_reduce is None:
        return None
    return f"{wire.between_gather or 'exact'} / {wire.between_reduce or 'exact'}"


def _between(group: ParamGroup, trained: Set[int], gathers: int) -> int:
    """Bytes of a step's collectives between nodes."""
    assert group.layout is not None
    pieces, between, wire = group.layout.pieces, group.between, group.options.wire
    if pieces is None or between is None:
        return 0
    gathered = 0
    numel: Counter[tuple[torch.dtype, bool]] = Counter()  # by reduce dtype, and whether coded
    members: Counter[tuple[torch.dtype, bool]] = Counter()
    for segment in pieces.segments:
        itemsize = segment.full_dtype.itemsize
        if segment.transport is Transport.CODED and wire.between_gather is not None:
            gathered += GATHERS[wire.between_gather].nbytes(segment.shard_numel)
        else:
            gathered += segment.shard_numel * itemsize
        for slot in segment.slots:
            if slot.index in trained:
                param = group.params[slot.index]
                dtype = group.options.precision.reduce_dtype or param.grad_dtype
                key = dtype, wire.between_reduce is not None and not param.exact
                numel[key] += slot.shard_numel
                members[key] += 1
    return (
        gathers * gathered + sum(_crossing(wire, key, numel[key], members[key]) for key in numel)
    ) * between.size


def _crossing(wire: Wire, key: tuple[torch.dtype, bool], numel: int, members: int) -> int:
    """Bytes that a rank gives to one node for the sums of so many elements."""
    (dtype, coded), name = key, wire.between_reduce
    multiple = max(COLLECTIVE_ALIGN_BYTES // dtype.itemsize, 1)
    if not coded or name is None:
        return round_up(numel + members, multiple) * dtype.itemsize
    marks = round_up(members, multiple) * dtype.itemsize
    return codec_of(name).nbytes(round_up(numel, multiple)) + marks


def _why_packed(group: ParamGroup, slot: Slot) -> str:
    if not group.collectives.coalesces:
        return "the backend does not coalesce"
    if not slot.in_order:
        return "pieces are not in order"
    if not slot.aligned(group.params[slot.index].dtype.itemsize):
        return "pieces are no multiple of 16 bytes"
    return "small"

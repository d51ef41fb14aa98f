"""Reports about a sharded model.

model ──> report ──> Report: printed as a table, with totals
                     groups: GroupReport("(root)", …), GroupReport("blocks.0", …), …
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.facts import (
    COLLECTIVE_ALIGN_BYTES,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ParamGroup,
    Segment,
    ShardedParam,
    Slot,
    Transport,
    UnitRecord,
    Wire,
    codec_of,
    record_of,
    reduction_spec,
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
        ranks: number of ranks among which each copy is sharded, inside a node with levels.
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
        reshard_after_backward: whether backward reshards them.
        offloaded: whether shards are in CPU memory, by an `OffloadPolicy`.
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
    ranks: int
    shard_bytes: int
    unsharded_bytes: int
    padding_bytes: int
    copied_bytes: int
    transport: str
    dims: Mapping[str, tuple[int, ...]]
    window: int
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int
    reshard_after_backward: bool
    offloaded: bool = False
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
        left: names of the parameters that no unit has, such as ignored ones.
    """

    groups: tuple[GroupReport, ...]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        header = (
            "group",
            "params",
            "elements",
            "shard",
            "gathered",
            "padding",
            "per step",
            "resharded after",
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
            "",
        )
        lines = table(header, [*_alike(rows), total], right=2)
        lines.insert(-1, lines[1])
        if self.left:
            lines.append(f"in no unit: {', '.join(self.left)}")
        return "\n".join(lines)


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
    if found.offloaded:
        how += ", offloaded"
    passes = ["forward"] if found.reshard_after_forward else []
    passes += ["backward"] if found.reshard_after_backward else []
    return (
        found.name,
        f"{found.num_params:,}",
        f"{found.numel:,}",
        amount(found.shard_bytes),
        amount(found.unsharded_bytes),
        amount(found.padding_bytes),
        amount(found.step_bytes),
        "" if found.transport == WHOLE else ", ".join(passes) or "no pass",
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
    records: dict[ParamGroup, UnitRecord] = {}
    for name, module in model.named_modules():
        record = record_of(module)
        if record is not None:
            for group in record.unit.own_groups:
                names.setdefault(group, []).append(name or "(root)")
                records[group] = record
    owners = {  # of what is registered now: a sharded parameter, or an unsharded one
        module._parameters.get(name): param
        for group in names
        for param in group.params
        for module, name in param.entries
    }
    params = [(owners.get(param), name) for name, param in model.named_parameters()]
    known = {param: name for param, name in params if param is not None}
    return Report(
        tuple(_report(group, names[group], records[group], known) for group in names),
        tuple(name for param, name in params if param is None),
    )


def _report(
    group: ParamGroup, where: list[str], record: UnitRecord, params: Mapping[ShardedParam, str]
) -> GroupReport:
    unit, scheduler = record.unit, record.scheduler
    reshards: bool | int | None = unit.reshard_after_forward
    if reshards is None:
        reshards = not (where[-1] == "(root)" if scheduler is None else unit.is_root)
    if reshards and group.smaller_group is not None:
        reshards = group.smaller_group.collectives.size
    gathers = 2 if reshards else 1
    layout, masters = group.layout, group.shard_layout
    between = gathers if group.between is not None and not group.keeps_rows else 1
    dims = group.params[0].axes.dims
    ranks = layout.world_size
    trained = {i for i, param in enumerate(group.params) if param.sharded.requires_grad}
    names = [params.get(param, param.name) for param in group.params]
    named = list(zip(names, group.params, strict=True))
    kept = reused = 0
    packed = {}
    extended = sum(_nbytes(param.local) for param in group.params if param.is_extended)
    gathered = extended * ranks
    for segment in layout.segments:
        row = _sent(segment, group.options.wire.gather) * ranks
        gathered += row
        if _stays(group, segment):
            reused += row
            kept += segment.shard_numel * segment.full_dtype.itemsize * ranks
        for slot in segment.slots:
            if segment.transport is Transport.PACKED:
                packed[names[slot.index]] = _why_packed(group, slot)
    sharded = ranks > 1
    wire = group.options.wire
    coded = sharded and (wire.gather or wire.reduce)
    sums = _sums(group, layout.segments, trained)
    reduced = sum(_message(*key, sum(numels), wire.rotate) for key, numels in sums.items())
    coded_sums = sum(sum(numels) for (_, codec), numels in sums.items() if codec is not None)
    residuals = coded_sums * ranks * FEEDBACK_DTYPE.itemsize if sharded and wire.feedback else 0
    return GroupReport(
        name=", ".join(where),
        num_params=len(group.params),
        numel=sum(slot.numel for slot in layout.slots),
        ranks=ranks,
        shard_bytes=masters.shard_bytes + extended,
        unsharded_bytes=layout.gathered_bytes + extended * ranks,
        padding_bytes=masters.padding_bytes,
        copied_bytes=layout.copied_bytes,
        transport=WHOLE if group.is_whole else layout.transports,
        dims={n: p.cut.dims for n, p in named if p.cut.dims != (0,)},
        window=window_of([unit] if scheduler is None else scheduler.units),
        mp_policy=group.options.precision,
        reshard_after_forward=reshards,
        reshard_after_backward=unit.reshard_after_backward,
        offloaded=isinstance(record.arguments.offload, CPUOffloadPolicy),
        gathers=(1 if reused == gathered else gathers) if sharded else 0,
        gathered_bytes=gathered if sharded else 0,
        reduced_bytes=reduced * ranks if sharded or group.replicas is not None else 0,
        packed=packed,
        gather_format=_gather_format(wire) if sharded else None,
        reduce_format=_reduce_format(wire) if sharded else None,
        residual_bytes=residuals,
        exact=[n for n, p in named if p.exact] if coded else (),
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


def _sent(segment: Segment, codec: str | None) -> int:
    """Bytes of one rank's input of an all-gather."""
    used = codec if segment.transport is Transport.CODED else None
    return _message(segment.full_dtype, used, segment.shard_numel)


def _reduce_format(wire: Wire) -> str | None:
    if wire.reduce is None:
        return None
    return wire.reduce + " rotated" * wire.rotate + " with feedback" * wire.feedback


_Sums = Mapping[tuple[torch.dtype, str | None], Sequence[int]]
"""Elements of a rank's piece of each gradient, by reduce dtype and format."""


def _sums(
    group: ParamGroup, segments: Iterable[Segment], trained: Set[int], between: bool = False
) -> _Sums:
    found: dict[tuple[torch.dtype, str | None], list[int]] = {}
    for slot in (slot for segment in segments for slot in segment.slots if slot.index in trained):
        spec = reduction_spec(group.options, group.params[slot.index], group.offload, group.device)
        inside = spec.codec if group.collectives.size > 1 else None
        codec = spec.between_codec if between else inside
        found.setdefault((spec.reduce_dtype, codec), []).append(slot.shard_numel)
    return found


def _message(dtype: torch.dtype, codec: str | None, numel: int, rotate: bool = False) -> int:
    """Bytes of one rank's piece."""
    return numel * dtype.itemsize if codec is None else codec_of(codec, rotate).nbytes(numel)


def _between_format(wire: Wire) -> str | None:
    if wire.between_gather is None and wire.between_reduce is None:
        return None
    return f"{wire.between_gather or 'exact'} / {wire.between_reduce or 'exact'}"


def _between(group: ParamGroup, trained: Set[int], gathers: int) -> int:
    """Bytes of a step's collectives between nodes."""
    pieces, between, wire = group.layout.pieces, group.between, group.options.wire
    if pieces is None or between is None:
        return 0
    found = 0
    for segment in pieces.segments:
        found += gathers * _sent(segment, wire.between_gather)
    for (dtype, codec), numels in _sums(group, pieces.segments, trained, between=True).items():
        multiple = max(COLLECTIVE_ALIGN_BYTES // dtype.itemsize, 1)
        numel, marks = sum(numels), len(numels)
        if codec is None:
            found += round_up(numel + marks, multiple) * dtype.itemsize
        else:
            found += _message(dtype, codec, round_up(numel, multiple))
            found += round_up(marks, multiple) * dtype.itemsize
    return found * between.size


def _why_packed(group: ParamGroup, slot: Slot) -> str:
    if not group.collectives.coalesces:
        return "the backend does not coalesce"
    if not slot.in_order:
        return "pieces are not in order"
    if not slot.aligned(group.params[slot.index].dtype.itemsize):
        return "pieces are no multiple of 16 bytes"
    return "small"

"""Which parameters a call is about, whether it may come now, and whether all ranks mean the same.

module ── selected_params ──> [SelectedParam(param, group, unit, names, entries), …], by modules
       ── require_idle ──> no forward or backward is under way
       ── MeshRanks ──> a few numbers that all ranks compare, or of which they take the largest
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.facts import (
    HIDDEN,
    Counts,
    GroupCollectives,
    ModuleEntry,
    Owners,
    ParamGroup,
    ProcessGroup,
    ShardedParam,
    Unit,
    all_units,
    broadcast_from_first,
    clean,
    device_of,
    follow_replaced,
    free_if_outdated,
    largest_over,
    managed_modules,
    operations_of,
    record_of_unit,
    records_below,
)

Names = Callable[[str], bool] | Set[str] | None
"""Which parameters: a predicate of a full name, full names, or all."""


@dataclass
class SelectedParam:
    """A managed parameter below a module.

    Attributes:
        param: the parameter.
        group: its group.
        unit: the unit that owns it.
        names: its full names below the module, the first registered first: several, where it is
            tied.
        entries: where it is registered, below the module or not.
    """

    param: ShardedParam
    group: ParamGroup
    unit: Unit
    names: list[str] = field(default_factory=list)
    entries: list[ModuleEntry] = field(default_factory=list)


def walk(module: nn.Module, recurse: bool) -> Iterable[tuple[str, nn.Module]]:
    """Prefixes and modules: all below, or those that belong to no unit below."""
    if not recurse:
        return [(prefix, member) for member, prefix in managed_modules((module,))]
    named = module.named_modules(remove_duplicate=False)
    return [(f"{name}." if name else "", member) for name, member in named]


def selected_params(module: nn.Module, recurse: bool) -> list[SelectedParam]:
    """The managed parameters below a module, each once."""
    units = all_units()
    known = {id(f) for u in units for g in u.own_groups for p in g.params for f in p.forms()}
    for record in records_below(module):
        for group in record.unit.own_groups:
            follow_replaced(group, known)
    owners = Owners(units)
    found: dict[ShardedParam, SelectedParam] = {}
    for prefix, member in walk(module, recurse):
        for key, registered in member._parameters.items():
            owned = None if registered is None else owners.of(registered)
            if owned is None:
                continue
            selected = found.get(owned.param)
            if selected is None:
                selected = found[owned.param] = SelectedParam(owned.param, owned.group, owned.unit)
                selected.entries = list(owned.param.entries)
            name = clean(prefix + key)
            if name not in selected.names:
                selected.names.append(name)
            if (member, key) not in selected.entries:
                selected.entries.append((member, key))
    return list(found.values())


def chosen(selection: Sequence[SelectedParam], names: Names) -> list[SelectedParam]:
    """Those of ``selection`` that ``names`` means.

    Raises:
        TypeError: ``names`` is neither callable nor a set of names.
        ValueError: it has a name that no parameter has.
    """
    if names is None:
        return list(selection)
    if callable(names):
        return [selected for selected in selection if any(map(names, selected.names))]
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise coded(
            TypeError,
            "gathered-names",
            f"gathered(names=…) takes a set of full names or a function of one, not {names!r}; "
            f"pass names as in named_parameters()",
        )
    wanted = set(names)
    known = {name for selected in selection for name in selected.names}
    for name in sorted(wanted - known):
        raise coded(
            ValueError,
            "gathered-unknown-name",
            f"gathered(names=…) names '{name}', but no sharded parameter below this module has "
            f"that name; pass names as in named_parameters()",
        )
    return [selected for selected in selection if wanted & set(selected.names)]


def require_idle(selection: Iterable[SelectedParam], function: str) -> None:
    """Raise if a forward or a backward of one of the units is running.

    Raises:
        ShardingStateError: it is.
    """
    for unit in {selected.unit: None for selected in selection}:
        record = record_of_unit(unit)
        scheduler = None if record is None else record.scheduler
        if scheduler is None:
            continue
        in_backward = scheduler.iteration.in_backward or torch._C._current_graph_task_id() != -1
        if in_backward or scheduler.is_running:
            during = "backward" if in_backward else "forward"
            raise coded(
                ShardingStateError,
                "full-during",
                f"{function}() was called during {during} of '{unit.title}'; call it after its "
                f"end, or after an exception call reset_iter_state() first",
            )


def require_memory(selection: Iterable[SelectedParam]) -> None:
    """Raise, naming the parameter, if one has no memory or is on another device than its mesh."""
    for selected in selection:
        group = selected.group
        home = group.device if group.offload is None else torch.device("cpu")
        selected.param.check_usable(home, group.offload is not None)


def reshard_unless_hidden(group: ParamGroup) -> None:
    """Register the sharded parameters; hidden ones stay for graphs that read them."""
    if group.state is not HIDDEN:
        operations_of(group).reshard()


def settle(selection: Iterable[SelectedParam], with_grads: bool) -> None:
    """Let the sharded parameters be registered, and nothing read or write them any more."""
    for group in {selected.group: None for selected in selection}:
        reshard_unless_hidden(group)
        group.settle()
    if with_grads:
        records = [record_of_unit(unit) for unit in {selected.unit: None for selected in selection}]
        for scheduler in {record.scheduler: None for record in records if record is not None}:
            if scheduler is not None:
                scheduler.wait_for_reductions()


def outdate(selection: Iterable[SelectedParam]) -> None:
    """Mark all unsharded parameters as out of date: shards were written."""
    Counts.steps += 1
    for group in {selected.group: None for selected in selection}:
        free_if_outdated(operations_of(group))


class MeshRanks:
    """Exchanges among all ranks of the meshes of some parameters, axis by axis.

    Args:
        params: the parameters; the same on all ranks.
        mesh: the mesh whose ranks take part if there are no parameters.

    Attributes:
        device: of its collectives.
    """

    def __init__(self, params: Iterable[ShardedParam], mesh: DeviceMesh | None = None) -> None:
        lines: dict[ProcessGroup, torch.device] = {}
        for param in params:
            device = param.axes.device
            for group in (param.axes.group, param.axes.replicas):
                if group is not None:
                    lines.setdefault(group, device)
            if param.parallel is not None:
                for group in param.parallel.mesh.get_all_groups():
                    lines.setdefault(group, device)
        if mesh is not None:
            device = device_of(mesh)
            lines.update(dict.fromkeys(mesh.get_all_groups(), device))
        self._scratch: torch.Tensor | None = None
        self._use(lines)

    @classmethod
    def of_group(cls, group: ProcessGroup, device: torch.device) -> MeshRanks:
        """Exchanges among the ranks of one process group."""
        made = cls(())
        made._use({group: device})
        return made

    def _use(self, lines: dict[ProcessGroup, torch.device]) -> None:
        self.device = next(iter(lines.values()), torch.device("cpu"))
        self._lines = [
            GroupCollectives(group, device, asynchronous=False)
            for group, device in lines.items()
            if group.size() > 1
        ]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first on every axis: rank 0."""
        return all(line.rank == 0 for line in self._lines)

    def spread(self, tensor: torch.Tensor) -> None:
        """Give all ranks rank 0's values of a contiguous tensor, in place.

        Each axis in turn: the last one's first ranks have them by then.
        """
        if tensor.numel():
            flat = tensor.view(-1).view(torch.uint8)
            for line in self._lines:
                broadcast_from_first(line.group, flat)

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the tensors that are sent: reused by each call, with the largest size."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = None
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._scratch[:nbytes].view(dtype).view(tuple(shape))

    def told(self, text: str) -> str:
        """Rank 0's text, on all ranks."""
        said = text.encode() if self.is_first else b""
        (length,) = self.largest([len(said)])
        letters = torch.zeros(length, dtype=torch.uint8)
        if length and said:
            letters.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        letters = letters.to(self.device)
        self.spread(letters)
        return bytes(letters.tolist()).decode()

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks; equally many on each."""
        return largest_over(self._lines, numbers)

    def is_alike(self, facts: object) -> bool:
        """Whether all ranks have the same facts, by their ``repr``."""
        digest = hashlib.sha256(repr(facts).encode()).digest()
        number = int.from_bytes(digest[:7], "little")
        return self.largest([number, -number]) == [number, -number]

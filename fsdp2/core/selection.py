"""Which parameters a call of `fully_shard` takes, and whether they can be sharded.

modules ── managed_modules ──> those that no earlier unit has
        ── managed_parameters ──> parameter -> the places that register it
        ── checked_parameters ──> parameter -> shard dim, or an error that names it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.tensor import Shard

from fsdp2.core.hooks import UnitHooks, hooks_of
from fsdp2.core.param import OWNER, ModuleSlot
from fsdp2.core.registrations import is_managed
from fsdp2.core.sharding import check_placement, check_shardable

PlacementFn = Callable[[nn.Parameter], Shard | None]


class NamedSlot(tuple[nn.Module, str, str]):
    """A module, the parameter's name in it, and its full name below the sharded module."""

    @property
    def name(self) -> str:
        return self[2]


def managed_parameters(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], new_to: UnitHooks | None = None
) -> dict[nn.Parameter, list[NamedSlot]]:
    """Parameters below ``modules`` that no other unit has; ``new_to`` a unit: those it has not."""
    found: dict[nn.Parameter, list[NamedSlot]] = {}
    for owner, prefix in managed_modules(modules):
        for key, param in owner._parameters.items():
            if param is None or param in ignored:
                continue
            if new_to is not None and (is_managed(owner, key) or (owner, key) in new_to.ignored):
                continue
            found.setdefault(param, []).append(NamedSlot((owner, key, prefix + key)))
    return found


def slots_of(modules: tuple[nn.Module, ...], params: set[nn.Parameter]) -> set[ModuleSlot]:
    return {
        (owner, key)
        for owner, _ in managed_modules(modules, into_units=True)
        for key, param in owner._parameters.items()
        if param is not None and param in params
    }


def managed_modules(
    modules: tuple[nn.Module, ...], into_units: bool = False
) -> Iterator[tuple[nn.Module, str]]:
    """Modules below ``modules`` that no other unit has, parents first, with name prefixes."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str]]:
        if module in seen:
            return
        seen.add(module)
        yield module, prefix
        for name, child in module.named_children():
            if into_units or hooks_of(child) is None:
                yield from walk(child, f"{prefix}{name}.")

    for module in modules:
        yield from walk(module, "")


def checked_parameters(
    found: dict[nn.Parameter, list[NamedSlot]], choose: PlacementFn | None
) -> dict[nn.Parameter, int]:
    """The shard dim of each; raises, naming the parameter, if one cannot be sharded."""
    dims = {param: _checked_parameter(slots[0], param, choose) for param, slots in found.items()}
    _check_one_device(found)
    _check_memory({slots[0].name: param for param, slots in found.items()})
    return dims


def _checked_parameter(slot: NamedSlot, param: nn.Parameter, choose: PlacementFn | None) -> int:
    owner, name = param.__dict__.get(OWNER), slot.name
    if owner is not None and is_managed(slot[0], slot[1]):
        raise ValueError(
            f"parameter '{name}' already belongs to the unit of {owner}; call fully_shard on "
            f"children before their parents"
        )
    if owner is not None:
        raise ValueError(
            f"parameter '{name}' is tied to a parameter of the unit of {owner}; put both modules "
            f"into one unit with fully_shard([module_a, module_b]) before sharding either"
        )
    check_shardable(name, param)
    return check_placement(name, param, choose(param) if choose is not None else None)


def _check_memory(params: dict[str, nn.Parameter]) -> None:
    """Two parameters over the same memory (`.data` assigned) would go apart once sharded."""
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in params.items():
        if param.is_meta or not param.numel():
            continue
        begin = int(param.storage_offset()) * param.element_size()
        end = begin + int(param.numel()) * param.element_size()
        ranges = taken.setdefault(param.untyped_storage()._cdata, [])
        for other_begin, other_end, other in ranges:
            if begin < other_end and other_begin < end:
                raise ValueError(
                    f"parameter '{name}' shares memory with parameter '{other}'; let both modules "
                    f"register one and the same nn.Parameter"
                )
        ranges.append((begin, end, name))


def _check_one_device(found: dict[nn.Parameter, list[NamedSlot]]) -> None:
    meta = [slots[0].name for param, slots in found.items() if param.is_meta]
    real = [slots[0].name for param, slots in found.items() if not param.is_meta]
    if meta and real:
        raise ValueError(
            f"parameter '{meta[0]}' is on the meta device and '{real[0]}' is not; materialise "
            f"all parameters of a unit, or none"
        )

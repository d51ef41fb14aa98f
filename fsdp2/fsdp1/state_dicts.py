"""The contents of a model's ``state_dict()`` and ``load_state_dict()``: full or sharded tensors.

    set_state_dict_type ──> settings of each unit below, and hooks on the modules that are its own
    model.state_dict()
      the first module        ranks compare their settings, parameters become sharded
      each module             DTensor ── made_whole ──> plain tensor      one parameter at a time
    model.load_state_dict()
      each module             plain tensor ── cut_rows ──> DTensor        no communication

Units without settings are unaffected: their state dicts hold DTensors, and nothing here runs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import RankMismatchError, coded
from fsdp2.core.facts import (
    ModuleEntry,
    Owners,
    ShardedParam,
    UnitRecord,
    all_units,
    is_extended,
    local_of,
    managed_modules,
    piece_of,
    records_below,
    with_dtype,
    wrap_local,
)
from fsdp2.fsdp1.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp2.full.gathering import is_held
from fsdp2.full.selection import MeshRanks, SelectedParam, require_idle, selected_params, settle
from fsdp2.full.unsharding import cut_rows, made_whole

C = TypeVar("C")

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}

_settings: weakref.WeakKeyDictionary[UnitRecord, StateDictSettings] = weakref.WeakKeyDictionary()
_records: weakref.WeakKeyDictionary[nn.Module, weakref.ref[UnitRecord]]
_records = weakref.WeakKeyDictionary()
"""For each module with hooks, the unit that it belongs to."""


# ---- what users set


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the contents of state dicts of the units at and below a module.

    It applies to ``state_dict()`` of the module and of modules below, wherever it is called, and to
    `optim_state_dict`. All ranks must choose the same. Full tensors are created one parameter at a
    time. Loading accepts full tensors as well as DTensors of the same mesh, whatever the setting.

    Args:
        module: a wrapper, or any module with units below.
        state_dict_type: a `StateDictType`, fsdp2's or torch's.
        state_dict_config: the config of that type, fsdp2's or torch's. ``None`` (default): a new
            one.
        optim_state_dict_config: the same for the optimizer's.

    Returns:
        The earlier setting.

    Raises:
        NotImplementedError: the type is ``LOCAL_STATE_DICT``.
        RuntimeError: a config is of another type than ``state_dict_type``.
        ValueError: there is no unit, or units below have different settings.

    Example::

        FSDP.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        )
        weights = model.state_dict()        # empty on other ranks than the first
    """
    kind = _checked_type(state_dict_type)
    kinds = _CONFIGS[kind]
    config = _checked_config(state_dict_config, kinds[0], "state_dict_config")
    optim_config = _checked_config(optim_state_dict_config, kinds[1], "optim_state_dict_config")
    before = get_state_dict_type(module)
    for record in records_below(module):
        _settings[record] = StateDictSettings(kind, config, optim_config)
        _watch(record)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings of state dicts of the units at and below a module.

    Args:
        module: a wrapper, or any module with units below. Without a setting, wrappers have full
            state dicts, and units of `fully_shard` have sharded ones.

    Raises:
        ValueError: there is no unit, or units below have different settings.
    """
    found = [settings_of(record) for record in records_below(module)]
    if not found:
        raise coded(
            ValueError,
            "state-dict-no-units",
            f"{type(module).__name__} has no sharded modules, so a type of state dicts has no "
            f"effect; wrap it, or call fully_shard on it",
        )
    for other in found[1:]:
        if other != found[0]:
            raise coded(
                ValueError,
                "state-dict-types-below",
                f"sharded modules below {type(module).__name__} have state dicts of different "
                f"types, {_words(found[0])} and {_words(other)}; set one type on the outermost",
            )
    return found[0]


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """A context with the settings of `set_state_dict_type`; it restores the earlier ones at its
    end.

    Args:
        module: as for `set_state_dict_type`, like all other arguments.
        state_dict_type: a `StateDictType`.
        state_dict_config: the model's config. ``None`` (default): a new one.
        optim_state_dict_config: the optimizer's config. ``None`` (default): a new one.

    Example::

        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=path)
    """
    records = records_below(module)
    before = {record: _settings.get(record) for record in records}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for record, settings in before.items():
            if settings is None:
                _settings.pop(record, None)
            else:
                _settings[record] = settings


def use_full_state_dicts(record: UnitRecord) -> None:
    """Set the initial state of a wrapper's unit: torch's default."""
    _settings[record] = StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )
    _watch(record)


def settings_of(record: UnitRecord) -> StateDictSettings:
    """Those of a unit; sharded ones by default."""
    found = _settings.get(record)
    if found is None:
        found = StateDictSettings(
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(_use_dtensor=True),
            ShardedOptimStateDictConfig(_use_dtensor=True),
        )
    return found


def _checked_type(value: object) -> StateDictType:
    for member in StateDictType:
        if member == value:
            if member == StateDictType.LOCAL_STATE_DICT:
                raise coded(
                    NotImplementedError,
                    "state-dict-local",
                    "LOCAL_STATE_DICT is the flat layout of torch's FSDP, which fsdp2 does not "
                    "have; use SHARDED_STATE_DICT, whose checkpoints "
                    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts to "
                    "full ones, and use torch's FSDP to save existing flat state dicts as "
                    "FULL_STATE_DICT",
                )
            return member
    raise coded(
        TypeError,
        "state-dict-type",
        f"set_state_dict_type takes a member of StateDictType, not {value!r}; import it from "
        f"fsdp2.fsdp1",
    )


def _checked_config(value: C | None, kind: type[C], argument: str) -> C:
    if value is None:
        return kind()
    offload = getattr(value, "offload_to_cpu", None)
    if type(value).__name__ == kind.__mro__[1].__name__ and offload is not None:
        made: Any = kind  # of the class that torch's documentation passes for any type
        return cast(C, made(offload_to_cpu=offload))
    if type(value).__name__ != kind.__name__ or offload is None:
        raise coded(
            RuntimeError,
            "state-dict-config",
            f"set_state_dict_type({argument}=…) takes a {kind.__name__} for this type, not "
            f"{type(value).__name__}; pass one, or leave it out",
        )
    return value


def _words(settings: StateDictSettings) -> str:
    return f"{settings.state_dict_type.name} with {settings.state_dict_config}"


# ---- hooks


def _watch(record: UnitRecord) -> None:
    """Let the modules that belong to a unit, and to none below, have hooks; each once."""
    for member, _ in managed_modules(record.modules):
        known = member in _records
        _records[member] = weakref.ref(record)
        if not known:
            member.register_state_dict_pre_hook(_before_save)
            member.register_state_dict_post_hook(_after_save)
            member.register_load_state_dict_pre_hook(_before_load)


def _record_of(module: nn.Module) -> UnitRecord | None:
    """The record of the unit to which a module with hooks belongs."""
    reference = _records.get(module)
    return None if reference is None else reference()


class _Call:
    """One call of ``state_dict()``, from the first module with settings on."""

    current: _Call | None = None

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self._module, self._prefix = weakref.ref(module), prefix
        self._below = {id(member) for member in module.modules()}
        self.destination: object = None
        self.whole: dict[ShardedParam, torch.Tensor | None] = {}  # made whole: tied ones once
        selection = selected_params(module, recurse=True)
        require_idle(selection, "state_dict")
        ranks = MeshRanks(selected.param for selected in selection)
        _require_alike(module, selection, ranks)
        self.is_first = ranks.is_first
        self.owned: dict[ModuleEntry, SelectedParam] = {
            entry: selected for selected in selection for entry in selected.entries
        }
        settle([s for s in selection if not is_held(s.param)], with_grads=False)

    def begins_at(self, module: nn.Module, prefix: str) -> bool:
        """Whether this is the module that the call came to first."""
        return self._module() is module and self._prefix == prefix

    def encloses(self, module: nn.Module, prefix: str) -> bool:
        """Whether a module that is about to be saved is below; not after a call that raised."""
        first = self._module()
        below = prefix != self._prefix and prefix.startswith(self._prefix)
        return below and first is not None and id(module) in self._below


def _require_alike(module: nn.Module, selection: Sequence[SelectedParam], ranks: MeshRanks) -> None:
    chosen = [repr(settings_of(record)) for record in records_below(module)]
    facts = chosen, [(selected.names, str(selected.param.dtype)) for selected in selection]
    if not ranks.is_alike(facts):
        raise coded(
            RankMismatchError,
            "state-dict-ranks",
            "ranks called state_dict() with different types of state dicts, or on different "
            "models; set the same type with the same configuration on all ranks",
        )


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    call, record = _Call.current, _record_of(module)
    if record is None or record not in _settings:
        return
    if call is None or not call.encloses(module, prefix):
        _Call.current = None
        _Call.current = _Call(module, prefix)


def _after_save(module: nn.Module, destination: dict[str, Any], prefix: str, _: object) -> None:
    call, record = _Call.current, _record_of(module)
    if call is None or record is None or record not in _settings:
        return
    try:
        if call.destination is not destination:  # another one below a hook of the user's
            call.destination = destination
            call.whole.clear()
        settings = settings_of(record)
        if settings.state_dict_type == StateDictType.FULL_STATE_DICT:
            _make_full(module, destination, prefix, settings.state_dict_config, call)
        elif settings.state_dict_config.offload_to_cpu:
            for key in _own_keys(module, prefix):
                if isinstance(destination.get(key), torch.Tensor):
                    destination[key] = destination[key].cpu()
    except BaseException:
        _Call.current = None
        raise
    if call.begins_at(module, prefix):
        _Call.current = None


def _own_keys(module: nn.Module, prefix: str) -> list[str]:
    return [f"{prefix}{name}" for name in (*module._parameters, *module._buffers)]


def _make_full(
    module: nn.Module, destination: dict[str, object], prefix: str, config: Any, call: _Call
) -> None:
    """Put whole tensors in the place of a module's DTensors, or nothing."""
    only_first = bool(getattr(config, "rank0_only", False))
    for name in module._parameters:
        selected = call.owned.get((module, name))
        key = prefix + name
        if selected is None or key not in destination or is_held(selected.param):
            continue
        if selected.param not in call.whole:
            whole = made_whole(selected.param, selected.param.local, everywhere=not only_first)
            if whole is not None and config.offload_to_cpu:
                whole = whole.cpu()
            call.whole[selected.param] = whole
        destination[key] = call.whole[selected.param]
    if only_first and not call.is_first:
        for key in (*_own_keys(module, prefix), f"{prefix}_extra_state"):
            destination.pop(key, None)
    elif config.offload_to_cpu:
        for key in _own_keys(module, prefix):
            held = destination.get(key)
            if isinstance(held, torch.Tensor) and held.device.type != "cpu":
                destination[key] = held.cpu()


# ---- loading


def _before_load(
    module: nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    local_metadata: dict[str, object],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put DTensors of this rank's rows in the place of a module's whole tensors."""
    record = _record_of(module)
    if record is None or record not in _settings:
        return
    owners = _owners_of(module, record)
    for name, registered in module._parameters.items():
        owned = None if registered is None else owners.of(registered)
        param, value = None if owned is None else owned.param, state_dict.get(prefix + name)
        if param is None or not isinstance(registered, DTensor):
            continue
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if is_sharded_tensor(value):
            rows = rows_of_sharded_tensor(param, value)
            if rows is None:
                state_dict.pop(prefix + name)
                error_msgs.append(other_rows(prefix + name))
                continue
            state_dict[prefix + name] = as_dtensor(param, rows)
            continue
        if is_extended(param.local) or value.shape != registered.shape:
            continue  # nn.Module says what is wrong
        rows = cut_rows(param, value)
        if local_metadata.get("assign_to_params_buffers", False):
            rows = rows.to(param.local.device).clone()
        state_dict[prefix + name] = as_dtensor(param, rows)


def _owners_of(module: nn.Module, record: UnitRecord) -> Owners:
    """The units of a unit's module's parameters; all units if it is tied to another unit's."""
    owners = Owners([record.unit])
    for param in module._parameters.values():
        if isinstance(param, DTensor) and owners.of(param) is None:
            return Owners(all_units())
    return owners


def as_dtensor(param: ShardedParam, rows: torch.Tensor) -> DTensor:
    """Rows of a parameter, or of a state that is shaped like it, as a DTensor sharded like it."""
    spec = param.sharded._spec  # type: ignore[attr-defined]  # a DTensor
    return wrap_local(rows, with_dtype(spec, rows.dtype))


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Whether it is the class in sharded state dicts of torch's FSDP1 without a mesh."""
    return isinstance(value, ShardedTensor)


def rows_of_sharded_tensor(param: ShardedParam, value: ShardedTensor) -> torch.Tensor | None:
    """This rank's rows in a ``ShardedTensor``; ``None`` if it has others."""
    local = local_of(param.sharded)
    if tuple(value.metadata().size) != tuple(param.sharded.shape) or param.parallel is not None:
        return None
    shards = value.local_shards()
    if not shards and not local.numel():
        return local.new_empty(local.shape)
    first, _ = piece_of(param.sharded.shape[0], param.axes.size, param.axes.rank)
    if len(shards) != 1 or param.cut.dims != (0,) or shards[0].tensor.shape != local.shape:
        return None
    if local.numel() and shards[0].metadata.shard_offsets[0] != first:
        return None
    found: torch.Tensor = shards[0].tensor
    return found.detach()


def other_rows(name: str) -> str:
    """The sentence for a ``ShardedTensor`` of other rows than this rank's."""
    return (
        f"'{name}' is a ShardedTensor of torch's FSDP1 with other rows than this rank's; load it "
        f"with torch.distributed.checkpoint, or save it as FULL_STATE_DICT"
    )

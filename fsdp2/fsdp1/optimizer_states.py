"""An optimizer's state dicts by full names, full or sharded, and loading them.

    optim.state_dict()      {"state": {0: {"exp_avg": DTensor, "step": tensor}}, "param_groups": …}
      _by_name              {"state": {"blocks.0.weight": {…}}, "param_groups": names}
        full                rows ── made_whole ──> plain tensors, as of an unsharded model
        sharded             DTensors
    _to_load                plain tensors ── cut_rows ──> DTensors, by position in the optimizer
                            or ── scattered_rows ──> from the first rank, one tensor at a time

A tensor of its parameter's shape is sharded like the parameter. Others are copies, on each rank: a
step count, the row and column statistics of Adafactor. torch's older functions are `_by_name` and
`_to_load` with fixed settings.
"""

from __future__ import annotations

import base64
import copy
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.core.errors import RankMismatchError, coded, resaid
from fsdp2.core.facts import ProcessGroup, ShardedParam, clean_as_fsdp1, local_of
from fsdp2.fsdp1.config import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
)
from fsdp2.fsdp1.state_dicts import (
    as_dtensor,
    get_state_dict_type,
    is_sharded_tensor,
    other_rows,
    rows_of_sharded_tensor,
)
from fsdp2.full.gathering import require_released
from fsdp2.full.selection import MeshRanks, require_idle, selected_params, settle
from fsdp2.full.unsharding import cut_rows, made_whole, scattered_rows

StateDict = dict[str, Any]
"""An optimizer's: "state" and "param_groups"."""

OptimInput = list[dict[str, object]] | Iterable[nn.Parameter] | None
"""The constructor argument of an optimizer."""


# ---- by name


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict | None = None,
    group: ProcessGroup | None = None,
) -> StateDict:
    """Return an optimizer's state dict by full names, of the type that `set_state_dict_type` chose.

    All ranks must call it. Full tensors are created one at a time; sharded ones are the optimizer's
    own memory, unless they are offloaded from a device.

    Args:
        model: the module whose parameters the optimizer has.
        optim: the optimizer.
        optim_state_dict: its state dict. ``None`` (default): ``optim.state_dict()``.
        group: the ranks that compare their states. ``None`` (default): those of the meshes.

    Returns:
        ``{"state": {name: {…}}, "param_groups": […]}``; with ``rank0_only`` ``{}`` on ranks other
        than the first. A tied parameter uses its first name.

    Raises:
        RankMismatchError: the states or settings of ranks differ.
        ValueError: a parameter of the optimizer is not in the model.

    Example::

        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            states = FSDP.optim_state_dict(model, optimizer)
    """
    config = get_state_dict_type(model).optim_state_dict_config
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _by_name(model, _held(model, optim), given, config, group)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: ProcessGroup | None = None,
) -> StateDict:
    """Return a full state dict by names, in CPU memory; as `optim_state_dict`, whatever the
    setting.

    Args:
        model: the module whose parameters the optimizer has.
        optim: the optimizer.
        optim_input: the constructor argument of the optimizer. ``None`` (default): not needed.
        rank0_only: whether ranks other than the first get ``{}``. Default ``True``.
        group: as for `optim_state_dict`.
    """
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    return _by_name(model, _held(model, optim, optim_input), optim.state_dict(), config, group)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup | None = None
) -> StateDict:
    """Return a sharded state dict of DTensors by names; as `optim_state_dict`, whatever the
    setting.

    Args:
        model: the module whose parameters the optimizer has.
        optim: the optimizer.
        group: as for `optim_state_dict`.
    """
    config = ShardedOptimStateDictConfig()
    return _by_name(model, _held(model, optim), optim.state_dict(), config, group)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> StateDict:
    """Return the same states by names, or by positions in an optimizer.

    This moves a full state dict into an unsharded model, and back.

    Args:
        optim_state_dict: the states, by either.
        optim_state_key_type: an `OptimStateKeyType`, fsdp2's or torch's.
        model: a module, sharded or not, whose parameters the optimizer has.
        optim_input: the constructor argument of the optimizer. ``None`` (default): ``optim``, or
            otherwise ``model.parameters()``.
        optim: the optimizer. Default ``None``.

    Raises:
        TypeError: ``optim_state_key_type`` is not an `OptimStateKeyType`.
        ValueError: some states are by name and others by position, or one is not the model's.

    Example::

        states = FSDP.full_optim_state_dict(model, optimizer)
        plain = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, plain_model)
        plain_optimizer.load_state_dict(plain)
    """
    to_names = optim_state_key_type == OptimStateKeyType.PARAM_NAME
    if not to_names and optim_state_key_type != OptimStateKeyType.PARAM_ID:
        raise coded(
            TypeError,
            "optim-key-type",
            f"rekey_optim_state_dict takes a member of OptimStateKeyType, not "
            f"{optim_state_key_type!r}; import it from fsdp2.fsdp1",
        )
    groups = optim_state_dict.get("param_groups", [])
    keys = [*optim_state_dict["state"], *(key for group in groups for key in group["params"])]
    kinds = {type(key) for key in keys}
    if kinds - {str} and kinds - {int}:
        raise coded(
            ValueError,
            "optim-keys-mixed",
            "rekey_optim_state_dict got states by name and by position at once; pass the result "
            "of full_optim_state_dict() or of an optimizer's state_dict()",
        )
    if kinds <= {str if to_names else int}:
        return optim_state_dict
    held = _held(model, optim, optim_input)
    other: Mapping[Any, Any] = held.first_names if to_names else held.places
    for key in keys:
        if key not in other:
            raise coded(
                ValueError,
                "optim-key-unknown",
                f"rekey_optim_state_dict got a state of {key!r}, which is not a parameter that "
                f"model and optimizer share; pass the model and the optimizer to which these "
                f"states belong",
            )
    return {
        "state": {other[key]: state for key, state in optim_state_dict["state"].items()},
        "param_groups": [
            _with(each, sorted(other[key] for key in each["params"])) for each in groups
        ],
    }


# ---- into an optimizer


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: ProcessGroup | None = None,
) -> StateDict:
    """Convert a state dict by names into the argument of ``optim.load_state_dict()``.

    Args:
        model: the module whose parameters the optimizer has.
        optim: the optimizer.
        optim_state_dict: full or sharded, by names, from `optim_state_dict`, torch's FSDP1 or an
            unsharded model. Full and ``rank0_only``: other ranks' are not read.
        is_named_optimizer: whether the optimizer's own state dicts are by names. Default ``False``.
        load_directly: whether the result is loaded, too. Default ``False``.
        group: as for `optim_state_dict`.

    Raises:
        ValueError: the state dict does not fit the model and the optimizer; nothing is loaded in
            this case.
        RankMismatchError: the models of ranks differ.

    Example::

        states = FSDP.optim_state_dict_to_load(model, optimizer, states)
        optimizer.load_state_dict(states)
    """
    config = get_state_dict_type(model).optim_state_dict_config
    held = _held(model, optim, named=is_named_optimizer)
    found = _to_load(model, held, optim_state_dict, _only_first(config), group)
    if load_directly:
        optim.load_state_dict(found)
    return found


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> StateDict:
    """Convert a full state dict that each rank has for loading into an optimizer; no communication.

    Args:
        full_optim_state_dict: by names.
        model: the module whose parameters the optimizer has.
        optim_input: the constructor argument of the optimizer. ``None`` (default): ``optim``, or
            otherwise ``model.parameters()``.
        optim: the optimizer. Default ``None``.

    Raises:
        ValueError: it does not fit the model and the optimizer.
    """
    return _to_load(model, _held(model, optim, optim_input), full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
) -> StateDict:
    """Convert a sharded state dict by names for loading into an optimizer.

    Args:
        sharded_optim_state_dict: from `sharded_optim_state_dict`.
        model: the module whose parameters the optimizer has.
        optim: the optimizer.

    Raises:
        ValueError: it does not fit the model and the optimizer.
    """
    return _to_load(model, _held(model, optim), sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> StateDict:
    """Convert a full state dict that only the first rank has for loading into an optimizer.

    The first rank sends tensors one at a time. Other ranks receive only their shard; with replicas
    (HSDP), the first rank of each replica holds one full tensor meanwhile.

    Args:
        full_optim_state_dict: on the first rank, by names; not read on others.
        model: the module whose parameters the optimizer has.
        optim_input: the constructor argument of the optimizer. ``None`` (default): ``optim``, or
            otherwise ``model.parameters()``.
        optim: the optimizer. Default ``None``.
        group: as for `optim_state_dict`.

    Raises:
        ValueError: it does not fit the model and the optimizer; on all ranks.
        RankMismatchError: the models of ranks differ.
    """
    return _to_load(model, _held(model, optim, optim_input), full_optim_state_dict, True, group)


# ---- which parameter is which


def _only_first(config: OptimStateDictConfig) -> bool:
    """Whether other ranks than the first have nothing; `config` is fsdp2's or torch's."""
    return bool(getattr(config, "rank0_only", False))


@dataclass(frozen=True)
class _Held:
    """The parameters of an optimizer, in its order, and what state dicts call them."""

    params: list[torch.Tensor]
    names: list[list[str]]  # all full names of each, the first registered first
    keys: list[int | str]  # of the optimizer's own state dicts
    groups: list[int] | None  # the size of each parameter group, if that is known
    units: dict[int, ShardedParam]  # by id, of those that units manage

    @property
    def places(self) -> dict[str, int]:
        return {name: at for at, names in enumerate(self.names) for name in names}

    @property
    def first_names(self) -> dict[int | str, str]:
        """By position, and by every name."""
        found: dict[int | str, str] = {at: names[0] for at, names in enumerate(self.names)}
        return found | {name: names[0] for names in self.names for name in names}

    def ranks(self, group: ProcessGroup | None) -> MeshRanks:
        managed = list(self.units.values())
        if group is None or not managed:
            return MeshRanks(managed)
        return MeshRanks.of_group(group, managed[0].axes.device)


def _held(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput = None,
    named: bool = False,
) -> _Held:
    selection = selected_params(model, recurse=True)
    require_idle(selection, "optim_state_dict")
    require_released(selection, "optim_state_dict")
    settle(selection, with_grads=False)
    raw: dict[int, list[str]] = {}
    for name, param in nn.Module.named_parameters(model, remove_duplicate=False):
        raw.setdefault(id(param), []).append(name)
    names = {key: list(dict.fromkeys(map(clean_as_fsdp1, each))) for key, each in raw.items()}
    for selected in selection:  # an optimizer may hold what another was registered in place of
        for former in selected.param.absorbed:
            names.setdefault(id(former.sharded), selected.names)
    params, groups = _params_of(model, optim, optim_input)
    for at, each in enumerate(params):
        if id(each) not in names:
            raise coded(
                ValueError,
                "optim-of-another-model",
                f"the optimizer's parameter {at} of shape {tuple(each.shape)} does not belong to "
                f"{type(model).__name__}; pass the model whose parameters the optimizer has, and "
                f"create the optimizer after wrapping",
            )
    keys: list[int | str] = [raw[id(p)][0] for p in params] if named else list(range(len(params)))
    units = {id(selected.param.sharded): selected.param for selected in selection}
    return _Held(params, [names[id(each)] for each in params], keys, groups, units)


def _params_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput
) -> tuple[list[torch.Tensor], list[int] | None]:
    """An optimizer's parameters, and the number in each group."""
    if optim_input is None and optim is None:
        return list(model.parameters()), None
    given: list[Any] = list(
        optim.param_groups if optim_input is None and optim else optim_input or ()
    )
    if not given or not isinstance(given[0], dict):
        return given, [len(given)]
    lists = [
        [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for group in given
    ]
    return [param for each in lists for param in each], [len(each) for each in lists]


def _with(group: Mapping[str, Any], params: Sequence[object]) -> StateDict:
    """A copy of a parameter group's options, with other keys of parameters."""
    options = {key: value for key, value in group.items() if key != "params"}
    return {**copy.deepcopy(options), "params": list(params)}


# ---- out of an optimizer


def _is_rows(value: object, param: torch.Tensor, managed: ShardedParam | None) -> bool:
    """Whether a state is sharded like its parameter."""
    if not isinstance(value, torch.Tensor) or managed is None or value.dim() == 0:
        return False
    if isinstance(value, DTensor):
        return value.shape == param.shape and value.placements == param.placements  # type: ignore[attr-defined]  # managed: a DTensor
    return value.shape == local_of(param).shape


def _with_state(
    states: Mapping[object, StateDict], held: _Held
) -> Iterator[tuple[str, torch.Tensor, StateDict]]:
    """(name, parameter, state), in the optimizer's order; of those that have state."""
    by_name = {clean_as_fsdp1(key): state for key, state in states.items() if isinstance(key, str)}
    for at, (param, names) in enumerate(zip(held.params, held.names, strict=True)):
        state = states.get(at)
        for name in names if state is None else ():
            state = by_name.get(name, state)
        if state is not None:
            yield names[0], param, state


@torch.no_grad()
def _by_name(
    model: nn.Module,
    held: _Held,
    given: StateDict,
    config: OptimStateDictConfig,
    group: ProcessGroup | None,
) -> StateDict:
    ranks, states = held.ranks(group), given["state"]
    facts = [
        (
            name,
            key,
            _is_rows(state[key], param, held.units.get(id(param))),
            type(state[key]),
            getattr(state[key], "dtype", None),
        )
        for name, param, state in _with_state(states, held)
        for key in sorted(state, key=str)
    ]
    if not ranks.is_alike((config, facts)):
        raise coded(
            RankMismatchError,
            "optim-state-ranks",
            "ranks called optim_state_dict() with different settings, or on optimizers whose "
            "states differ; set the same type on all ranks, and step all optimizers alike",
        )
    found: dict[object, object] = {}
    for name, param, state in _with_state(states, held):
        managed = held.units.get(id(param))
        found[name] = {key: _shown(value, param, managed, config) for key, value in state.items()}
        if _only_first(config) and not ranks.is_first:
            found.clear()
    if _only_first(config) and not ranks.is_first:
        return {}
    first = held.first_names
    for key, value in states.items():
        if (clean_as_fsdp1(key) if isinstance(key, str) else key) not in first:
            warnings.warn(
                f"the optimizer's state {key!r} belongs to no parameter of "
                f"{type(model).__name__}; it is copied as it is",
                stacklevel=3,
            )
            found[key] = value
    if "param_groups" not in given:
        return {"state": found}
    groups = []
    for each in given["param_groups"]:
        keys = [clean_as_fsdp1(key) if isinstance(key, str) else key for key in each["params"]]
        groups.append(_with(each, [first[key] for key in keys]))
    return {"state": found, "param_groups": groups}


def _shown(
    value: object,
    param: torch.Tensor,
    managed: ShardedParam | None,
    config: OptimStateDictConfig,
) -> object:
    """A state as a state dict has it; ``None`` in place of a whole tensor where it is not kept."""
    if not isinstance(value, torch.Tensor):
        return value
    made: torch.Tensor | None = value
    full = hasattr(config, "rank0_only")  # the config of full ones, fsdp2's or torch's
    if managed is not None and _is_rows(value, param, managed):
        if full:
            made = made_whole(managed, local_of(value), everywhere=not _only_first(config))
        elif not isinstance(value, DTensor):
            made = as_dtensor(managed, value)
    elif full:
        made = value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
    return made.cpu() if made is not None and config.offload_to_cpu else made


# ---- into an optimizer


_Plan = tuple[dict[int, StateDict], dict[object, object], list[StateDict] | None]
"""The contents to load: states by position, states of no parameter, and groups."""


def _is_sent(value: object) -> bool:
    return isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0)


@torch.no_grad()
def _to_load(
    model: nn.Module,
    held: _Held,
    given: StateDict | None,
    only_first: bool = False,
    group: ProcessGroup | None = None,
) -> StateDict:
    ranks = held.ranks(group) if only_first else None
    plan = _planned(given, held, model) if ranks is None else _told(model, held, given, ranks)
    states, others, groups = plan
    found: dict[object, object] = {
        held.keys[at]: {key: _own_part(value, at, held, ranks) for key, value in state.items()}
        for at, state in states.items()
    }
    loaded: StateDict = {"state": found | others}
    return loaded if groups is None else {**loaded, "param_groups": groups}


def _told(model: nn.Module, held: _Held, given: StateDict | None, ranks: MeshRanks) -> _Plan:
    """The first rank's plan; on others, tensors of more than one number are meta tensors."""
    if not ranks.is_alike([held.names, [str(tuple(param.shape)) for param in held.params]]):
        raise coded(
            RankMismatchError,
            "optim-scatter-ranks",
            "ranks scatter an optimizer's states into models that differ; build the same model and "
            "the same optimizer on all ranks",
        )
    own: _Plan | None = None
    answer: _Plan | str = ""
    if ranks.is_first:
        try:
            own = _planned(given, held, model)
            states = {
                at: {
                    key: torch.empty(value.shape, dtype=value.dtype, device="meta")
                    if _is_sent(value)
                    else value
                    for key, value in state.items()
                }
                for at, state in own[0].items()
            }
            answer = (states, *own[1:])
        except ValueError as error:
            answer = str(error)
    # What rank 0 of this very run has written.
    told = ranks.told(base64.b64encode(pickle.dumps(answer)).decode())
    plan: _Plan | str = pickle.loads(base64.b64decode(told))
    if isinstance(plan, str):
        raise resaid(ValueError, plan)
    return plan if own is None else own


def _planned(given: object, held: _Held, model: nn.Module) -> _Plan:
    """Interpret a state dict by names for an optimizer; checks everything."""
    if not isinstance(given, Mapping) or "state" not in given:
        raise _not_loadable(f"it is a {type(given).__name__} without 'state'")
    states, groups = given["state"], given.get("param_groups")
    if any(
        isinstance(key, int) for key in (*states, *(k for g in groups or () for k in g["params"]))
    ):
        raise _not_loadable("it is by positions and not by names")
    places = held.places
    named = nn.Module.named_parameters(model, remove_duplicate=False)
    known = {clean_as_fsdp1(name) for name, _ in named}
    found: dict[int, StateDict] = {}
    others: dict[object, object] = {}
    for name, state in states.items():
        if name in places:
            found.setdefault(places[name], state)
        elif name not in known:
            others[name] = copy.copy(state)
    for at in sorted(found):
        found[at] = {key: _without_shards(value, at, key, held) for key, value in found[at].items()}
        _check_state(held.names[at][0], found[at], held.params[at])
        for key, value in found[at].items():
            if isinstance(value, torch.Tensor) and not _is_sent(value):
                found[at][key] = value.detach().cpu()
            elif not _is_sent(value):
                found[at][key] = copy.copy(value)
    ordered = {at: found[at] for at in sorted(found)}
    return ordered, others, None if groups is None else _placed(groups, held)


def _not_loadable(problem: str) -> ValueError:
    return coded(
        ValueError,
        "optim-not-loadable",
        f"the optimizer's state dict cannot be loaded, because {problem}; pass one with the "
        f"parameter names of this model, as optim_state_dict() and rekey_optim_state_dict() "
        f"return it",
    )


def _without_shards(value: object, at: int, key: str, held: _Held) -> object:
    """A DTensor in the place of a ``ShardedTensor`` of torch's FSDP1."""
    if not is_sharded_tensor(value):
        return value
    managed = held.units.get(id(held.params[at]))
    rows = None if managed is None else rows_of_sharded_tensor(managed, value)
    if managed is None or rows is None:
        raise _not_loadable(other_rows(f"{held.names[at][0]}.{key}").replace("; ", ", "))
    return as_dtensor(managed, rows)


def _check_state(name: str, state: StateDict, param: torch.Tensor) -> None:
    """Raise if an entry has another shape, or if two are one tensor."""
    first: dict[object, str] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.numel() < 2:
            continue
        pairs = zip(value.shape, param.shape, strict=False)
        # A dim may have length 1, or be absent, if a mean was taken.
        fits = value.dim() < param.dim() or all(own in (1, wanted) for own, wanted in pairs)
        if value.dim() > param.dim() or not fits:
            raise _not_loadable(
                f"'{name}.{key}' is of shape {tuple(value.shape)}, and its parameter "
                f"{tuple(param.shape)}"
            )
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            continue  # rows of a rank are its own
        place = value.untyped_storage()._cdata, value.storage_offset()
        if first.setdefault(place, key) != key:
            raise coded(
                ValueError,
                "optim-states-aliased",
                f"the optimizer's state dict has one tensor as '{first[place]}' and '{key}' of "
                f"'{name}', so one of them is lost, as torch's FSDP1 writes it on a CPU with "
                f"offload_to_cpu=True; save it again with offload_to_cpu=False",
            )


def _placed(groups: Sequence[Mapping[str, Any]], held: _Held) -> list[StateDict]:
    """Parameter groups by the optimizer's keys."""
    if held.groups is not None and len(groups) != len(held.groups):
        raise _not_loadable(
            f"it has {len(groups)} parameter groups, and the optimizer {len(held.groups)}"
        )
    placed, places, start = [], held.places, 0
    for number, each in enumerate(groups):
        for name in each["params"]:
            if name not in places:
                raise _not_loadable(
                    f"'{name}' of its parameter group {number} is not in the optimizer"
                )
        members = sorted({places[name] for name in each["params"]})
        if held.groups is not None:
            wanted = set(range(start, start := start + held.groups[number]))
            for at in sorted(wanted ^ {*members}):
                raise _not_loadable(
                    f"'{held.names[at][0]}' is in another parameter group than in the optimizer"
                )
        placed.append(_with(each, [held.keys[at] for at in members]))
    return placed


def _own_part(value: Any, at: int, held: _Held, ranks: MeshRanks | None) -> object:
    """This rank's part of a tensor that every rank has or, with `ranks`, the first of them."""
    param = held.params[at]
    managed = held.units.get(id(param))
    if ranks is not None and _is_sent(value):
        return _scattered(value, param, managed, ranks)
    if managed is None or not _is_sent(value):
        return value.detach().clone() if isinstance(value, torch.Tensor) else value
    device = managed.local.device
    if isinstance(value, DTensor):
        if _is_rows(value, param, managed) and value.device_mesh == param.device_mesh:  # type: ignore[attr-defined]  # managed: a DTensor
            return as_dtensor(managed, local_of(value).to(device, copy=True))
        value = value.full_tensor()
    if value.shape == param.shape:
        return as_dtensor(managed, cut_rows(managed, value).to(device, copy=True))
    return _copied(value.detach().to(device, copy=True), param)


def _scattered(
    value: torch.Tensor, param: torch.Tensor, managed: ShardedParam | None, ranks: MeshRanks
) -> torch.Tensor:
    """This rank's part of a tensor that the first rank has."""
    if managed is not None and value.shape == param.shape:
        rows = scattered_rows(managed, value if ranks.is_first else None, value.dtype)
        return as_dtensor(managed, rows.to(managed.local.device, copy=True))
    memory = ranks.scratch(value.shape, value.dtype)
    if ranks.is_first:
        memory.copy_(value)
    ranks.spread(memory)
    return _copied(memory.to(local_of(param).device, copy=True), param)


def _copied(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A tensor that each rank has whole, as an optimizer of DTensors has it."""
    if not isinstance(param, DTensor) or value.dim() == 0:
        return value
    mesh = param.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

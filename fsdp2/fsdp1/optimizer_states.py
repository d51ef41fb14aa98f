"""An optimizer's state dicts by full names, full or sharded, and loading them.

    optim.state_dict()      {"state": {0: {"exp_avg": DTensor, "step": tensor}}, "param_groups": …}
      by_name               {"state": {"blocks.0.weight": {…}}, "param_groups": names}
        full                rows ── made_whole ──> plain tensors, as of an unsharded model
        sharded             DTensors
    loading                 plain tensors ── cut_rows ──> DTensors, by position in the optimizer
                            or ── scattered_rows ──> from the first rank, one tensor at a time

A tensor of its parameter's shape is sharded like the parameter. Others are copies, on each rank: a
step count, the row and column statistics of Adafactor.
"""

from __future__ import annotations

import base64
import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.errors import RankMismatchError, coded
from fsdp2.core.layout.mesh import local_of, wrap_local
from fsdp2.core.names import clean_as_fsdp1
from fsdp2.core.params.param import ShardedParam
from fsdp2.fsdp1.config import OptimStateKeyType, StateDictType
from fsdp2.fsdp1.state_dicts import (
    as_dtensor,
    get_state_dict_type,
    is_sharded_tensor,
    rows_of_sharded_tensor,
    wrong_rows,
)
from fsdp2.full.gathering import require_released
from fsdp2.full.selection import MeshRanks, require_idle, selected_params, settle
from fsdp2.full.unsharding import cut_rows, made_whole, scattered_rows

StateDict = dict[str, Any]
"""An optimizer's: "state" and "param_groups"."""

ParamState = dict[str, Any]
"""An optimizer's state of one parameter."""

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
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    view = _View(
        full=settings.state_dict_type == StateDictType.FULL_STATE_DICT,
        only_first=bool(getattr(config, "rank0_only", False)),
        offload=config.offload_to_cpu,
    )
    return _by_name(model, _positions(model, optim), given, view, group)


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
    view = _View(full=True, only_first=rank0_only, offload=True)
    return _by_name(model, _positions(model, optim, optim_input), optim.state_dict(), view, group)


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
    view = _View(full=False, only_first=False, offload=True)
    return _by_name(model, _positions(model, optim), optim.state_dict(), view, group)


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
    positions = _positions(model, optim, optim_input)
    other: dict[object, Any] = {}
    for position, names in enumerate(positions.names):
        if to_names:
            other[position] = names[0]
        else:
            other.update(dict.fromkeys(names, position))
    for key in keys:
        if key not in other:
            raise coded(
                ValueError,
                "optim-key-unknown",
                f"rekey_optim_state_dict got a state of {key!r}, which is not a parameter that "
                f"model and optimizer share; pass the model and the optimizer to which these "
                f"states belong",
            )
    rekeyed: StateDict = {
        "state": {other[key]: state for key, state in optim_state_dict["state"].items()},
        "param_groups": [],
    }
    for each in groups:
        options = copy.deepcopy({key: value for key, value in each.items() if key != "params"})
        rekeyed["param_groups"].append(
            {**options, "params": sorted(other[key] for key in each["params"])}
        )
    return rekeyed


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
    settings = get_state_dict_type(model)
    full = settings.state_dict_type == StateDictType.FULL_STATE_DICT
    only_first = full and bool(getattr(settings.optim_state_dict_config, "rank0_only", False))
    positions = _positions(model, optim, named=is_named_optimizer)
    found = _to_load(model, positions, optim_state_dict, only_first, group)
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
    positions = _positions(model, optim, optim_input)
    return _to_load(model, positions, full_optim_state_dict, False, None)


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
    return _to_load(model, _positions(model, optim), sharded_optim_state_dict, False, None)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> StateDict:
    """Convert a full state dict that only the first rank has for loading into an optimizer.

    The first rank sends tensors one at a time. Other ranks receive only their rows; with replicas
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
    positions = _positions(model, optim, optim_input)
    return _to_load(model, positions, full_optim_state_dict, True, group)


# ---- which parameter is which


@dataclass(frozen=True)
class _View:
    """The form of a state dict.

    Attributes:
        full: full tensors; otherwise DTensors.
        only_first: ``{}`` on ranks other than the first.
        offload: in CPU memory.
    """

    full: bool
    only_first: bool
    offload: bool


@dataclass(frozen=True)
class _Positions:
    """The parameters of an optimizer, in its order.

    Attributes:
        params: as a list.
        names: the full names of each, the first registered first.
        keys: what the optimizer's own state dicts name each by.
        groups: how many each parameter group has; ``None`` if that is not known.
        selection: those that units manage, by id.
    """

    params: list[torch.Tensor]
    names: list[list[str]]
    keys: list[int | str]
    groups: list[int] | None
    selection: dict[int, ShardedParam]


def _positions(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput = None,
    named: bool = False,
) -> _Positions:
    selection = selected_params(model, recurse=True)
    require_idle(selection, "optim_state_dict")
    require_released(selection, "optim_state_dict")
    settle(selection, with_grads=False)
    names: dict[int, list[str]] = {}
    raw: dict[int, str] = {}
    registered = list(nn.Module.named_parameters(model, remove_duplicate=False))
    for name, param in registered:
        raw.setdefault(id(param), name)
        if clean_as_fsdp1(name) not in names.setdefault(id(param), []):
            names[id(param)].append(clean_as_fsdp1(name))
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
    keys: list[int | str] = [raw[id(p)] for p in params] if named else list(range(len(params)))
    managed = {id(selected.param.sharded): selected.param for selected in selection}
    return _Positions(params, [names[id(each)] for each in params], keys, groups, managed)


def _params_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput
) -> tuple[list[torch.Tensor], list[int] | None]:
    """An optimizer's parameters, and the number in each group."""
    if optim_input is None and optim is None:
        return list(model.parameters()), None
    given: list[Any] = list(optim.param_groups) if optim_input is None and optim else []
    if optim_input is not None:
        given = list(optim_input)
    if given and isinstance(given[0], dict):
        members = [
            [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
            for group in given
        ]
        lists = [list(each) for each in members]
        return [param for each in lists for param in each], [len(each) for each in lists]
    return given, [len(given)]


# ---- out of an optimizer


_ROWS, _COPY, _VALUE = "rows", "copy", "value"


def _kind(value: object, param: torch.Tensor, managed: ShardedParam | None) -> str:
    """Whether a state is cut as its parameter, a tensor that each rank has, or no tensor."""
    if not isinstance(value, torch.Tensor):
        return _VALUE
    if managed is None or value.dim() == 0:
        return _COPY
    if isinstance(value, DTensor):
        same = value.shape == param.shape and value.placements == param.placements  # type: ignore[attr-defined]  # managed: a DTensor
        return _ROWS if same else _COPY
    return _ROWS if value.shape == local_of(param).shape else _COPY


def _facts(states: Mapping[object, ParamState], positions: _Positions) -> Iterator[object]:
    """The facts that must be equal on all ranks and are not compared elsewhere."""
    for name, param, state in _with_state(states, positions):
        managed = positions.selection.get(id(param))
        kinds = []
        for key in sorted(state, key=str):
            value = state[key]
            kind = _kind(value, param, managed)
            kinds.append((str(key), kind, str(value.dtype) if kind != _VALUE else ""))
        yield name, kinds


def _with_state(
    states: Mapping[object, ParamState], positions: _Positions
) -> Iterator[tuple[str, torch.Tensor, ParamState]]:
    """(name, parameter, state), in the optimizer's order; of those that have state."""
    by_name = {clean_as_fsdp1(key): state for key, state in states.items() if isinstance(key, str)}
    for at, (param, names) in enumerate(zip(positions.params, positions.names, strict=True)):
        state = states.get(at)
        for name in names if state is None else ():
            state = by_name.get(name, state)
        if state is not None:
            yield names[0], param, state


@torch.no_grad()
def _by_name(
    model: nn.Module,
    positions: _Positions,
    given: StateDict,
    view: _View,
    group: ProcessGroup | None,
) -> StateDict:
    ranks = _agreement(positions, group)
    states = given["state"]
    if not ranks.is_alike((view, list(_facts(states, positions)))):
        raise coded(
            RankMismatchError,
            "optim-state-ranks",
            "ranks called optim_state_dict() with different settings, or on optimizers whose "
            "states differ; set the same type on all ranks, and step all optimizers alike",
        )
    kept = not view.only_first or ranks.is_first
    found: dict[object, object] = {}
    for name, param, state in _with_state(states, positions):
        managed = positions.selection.get(id(param))
        converted = {key: _shown(v, param, managed, view) for key, v in state.items()}
        if kept:
            found[name] = converted
    if not kept:
        return {}
    known = {name for names in positions.names for name in names}
    for key, value in states.items():
        if key in range(len(positions.params)) or (
            isinstance(key, str) and clean_as_fsdp1(key) in known
        ):
            continue
        warnings.warn(
            f"the optimizer's state {key!r} belongs to no parameter of {type(model).__name__}; it "
            f"is copied as it is",
            stacklevel=3,
        )
        found[key] = value
    result: StateDict = {"state": found}
    if "param_groups" in given:
        result["param_groups"] = _named_groups(given["param_groups"], positions)
    return result


def _agreement(positions: _Positions, group: ProcessGroup | None) -> MeshRanks:
    managed = list(positions.selection.values())
    if group is None or not managed:
        return MeshRanks(managed)
    return MeshRanks.of_group(group, managed[0].axes.device)


def _shown(value: object, param: torch.Tensor, managed: ShardedParam | None, view: _View) -> object:
    """A state as a state dict has it; ``None`` in place of a whole tensor where it is not kept."""
    if not isinstance(value, torch.Tensor):
        return value
    made: torch.Tensor | None
    if managed is not None and _kind(value, param, managed) == _ROWS:
        if view.full:
            made = made_whole(managed, local_of(value), everywhere=not view.only_first)
        else:
            made = value if isinstance(value, DTensor) else as_dtensor(managed, value)
    elif isinstance(value, DTensor) and view.full:
        made = value.full_tensor()
    else:
        made = value
    if made is not None and view.full and made is value:
        made = made.detach().clone()
    return made.cpu() if made is not None and view.offload else made


def _named_groups(groups: Sequence[Mapping[str, Any]], positions: _Positions) -> list[StateDict]:
    by_key: dict[object, str] = {key: names[0] for key, names in enumerate(positions.names)}
    by_key.update({name: names[0] for names in positions.names for name in names})
    named = []
    for each in groups:
        options = copy.deepcopy({key: value for key, value in each.items() if key != "params"})
        keys = [clean_as_fsdp1(key) if isinstance(key, str) else key for key in each["params"]]
        named.append({**options, "params": [by_key[key] for key in keys]})
    return named


# ---- into an optimizer


@torch.no_grad()
def _to_load(
    model: nn.Module,
    positions: _Positions,
    given: StateDict | None,
    only_first: bool,
    group: ProcessGroup | None,
) -> StateDict:
    ranks = _agreement(positions, group) if only_first else None
    if ranks is None:
        plan = _checked(_plan(given, positions, model))
        return _assembled(plan, positions, lambda item: _own_part(item, positions))
    names = [positions.names, [str(tuple(param.shape)) for param in positions.params]]
    if not ranks.is_alike(names):
        raise coded(
            RankMismatchError,
            "optim-scatter-ranks",
            "ranks scatter an optimizer's states into models that differ; build the same model and "
            "the same optimizer on all ranks",
        )
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    plan = _StatesToLoad("", [], {}, None)
    if ranks.is_first:
        plan = _plan(given, positions, model)
        tensors = {(item.at, item.key): item.value for item in plan.items if item.travels}
        plan = plan.without_tensors()
    told = ranks.told(base64.b64encode(pickle.dumps(plan)).decode())
    # What rank 0 of this very run has written.
    plan = _checked(pickle.loads(base64.b64decode(told)))
    return _assembled(
        plan,
        positions,
        lambda item: _scattered(item, positions, tensors.get((item.at, item.key)), ranks),
    )


@dataclass
class _Item:
    """One entry of a parameter's state.

    Attributes:
        at: the parameter's position in the optimizer.
        key: name of the entry.
        value: it, full or sharded; ``None`` for a tensor that is sent separately.
        shape: of a tensor; otherwise ``None``.
        dtype: of a tensor; otherwise ``None``.
        travels: whether it is a tensor with more than one number, which is sent separately.
    """

    at: int
    key: str
    value: Any
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    travels: bool


@dataclass
class _StatesToLoad:
    """The states to load, or the problem with them.

    Attributes:
        problem: in words; empty if there is none.
        items: of all parameters, in the optimizer's order.
        others: states that belong to no parameter.
        groups: parameter groups by the optimizer's keys; ``None`` without any.
        aliased: two entries that are one tensor; empty if there are none.
    """

    problem: str
    items: list[_Item]
    others: dict[object, object]
    groups: list[StateDict] | None
    aliased: str = ""

    def without_tensors(self) -> _StatesToLoad:
        """As it is told to other ranks."""
        items = [
            _Item(i.at, i.key, None if i.travels else i.value, i.shape, i.dtype, i.travels)
            for i in self.items
        ]
        return _StatesToLoad(self.problem, items, self.others, self.groups, self.aliased)


def _checked(plan: _StatesToLoad) -> _StatesToLoad:
    if plan.aliased:
        raise coded(
            ValueError,
            "optim-states-aliased",
            f"the optimizer's state dict has one tensor as {plan.aliased}, so one of them is lost, "
            f"as torch's FSDP1 writes it on a CPU with offload_to_cpu=True; save it again with "
            f"offload_to_cpu=False",
        )
    if plan.problem:
        raise coded(
            ValueError,
            "optim-not-loadable",
            f"the optimizer's state dict cannot be loaded, because {plan.problem}; pass one with "
            f"the parameter names of this model, as optim_state_dict() and "
            f"rekey_optim_state_dict() return it",
        )
    return plan


def _plan(given: object, positions: _Positions, model: nn.Module) -> _StatesToLoad:
    """Interpret a state dict by names for an optimizer; checks everything."""
    wrong = _StatesToLoad("", [], {}, None)
    if not isinstance(given, Mapping) or "state" not in given:
        wrong.problem = f"it is a {type(given).__name__} without 'state'"
        return wrong
    states, groups = given["state"], given.get("param_groups")
    by_position = [key for key in states if isinstance(key, int)]
    if by_position or any(isinstance(key, int) for g in groups or () for key in g["params"]):
        wrong.problem = "it is by positions and not by names"
        return wrong
    at_of = {name: at for at, names in enumerate(positions.names) for name in names}
    known = {
        clean_as_fsdp1(name)
        for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)
    }
    found: dict[int, ParamState] = {}
    others: dict[object, object] = {}
    for name, state in states.items():
        if name in at_of:
            found.setdefault(at_of[name], state)
        elif name not in known:
            others[name] = copy.copy(state)
    items = []
    for at in sorted(found):
        for key, value in found[at].items():
            wrong.problem = _mismatch(f"{positions.names[at][0]}.{key}", value, at, positions)
            if wrong.problem:
                return wrong
            items.append(_item(at, key, value))
        wrong.aliased = _aliased(positions.names[at][0], found[at])
        if wrong.aliased:
            return wrong
    placed, wrong.problem = _placed_groups(groups, at_of, positions)
    return wrong if wrong.problem else _StatesToLoad("", items, others, placed)


def _item(at: int, key: str, value: Any) -> _Item:
    if not isinstance(value, torch.Tensor) and not is_sharded_tensor(value):
        return _Item(at, key, copy.copy(value), None, None, False)
    shape = tuple(value.size())
    single = not shape and not isinstance(value, DTensor)
    return _Item(at, key, value.detach().cpu() if single else value, shape, value.dtype, not single)


def _mismatch(name: str, value: object, at: int, positions: _Positions) -> str:
    """The problem with one entry; a dim may have length 1, or be absent, if a mean was taken."""
    param = positions.params[at]
    if is_sharded_tensor(value):
        managed = positions.selection.get(id(param))
        if managed is None or rows_of_sharded_tensor(managed, value) is None:
            return wrong_rows(name).replace("; ", ", ")
        return ""
    if not isinstance(value, torch.Tensor) or value.dim() < param.dim() or value.numel() == 1:
        return ""
    fits = value.dim() == param.dim() and all(
        own in (1, wanted) for own, wanted in zip(value.shape, param.shape, strict=True)
    )
    if fits:
        return ""
    return f"'{name}' is of shape {tuple(value.shape)}, and its parameter {tuple(param.shape)}"


def _aliased(name: str, state: ParamState) -> str:
    """Two entries of a parameter that are one memory."""
    first: dict[object, str] = {}
    for key, value in state.items():
        if type(value) is not torch.Tensor or value.numel() < 2:  # rows of a rank are its own
            continue
        if value.layout is torch.strided:
            place = value.untyped_storage()._cdata, value.storage_offset()
            if first.setdefault(place, key) != key:
                return f"'{first[place]}' and '{key}' of '{name}'"
    return ""


def _placed_groups(
    groups: Sequence[Mapping[str, Any]] | None, at_of: Mapping[str, int], positions: _Positions
) -> tuple[list[StateDict] | None, str]:
    """Parameter groups by the optimizer's keys, and the problem with them."""
    if groups is None:
        return None, ""
    placed = []
    start = 0
    for number, each in enumerate(groups):
        for name in each["params"]:
            if name not in at_of:
                return None, f"'{name}' of its parameter group {number} is not in the optimizer"
        members = sorted({at_of[name] for name in each["params"]})
        if positions.groups is not None and number < len(positions.groups):
            wanted = list(range(start, start + positions.groups[number]))
            start += len(wanted)
            for at in sorted({*members} ^ {*wanted}):
                return None, (
                    f"'{positions.names[at][0]}' is in another parameter group than in the "
                    f"optimizer"
                )
        options = copy.deepcopy({key: value for key, value in each.items() if key != "params"})
        placed.append({**options, "params": [positions.keys[at] for at in members]})
    if positions.groups is not None and len(placed) != len(positions.groups):
        return None, (
            f"it has {len(placed)} parameter groups, and the optimizer {len(positions.groups)}"
        )
    return placed, ""


def _assembled(
    plan: _StatesToLoad, positions: _Positions, part_of: Callable[[_Item], object]
) -> StateDict:
    states: dict[object, Any] = {}
    for item in plan.items:
        states.setdefault(positions.keys[item.at], {})[item.key] = part_of(item)
    states.update(plan.others)
    if plan.groups is None:
        return {"state": states}
    return {"state": states, "param_groups": plan.groups}


def _own_part(item: _Item, positions: _Positions) -> object:
    """This rank's part of a tensor that every rank has."""
    value, param = item.value, positions.params[item.at]
    managed = positions.selection.get(id(param))
    if not item.travels or managed is None:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value
    device = managed.local.device
    if is_sharded_tensor(value):
        rows = rows_of_sharded_tensor(managed, value)
        assert rows is not None  # `_mismatch` has looked
        return as_dtensor(managed, rows.to(device, copy=True))
    if isinstance(value, DTensor):
        if _kind(value, param, managed) == _ROWS and value.device_mesh == param.device_mesh:  # type: ignore[attr-defined]  # managed: a DTensor
            return as_dtensor(managed, local_of(value).to(device, copy=True))
        value = value.full_tensor()
    if value.shape == param.shape:
        return as_dtensor(managed, cut_rows(managed, value).to(device, copy=True))
    return _copied(value.detach().to(device, copy=True), param)


def _scattered(
    item: _Item, positions: _Positions, value: torch.Tensor | None, ranks: MeshRanks
) -> object:
    """This rank's part of a tensor that the first rank has."""
    if not item.travels:
        return item.value
    assert item.shape is not None
    assert item.dtype is not None
    param = positions.params[item.at]
    managed = positions.selection.get(id(param))
    if managed is not None and item.shape == tuple(param.shape):
        rows = scattered_rows(managed, value, item.dtype)
        return as_dtensor(managed, rows.to(managed.local.device, copy=True))
    sent = ranks.scratch(item.shape, item.dtype)
    if value is not None:
        sent.copy_(value)
    ranks.spread(sent)
    return _copied(sent.to(local_of(param).device, copy=True), param)


def _copied(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A tensor that each rank has whole, as an optimizer of DTensors has it."""
    if not isinstance(param, DTensor) or value.dim() == 0:
        return value
    mesh = param.device_mesh
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    return wrap_local(value, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))

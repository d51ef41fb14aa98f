"""Operators that loops and optimizers for torch's FSDP1 call on parameters and gradients, on
DTensors.

    operator          on sharded tensors of a wrapper's mesh
    ────────          ──────────────────────────────────────
    has a rule        DTensor's own: this module runs only once for each new kind of call
    element-wise      on this rank's rows: fused optimizers, masks
    any other         on whole tensors, gathered for it; what it writes goes back into the rows
    a view            of the whole tensor: gathered at each use, written through to the rows
    draws numbers,    refused by name: ranks would draw, or send, different things
    communicates

torch's FSDP1 gives users plain tensors of the rows that a rank has; every operator accepts them,
with a result that differs from rank to rank. Here the result is the unsharded model's, on every
rank, so every rank must call the operator. This does not depend on whether rows can be divided
evenly (decision 26).

DTensor asks its dispatcher for a rule if it has none, and this module answers. It is bound while
wrappers exist, and leaves DTensors of other meshes unchanged. A plain tensor used with a wrapper's
DTensor is assumed to be the same on all ranks: if a gradient-shaped tensor of noise is added, each
rank adds its rows.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._guards import TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.mesh import wrap_local
from fsdp2.core.params.param import OWNER
from fsdp2.core.pieces import piece_of
from fsdp2.fsdp1.plain_tensors import PlainTensors, asked_each_time
from fsdp2.ranks.transfers import sum_over

Operator = torch._ops.OpOverload
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_RULE = "_propagate_op_sharding_dispatch_slow_path"
"""Method of DTensor's dispatcher that finds a rule, or returns a result in its place."""

_MADE_OF_ELEMENTS = ("_fused_sgd_", "_fused_adagrad_")
"""Operators on lists without a rule that treat every element by itself."""

_meshes: dict[int, DeviceMesh] = {}  # of each wrapper that lives, by its id
_bound: list[tuple[PlainTensors, Callable[[], None]]] = []  # and what undoes it


def compute_beyond_rules(wrapper: nn.Module, mesh: DeviceMesh) -> None:
    """Let operators without a rule of DTensor's work on tensors of a wrapper's mesh.

    Args:
        wrapper: for as long as it lives.
        mesh: its parameters' and gradients'.
    """
    if not _bound:
        _bind()
    for plain_tensors, _ in _bound:
        plain_tensors.switch_on()
    _meshes[id(wrapper)] = mesh
    weakref.finalize(wrapper, _forget, id(wrapper)).atexit = False


def _bind() -> None:
    dispatcher: Any = DTensor._op_dispatcher
    if not hasattr(dispatcher, _RULE):  # a torch that asks in another way: DTensor's errors stay
        return
    find_rule = getattr(dispatcher, _RULE)

    def find_rule_or_result(op: Operator, args: Args, kwargs: Kwargs, *rest: Any) -> object:
        try:
            rule = find_rule(op, args, kwargs, *rest)
        except Exception as error:
            if _concerns(args, kwargs):
                return _without_rule(op, args, kwargs, error)
            raise
        if isinstance(rule, OutputSharding) and _concerns(args, kwargs):
            if op.is_view and _moves_first(rule, args):
                return _view_of_whole(op, args, kwargs)
            if _writes_plain(op, args, kwargs) or _only_writes(op, args, kwargs):
                return _on_whole(op, args, kwargs)
            if _writes_partial(op, args, kwargs):
                return _on_whole(op, args, kwargs)
            if _needs_rows(rule.output_spec) and _may_be_empty(args, kwargs):
                return _on_whole(op, args, kwargs)
            if op is torch.ops.aten._local_scalar_dense.default and _is_partial(args[0]):
                return _number(args[0])
        elif isinstance(rule, OutputSharding):
            return asked_each_time(rule, rest[0].schema, tree_leaves((args, dict(kwargs))))
        return rule

    def on_whole(op: Operator, args: Args, kwargs: Kwargs) -> object:
        """DTensor has no rule for positions in empty rows, and torch 2.11 none for any without a
        dim.
        """
        if _concerns(args, kwargs):
            return _on_whole(op, args, kwargs)
        return handlers[op](op, args, kwargs)

    handlers = dict(dispatcher._custom_op_handlers)
    aten = torch.ops.aten
    known = {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim}
    positions = known & set(handlers)
    dispatcher._custom_op_handlers.update(dict.fromkeys(positions, on_whole))
    setattr(dispatcher, _RULE, find_rule_or_result)
    plain_tensors = PlainTensors(lambda mesh: mesh in set(_meshes.values()))
    torch._C._clear_DTensor_sharding_propagator_cache()  # of views that are copies
    hook = register_optimizer_step_pre_hook(_agree_on_losses)
    methods = {name: DTensor.__dict__.get(name) for name in _METHODS}
    for name, method in _METHODS.items():
        setattr(DTensor, name, method)

    def undo() -> None:
        delattr(dispatcher, _RULE)
        dispatcher._custom_op_handlers.update({op: handlers[op] for op in positions})
        hook.remove()
        for name, method in methods.items():
            if method is None:
                delattr(DTensor, name)
            else:
                setattr(DTensor, name, method)

    _bound.append((plain_tensors, undo))


def _forget(wrapper: int) -> None:
    del _meshes[wrapper]
    if _bound and not _meshes and _bound[0][0].switch_off():
        _bound.pop()[1]()


# ---- which calls


def _sharded_leaves(args: Args, kwargs: Kwargs) -> Iterator[DTensor]:
    return (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, DTensor))


def _concerns(args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor of a wrapper's mesh is among the arguments, and values are there."""
    if TracingContext.try_get() is not None:
        return False
    meshes = set(_meshes.values())
    return any(leaf.device_mesh in meshes for leaf in _sharded_leaves(args, kwargs))


def _is_sharded(tensor: DTensor) -> bool:
    return any(not p.is_replicate() and not p.is_partial() for p in tensor.placements)


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _moves_first(rule: OutputSharding, args: Args) -> bool:
    """Whether a rule for a view gathers what is viewed, so that the view would be a copy."""
    schema = rule.redistribute_schema
    if not rule.needs_redistribute or schema is None or not isinstance(args[0], DTensor):
        return False
    wanted = schema.args_schema[0]
    return (
        _is_sharded(args[0])
        and isinstance(wanted, DTensorSpec)
        and wanted.placements != args[0].placements
    )


def _needs_rows(spec: object) -> bool:
    """Whether a rule lets each rank compute what cannot be computed of no rows: a largest element,
    what an index names. Sums of none are zero.
    """
    placements = (
        placement
        for each in (spec if isinstance(spec, list | tuple) else [spec])
        if isinstance(each, DTensorSpec)
        for placement in each.placements
        if placement.is_partial()
    )
    return any(
        getattr(placement, "reduce_op", None) not in ("sum", "product")
        or getattr(placement, "norm_type", 0) < 0
        or hasattr(placement, "mask_buffer")
        for placement in placements
    )


def _may_be_empty(args: Args, kwargs: Kwargs) -> bool:
    """Whether some rank may have no rows of a tensor."""
    for spec in (leaf._spec for leaf in _sharded_leaves(args, kwargs)):
        pieces: dict[int, int] = {}
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
            dim = getattr(placement, "dim", None)  # of `Shard`, and of what is like it
            if dim is not None:
                pieces[dim] = pieces.get(dim, 1) * size
        for dim, count in pieces.items():
            if not piece_of(spec.shape[dim], count, count - 1)[1]:
                return True
    return False


def _written(op: Operator, args: Args, kwargs: Kwargs) -> Iterator[object]:
    """The arguments that an operator writes to: tensors, and lists of them."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _writes_partial(op: Operator, args: Args, kwargs: Kwargs) -> bool:
    """Whether it writes in place what is to be summed: few operators may do that to summands."""
    return any(
        isinstance(leaf, DTensor) and _is_partial(leaf)
        for leaf in tree_leaves(list(_written(op, args, kwargs)))
    )


def _only_writes(op: Operator, args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor is made in the place of one, as ``torch.eye(…, out=tensor)`` does."""
    named = [kwargs.get(each.name) for each in op._schema.arguments if each.is_out]
    return bool(named) and not any(isinstance(leaf, DTensor) for leaf in tree_leaves(args))


def _writes_plain(op: Operator, args: Args, kwargs: Kwargs) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
        for leaf in tree_leaves(list(_written(op, args, kwargs)))
    )


# ---- in place of a rule


def _without_rule(op: Operator, args: Args, kwargs: Kwargs, error: Exception) -> object:
    name = op._schema.name.removeprefix("aten::")
    if op.namespace != "aten" or torch.Tag.nondeterministic_seeded in op.tags:
        _refuse(name, args, kwargs, error)
    if torch.Tag.inplace_view in op.tags:  # another shape for the same object
        _refuse(name, args, kwargs, error)
    if name in _MADE_OF_ELEMENTS and _are_alike(args):
        return op(*_rows(args), **_rows(dict(kwargs)))
    if name == "index_put_" and _is_mask(args):
        op(*_rows(args), **_rows(dict(kwargs)))
        return args[0]
    if op.is_view and isinstance(args[0], DTensor) and _is_sharded(args[0]):
        return _view_of_whole(op, args, kwargs)
    return _on_whole(op, args, kwargs)


def _refuse(name: str, args: Args, kwargs: Kwargs, error: Exception | None) -> NoReturn:
    raise coded(
        ShardingStateError,
        "operator-unknown",
        f"{name} does not support {_described(next(_sharded_leaves(args, kwargs)))}, of which "
        f"this rank has only some rows; compute it inside fsdp2.gathered(model) or "
        f"FSDP.summon_full_params(model), or on the rows that to_local() returns",
    ) from error


def _described(tensor: DTensor) -> str:
    name = tensor.__dict__.get(OWNER)
    what = "a tensor" if name is None else f"parameter '{name}'"
    return f"{what} of shape {tuple(tensor.shape)}"


def _rows(tree: object) -> Any:
    return tree_map(lambda leaf: leaf._local_tensor if isinstance(leaf, DTensor) else leaf, tree)


def _are_alike(args: Args) -> bool:
    """Whether the tensors at each position of several lists are sharded alike; numbers may be."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
    return all(
        len({_place_of(tensor) for tensor in together if tensor.dim() > 0}) <= 1
        for together in zip(*lists, strict=False)
    )


def _place_of(tensor: torch.Tensor) -> object:
    placements = tensor._spec.placements if isinstance(tensor, DTensor) else None
    return placements, tensor.shape, getattr(tensor, "device_mesh", None)


def _is_mask(args: Args) -> bool:
    """Whether ``index_put_`` sets single elements, by a mask that is sharded as they are."""
    target, indices, values = args[:3]
    mask = indices[0] if len(indices) == 1 else None
    return (
        isinstance(target, DTensor)
        and isinstance(mask, DTensor)
        and mask.dtype == torch.bool
        and mask.shape == target.shape
        and (mask.device_mesh, mask.placements) == (target.device_mesh, target.placements)
        and values.numel() == 1
        and not isinstance(values, DTensor)
    )


def _on_whole(op: Operator, args: Args, kwargs: Kwargs) -> object:
    """The result of an operator on whole tensors, with what it writes put where it belongs."""
    wholes: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        whole_args, whole_kwargs = tree_map(lambda leaf: _whole(leaf, wholes), (args, dict(kwargs)))
        made = op(*whole_args, **whole_kwargs)
        written = {}
        for leaf in tree_leaves(list(_written(op, args, kwargs))):
            if isinstance(leaf, DTensor):
                if wholes[id(leaf)].shape != leaf.shape:
                    _refuse(op._schema.name, args, kwargs, None)
                _put_back(leaf, wholes[id(leaf)])
                written[id(wholes[id(leaf)])] = leaf
    mesh = next(_sharded_leaves(args, kwargs)).device_mesh

    def shown(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or _writes_plain(op, args, kwargs):
            return leaf
        found = written.get(id(leaf))
        return _replicated(leaf, mesh) if found is None else found

    return tree_map(shown, made)


def _whole(leaf: object, wholes: dict[int, torch.Tensor]) -> object:
    if not isinstance(leaf, DTensor):
        return leaf
    if id(leaf) not in wholes:
        # Of a tensor that requires grad, torch 2.11 would detach the result in place. One that was
        # expanded has strides for which DTensor's operators find no view.
        wholes[id(leaf)] = wrap_local(leaf._local_tensor, leaf._spec).full_tensor().contiguous()
    return wholes[id(leaf)]


def _put_back(tensor: DTensor, whole: torch.Tensor) -> None:
    """Make ``whole`` what a tensor holds: its rows, or what was summed for it."""
    if _is_partial(tensor):
        tensor._local_tensor = whole
        tensor._spec = _replicated(whole, tensor.device_mesh)._spec
    elif _is_sharded(tensor):
        tensor._local_tensor.copy_(_rows_of(whole, tensor._spec))


def _rows_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks have; sends nothing."""
    spread = _replicated(whole, spec.mesh).redistribute(placements=spec.placements)
    return spread._local_tensor


def _replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return wrap_local(whole, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))


def _number(tensor: DTensor) -> object:
    """``item()`` of a value not yet summed over ranks, for which DTensor returns a rank's summand.

    Optimizers mean the sum. Loops may mean the summand, and sum it themselves. For a maximum, and
    for whether any element is true, both give the same result.
    """
    whole_twice_is_whole = tensor.dtype == torch.bool or all(
        placement.is_replicate() or getattr(placement, "reduce_op", None) in ("max", "min")
        for placement in tensor.placements
    )
    if whole_twice_is_whole or _within_a_step():
        return tensor.full_tensor().item()
    raise coded(
        ShardingStateError,
        "item-of-a-summand",
        "item() cannot return a number of which this rank has only a summand, such as the norm "
        "or the sum of a sharded tensor; call full_tensor().item() on every rank, or "
        "to_local().item() for this rank's summand",
    )


def _within_a_step() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _STEPS:
            return True
        frame = frame.f_back
    return False


_STEPS = {
    code
    for code in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    if isinstance(code, CodeType)
}
"""The code around the ``step`` of every optimizer."""


# ---- views


@dataclass(eq=False)
class _Home:
    """The origin of views of a full tensor.

    Attributes:
        rows: this rank's.
        spec: how they are part of the whole.
        whole: memory for all ranks' rows; out of date between uses.
    """

    rows: torch.Tensor
    spec: DTensorSpec
    whole: torch.Tensor

    def read(self) -> None:
        """Make ``whole`` what all ranks' rows are now."""
        self.whole.copy_(wrap_local(self.rows, self.spec).full_tensor())

    def write(self) -> None:
        """Make ``rows`` what ``whole`` is now."""
        self.rows.copy_(_rows_of(self.whole, self.spec))


class WholeView(torch.Tensor):
    """A view of a sharded tensor, whole on every rank: it shows what rows are, and writes to them.

    It is the local tensor of a replicated DTensor. All ranks use it alike, as each use gathers.
    """

    _view: torch.Tensor
    _home: _Home

    @staticmethod
    def of(view: torch.Tensor, home: _Home) -> WholeView:
        """``view``, which shares memory with ``home.whole``."""
        made = torch.Tensor._make_wrapper_subclass(
            WholeView,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            layout=view.layout,
            device=view.device,
        )
        made._view, made._home = view, home
        return made

    def __repr__(self, *, tensor_contents: object = None) -> object:  # type: ignore[override]  # as torch has it
        return f"WholeView({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as an instance's in torch
        cls, op: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Compute on what is viewed; write through."""
        given = (args, dict(kwargs or {}))
        views = [leaf for leaf in tree_leaves(given) if isinstance(leaf, WholeView)]
        homes = {each._home: None for each in views}
        if not op.is_view:
            for home in homes:
                home.read()
        plain_args, plain_kwargs = tree_map(
            lambda leaf: leaf._view if isinstance(leaf, WholeView) else leaf, given
        )
        made = op(*plain_args, **plain_kwargs)
        if op.is_view:
            return tree_map(lambda leaf: WholeView.of(leaf, *homes), made)
        for leaf in tree_leaves(list(_written(op, *given))):
            if isinstance(leaf, WholeView):
                leaf._home.write()
        own = {id(each._view): each for each in views}
        return tree_map(lambda leaf: own.get(id(leaf), leaf), made)


def _view_of_whole(op: Operator, args: Args, kwargs: Kwargs) -> object:
    tensor = args[0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    home = _Home(tensor._local_tensor, tensor._spec, whole)
    made = op(WholeView.of(whole, home), *args[1:], **kwargs)
    return tree_map(lambda leaf: _replicated(leaf, tensor.device_mesh), made)


# ---- methods that DTensor has not, or that would lose what is written


def _own_values(tensor: DTensor, method: str) -> torch.Tensor:
    """A tensor that each rank holds in full, without communication: a single rank may ask."""
    local = tensor._local_tensor
    if all(p.is_replicate() for p in tensor.placements) and not isinstance(local, WholeView):
        return local
    raise coded(
        ShardingStateError,
        "values-of-a-shard",
        f"{method}() cannot return {_described(tensor)}, of which this rank has only a part; call "
        f"it inside fsdp2.gathered(model) or FSDP.summon_full_params(model), or on full_tensor(), "
        f"which all ranks must call",
    )


def _numpy(self: DTensor, *, force: bool = False) -> object:
    array = torch.Tensor.numpy(_own_values(self, "numpy").detach(), force=force)
    array.flags.writeable = False
    return array


def _tolist(self: DTensor) -> object:
    return _own_values(self, "tolist").tolist()


def _format(self: DTensor, spec: str) -> str:
    if self.dim() > 0 or not spec:
        return object.__format__(self, spec)
    return format(_own_values(self, "format").item(), spec)


_torchs_data: Any = torch._C.TensorBase.data


def _set_data(self: DTensor, value: torch.Tensor) -> None:
    """``tensor.data = value``: torch's would change the outer tensor, and no row of it."""
    if self.device_mesh not in set(_meshes.values()):
        _torchs_data.__set__(self, value)
        return
    if (value.shape, value.dtype) != (self.shape, self.dtype):
        raise coded(
            ShardingStateError,
            "data-of-another-kind",
            f"the data of {_described(self)} and dtype {self.dtype} cannot become a tensor of "
            f"shape {tuple(value.shape)} and dtype {value.dtype}; convert the model with .to(), "
            f"or shard another model",
        )
    with torch.no_grad():
        self.copy_(value)


def _of_wrappers(name: str, method: Callable[..., object]) -> Callable[..., object]:
    """``method`` for tensors of wrappers' meshes, and torch's own of that name for others."""
    torchs = getattr(torch.Tensor, name)

    @functools.wraps(torchs)
    def chosen(self: DTensor, *args: object, **kwargs: object) -> object:
        return (method if self.device_mesh in set(_meshes.values()) else torchs)(
            self, *args, **kwargs
        )

    return chosen


_METHODS: dict[str, object] = {
    "numpy": _of_wrappers("numpy", _numpy),
    "tolist": _of_wrappers("tolist", _tolist),
    "__format__": _of_wrappers("__format__", _format),
    "data": property(lambda self: _torchs_data.__get__(self), _set_data),
}


# ---- optimizers that decide by the loss


def _agree_on_losses(optimizer: torch.optim.Optimizer, args: Args, kwargs: Kwargs) -> Any:
    """Before a step of LBFGS: its closure returns the mean of all ranks' losses.

    It stops, and searches along a line, by comparing losses; ranks with different ones would not
    evaluate the model equally often, and wait for each other.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    held = (param for group in optimizer.param_groups for param in group["params"])
    mesh = next(
        (p.device_mesh for p in held if isinstance(p, DTensor) and _concerns((p,), {})), None
    )
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if mesh is None or not callable(given):
        return None

    def closure() -> torch.Tensor:
        return _mean_over(mesh, given())

    return (args[0], closure), {name: kwargs[name] for name in kwargs if name != "closure"}


def _mean_over(mesh: DeviceMesh, loss: Any) -> torch.Tensor:
    if isinstance(loss, DTensor):
        return loss.full_tensor()
    mean = torch.as_tensor(loss).detach().clone()
    mean = mean.to(mesh.device_type).float() if not mean.is_floating_point() else mean
    for dim in range(mesh.ndim):
        sum_over(mean, mesh.get_group(dim))
    return mean / mesh.size()

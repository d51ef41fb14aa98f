"""`XlaFullyShardedDataParallel`: a module around a unit, with the interface of XLA's FSDP.

    XlaFullyShardedDataParallel
      └ _fsdp_wrapped_module    the module, which `fully_shard` has sharded in place
          └ … other wrappers, made before this one: units of their own

Each argument becomes one of `fully_shard`'s, or a setting of its unit. Arguments that only a lazy
compiler needs are accepted, with one warning. State dicts have the names of the unwrapped model,
and this rank's rows as plain tensors, so that each rank saves its own file.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdp2.core.errors import coded
from fsdp2.core.facts import current_world, default_mesh, records_below, walk
from fsdp2.interop import MixedPrecisionPolicy
from fsdp2.optim.norms import clip_grad_norm_
from fsdp2.sharding.api import fully_shard, plan_calls
from fsdp2.sharding.module import FSDPModule, sharded_class
from fsdp2.wrap import wrapper_module
from fsdp2.wrap.choices import Choice, Policy, Wrapper, chosen_modules, wrap_chosen
from fsdp2.wrap.wrapper_module import PREFIX, WrapperModule
from fsdp2.xla.shards import FORMAT, ShardMetadata, describe, local, whole

M = TypeVar("M", bound=nn.Module)

_MEANINGLESS: Mapping[str, object] = {
    "optimization_barrier_in_forward": True,
    "optimization_barrier_in_backward": True,
    "sync_on_finalization": False,
    "pin_layout_in_collective_ops": True,
}
"""Arguments that only a lazy compiler reads, and their defaults."""

_Given = Mapping[str, Any]
"""The wrapper's arguments, by name."""

_said: set[str] = set()


def _say_once(argument: str, words: str) -> None:
    if argument not in _said:
        _said.add(argument)
        warnings.warn(f"{argument} {words}", stacklevel=4)


@dataclass(frozen=True)
class _Plan:
    """A unit to be: the arguments of `fully_shard`, and what else it is given."""

    module: nn.Module
    arguments: dict[str, Any]
    buffer_dtype: torch.dtype | None
    pack_below: int | None
    init_fn: Callable[[nn.Module], object] | None


class XlaFullyShardedDataParallel(WrapperModule):
    """Shard a module's parameters over ranks, with the interface of XLA's FSDP, on any device.

    The module becomes a unit of `fully_shard`: its parameters are unsharded before its forward and
    its backward and resharded after each, and its gradients are reduce-scattered. Wrap inner
    modules first, then the model: each wrapper is a unit. Attributes that the wrapper does not have
    are looked up on the module, including the methods of `FSDPModule`. Create optimizers after
    wrapping, and call their ``step()``.

    Args:
        module: the module to wrap. Parameters and buffers are moved to the device of the ranks. A
            module that `fully_shard` or `shard_model` has sharded stays unchanged, and the wrapper
            only saves and loads its shards. On a mesh (replicate, shard), ``sharding_groups`` are
            the groups along the shard dim.
        reshard_after_forward: ``True`` (default) reshards parameters after forward.
        flatten_parameters: with either value, parameters share one flat shard and are sent
            together, and keep their own names and shapes. Both values give the same results.
            Default ``False``.
        execute_sharding_on_init: ``False`` leaves parameters unsharded until the wrapper is first
            used (its forward, parameters, state dicts), or until `execute_sharding`. Default
            ``True``.
        optimization_barrier_in_forward: accepted: there is no compiler to hold back.
        optimization_barrier_in_backward: accepted, as well.
        sync_on_finalization: accepted: operations run immediately.
        disable_reshard_on_root: ``True`` (default) keeps the parameters of the outermost wrapper
            unsharded between forward and backward, whatever ``reshard_after_forward`` is.
        compute_dtype: dtype of unsharded parameters and of floating-point inputs of forward.
            ``None`` (default): that of the parameters. Shards keep theirs.
        buffer_dtype: dtype of floating-point buffers. Default: ``compute_dtype``.
        fp32_reduce_scatter: ``True`` reduces gradients in float32, ``False`` (default) in the
            compute dtype.
        sharding_groups: lists of ranks, of equal size, that contain every rank once. Parameters are
            sharded over the list that contains this rank, and gradients averaged over it; the lists
            do not communicate with each other. ``None`` (default): all ranks. All ranks pass the
            same lists.
        sharding_rank: this rank's position in its list, in ascending order of ranks. It is known,
            and compared if given.
        sharding_world_size: length of the list; compared if given.
        shard_param_on_dim_0: ``True`` shards all parameters on dim 0. ``False`` (default) uses
            another dim for those that would pad too much (`fully_shard` defines this).
        pin_layout_in_collective_ops: accepted: layouts do not change in fsdp2.
        coalesce_all_gather_ops: with both values, all-gathers of a unit are one launch if the
            backend supports it.
        reduce_scatter_bucket_size_mb: MiB. Parameters of which a rank's piece is smaller are packed
            in one buffer (`FSDPModule.set_tuning`), also in all-gathers. 0 or ``None``
            (default 0) leave the threshold unchanged.
        auto_wrap_policy: selects modules below to wrap: a policy of `fsdp2.wrap` or of torch's,
            classes of modules, or a function of ``(module, recurse, unwrapped_params)``. The
            function returns for each module whether to descend into it (``recurse``), or whether to
            wrap it, given the number of elements that are in no wrapper yet. ``None`` (default)
            wraps none.
        auto_wrapper_callable: wraps the policy's modules: called with the module and this wrapper's
            arguments except these two. Default: this class.
        param_init_fn: called with this module if parameters of it are on the meta device, to give
            them memory and values. Default: ``to_empty`` and ``reset_parameters()`` of each module
            that has some. All ranks must produce the same values: use the same seed.

    Raises:
        TypeError: ``module`` is not a module, or ``auto_wrap_policy`` is not a policy.
        ValueError: it is a wrapper already, the groups are invalid, or as for `fully_shard`.

    Example::

        from fsdp2.xla import XlaFullyShardedDataParallel as FSDP

        model.block = FSDP(model.block, compute_dtype=torch.bfloat16)
        model = FSDP(model, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        model(x).sum().backward()
        optimizer.step()

    The interface is that of torch_xla 2.7's class of this name.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        coalesce_all_gather_ops: bool = False,
        reduce_scatter_bucket_size_mb: float | None = 0,
        auto_wrap_policy: Policy | None = None,
        auto_wrapper_callable: Wrapper | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
    ) -> None:
        given = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "module", "__class__")
        }
        super().__init__()
        self._plan = _planned(module, given)
        self._mesh: DeviceMesh = self._plan.arguments["mesh"]
        _say_what_is_meaningless(given)
        self._buffer_dtypes: dict[str, str] = {}
        chosen = _chosen_below(module, auto_wrap_policy, given)
        if chosen and execute_sharding_on_init and auto_wrapper_callable is None:
            inner = [_planned(choice.module, choice.options) for choice in chosen]
            _check_ahead([*inner, self._plan])
        wrap_chosen(module, chosen, auto_wrapper_callable or type(self))
        self._hold(module)
        self.register_load_state_dict_pre_hook(_rows_become_whole)
        if execute_sharding_on_init:
            self.execute_sharding()

    # ---- sharding

    def execute_sharding(self) -> None:
        """Shard the parameters that ``execute_sharding_on_init=False`` has deferred; wrappers below
        first.

        It has no effect if everything is sharded. All ranks must call it.

        Example::

            model = XlaFullyShardedDataParallel(model, execute_sharding_on_init=False)
            model.load_state_dict(full)  # the unwrapped model's
            model.execute_sharding()
        """
        if isinstance(self._wrapped, FSDPModule):
            return
        below = reversed(list(self._wrapped.modules()))
        wrappers: list[XlaFullyShardedDataParallel] = [
            each
            for each in below
            if isinstance(each, XlaFullyShardedDataParallel)
            and not isinstance(each._wrapped, FSDPModule)
        ]
        wrappers.append(self)
        _check_ahead([each._plan for each in wrappers])
        for each in wrappers:
            each._shard()

    def _shard(self) -> None:
        plan = self._plan
        _materialize(self._wrapped, plan.init_fn, self._mesh.device_type)
        fully_shard(self._wrapped, **plan.arguments)
        if plan.pack_below is not None:
            self._unit.set_tuning(pack_below=plan.pack_below, recurse=False)
        if plan.buffer_dtype is not None:
            self._cast_buffers(plan.buffer_dtype)

    def _cast_buffers(self, dtype: torch.dtype) -> None:
        members = list(_own_modules(self._wrapped))
        prefixes = dict(members)
        for member, before in wrapper_module.cast_buffers(members, dtype).items():
            for name, kept in before.items():
                self._buffer_dtypes[f"{prefixes[member]}{name}"] = str(kept).removeprefix("torch.")

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._inside

    @property
    def _unit(self) -> FSDPModule:
        self.execute_sharding()
        module: object = self._wrapped
        assert isinstance(module, FSDPModule)
        return module

    @property
    def rank(self) -> int:
        """This rank's position in its sharding group."""
        return self._mesh.get_local_rank()

    @property
    def world_size(self) -> int:
        """Ranks of the sharding group."""
        return self._mesh.size()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self.execute_sharding()
        return self._inside(*args, **kwargs)

    # ---- parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``, by the names of the unwrapped model."""
        self.execute_sharding()
        yield from super().named_parameters(*args, **kwargs)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a ``.grad``."""
        return [param for param in self.parameters() if param.grad is not None]

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return names of the unwrapped model, and the parameters as optimizers see them.

        Returns:
            Pairs of a name and a DTensor of the parameter's full shape, of which this rank holds
            its rows; including wrappers below.

        Example::

            decay = [p for n, p in model.get_original_names_and_sharded_parameters() if p.ndim > 1]
        """
        return list(self.named_parameters())

    # ---- gradients

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = True) -> None:
        """Divide summed gradients by ``pre * post`` instead of the number of ranks.

        XLA divides by ``pre`` before the reduction and by ``post`` after it. fsdp2 divides by the
        product at the point that suits the backend: results differ at most by a rounding.

        Args:
            pre: a positive number.
            post: a positive number.
            recursive: whether it applies to wrappers below. Default ``True``.

        Raises:
            ValueError: a factor is not a positive number.
        """
        for factor in (pre, post):
            if not isinstance(factor, int | float) or not 0 < factor < math.inf:
                raise coded(
                    ValueError,
                    "xla-divide-factors",
                    f"set_gradient_divide_factors takes two positive numbers, not {pre!r} and "
                    f"{post!r}; pass for example 1.0 and 1.0 to sum over the ranks",
                )
        for record in records_below(self._unit, recursive):
            record.unit.change(divide_factor=float(pre * post))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Scale gradients in place so that their total norm is at most ``max_norm``.

        Call it on the outermost wrapper of every rank, after backward.

        Args:
            max_norm: of all gradients together, over all ranks of the sharding group.
            norm_type: p of the p-norm; ``inf`` for the largest absolute value. Default 2.
            groups: lists of ranks over which the norm is taken; only the sharding groups
                themselves. Default ``None``: these.

        Returns:
            The norm before clipping: shape ``()``, the same on all ranks of the group.

        Raises:
            ValueError: ``groups`` are others, or as for `fsdp2.clip_grad_norm_`.

        Example::

            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
        """
        mine = self._mesh.mesh.tolist()
        if groups is not None and mine not in [list(group) for group in groups]:
            raise coded(
                ValueError,
                "xla-clip-groups",
                f"clip_grad_norm_(groups={[list(group) for group in groups]}) leaves out the "
                f"sharding group {mine}, which holds the gradients; leave groups out, or use "
                f"fsdp2.optim.get_total_norm and fsdp2.optim.clip_grads_with_norm_",
            )
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose backwards accumulate unsharded gradients on each rank, without
        communication.

        The first backward outside reduces the sum. It applies to wrappers below. The flags are
        restored at the end, also after an exception.

        Example::

            with model.no_sync():
                model(first).sum().backward()
            model(second).sum().backward()
        """
        unit = self._unit
        with wrapper_module.flags_put_back(record.unit for record in records_below(unit)):
            unit.set_requires_gradient_sync(False)
            yield

    # ---- state dicts

    def state_dict(self, *args: object, **kwargs: Any) -> Any:
        """Return the local shards and the buffers, as plain tensors by the names of the unwrapped
        model.

        Wrappers below return the same, also in an enclosing model that is not wrapped. Save it in
        one file per rank, together with `get_shard_metadata`. The tensors share the shards' memory:
        clone those that must not change.

        Args:
            args: as for ``nn.Module.state_dict``.
            kwargs: as well: ``destination``, ``prefix``, and ``keep_vars``, with which the
                parameters themselves are returned.

        Example::

            checkpoint = {
                "model": model.state_dict(),
                "shard_metadata": model.get_shard_metadata(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(checkpoint, f"ckpt_rank-{model.rank}-of-{model.world_size}.pth")
        """
        self.execute_sharding()
        found = self.module.state_dict(*args, **kwargs)
        if not kwargs.get("keep_vars", False):
            for name in [name for name in found if name.startswith(kwargs.get("prefix", ""))]:
                found[name] = local(found[name])
        return found

    def get_shard_metadata(self) -> ShardMetadata:
        """Return the metadata of `state_dict`: plain values, to be saved with it on each rank.

        Returns:
            Rank and number of ranks, the shape of each parameter and the dim on which it is
            sharded, and the dtypes of buffers before ``buffer_dtype``.

        Raises:
            ValueError: a parameter is sharded over other ranks than this wrapper's, or on two dims.
        """
        self.execute_sharding()
        params = self.named_parameters(remove_duplicate=False)
        buffers: dict[str, str] = {}
        for name, below in self.named_modules():
            if isinstance(below, XlaFullyShardedDataParallel):
                prefix = f"{name}.".replace(PREFIX, "") if name else ""
                buffers.update({prefix + k: v for k, v in below._buffer_dtypes.items()})
        return {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "shard_info": describe(params, self.world_size),
            "buffer_info": buffers,
            "flatten_info": {},
        }


def _rows_become_whole(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a load: the wrapper's names for the unwrapped model's, DTensors over rows."""
    assert isinstance(wrapper, XlaFullyShardedDataParallel)
    named = nn.Module.named_parameters(wrapper, remove_duplicate=False)  # which shards nothing
    params = {name.replace(PREFIX, ""): param for name, param in named}
    found: dict[str, object] = {}
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix).replace(PREFIX, "")
        value = state[key]
        found[prefix + PREFIX + name] = whole(name, value, params.get(name, value))
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    state.update(found)


# ---- functions


def checkpoint_module(module: M) -> M:
    """Make a module's forward keep only its inputs, and run again in backward.

    It is non-reentrant ``torch.utils.checkpoint.checkpoint`` around ``module.forward``. Inside a
    wrapper, ``FSDP(checkpoint_module(block))``, parameters are unsharded once in backward; around
    one, ``checkpoint_module(FSDP(block))``, it works as well.

    Args:
        module: changed in place: its ``forward`` is replaced.

    Returns:
        The module itself.

    Raises:
        TypeError: it is not a module.

    Example::

        block = XlaFullyShardedDataParallel(checkpoint_module(block))
    """
    if not isinstance(module, nn.Module):
        raise coded(
            TypeError,
            "xla-checkpoint",
            f"checkpoint_module takes a module, not {type(module).__name__}",
        )
    own = module.__dict__.get("forward")
    reference = weakref.ref(module)  # a module does not keep itself alive

    def forward(*args: object, **kwargs: Any) -> object:
        found = reference()
        assert found is not None
        run = functools.partial(type(found).forward, found) if own is None else own
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    module.forward = forward
    return module


# ---- arguments


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise coded(
            TypeError,
            "xla-not-a-module",
            f"XlaFullyShardedDataParallel takes a module, not {type(module).__name__}",
        )
    if isinstance(module, XlaFullyShardedDataParallel):
        raise coded(
            ValueError,
            "xla-wrapped-twice",
            f"XlaFullyShardedDataParallel got a wrapper around {type(module.module).__name__}; "
            f"wrap each module once, inner ones first",
        )
    sharded_class(module)  # raises if there can be none


def _say_what_is_meaningless(given: _Given) -> None:
    for name, default in _MEANINGLESS.items():
        if given[name] is not default:
            _say_once(name, "changes nothing here: it is for a compiler that runs later")
    if given["coalesce_all_gather_ops"]:
        _say_once(
            "coalesce_all_gather_ops", "changes nothing: the backend's coalesced calls are used"
        )


def _planned(module: nn.Module, given: _Given) -> _Plan:
    """The unit that a wrapper would create from a module with these arguments."""
    _check_module(module)
    reshard: bool | None = bool(given["reshard_after_forward"])
    if reshard and given["disable_reshard_on_root"]:
        reshard = None
    compute, megabytes = given["compute_dtype"], given["reduce_scatter_bucket_size_mb"]
    if megabytes is not None and (isinstance(megabytes, bool) or not 0 <= megabytes < math.inf):
        raise coded(
            ValueError,
            "xla-bucket",
            f"reduce_scatter_bucket_size_mb={megabytes!r} is not a number of MiB; pass 0 or more",
        )
    reduce = torch.float32 if given["fp32_reduce_scatter"] else compute
    arguments = {
        "mesh": _mesh(*(given[f"sharding_{name}"] for name in ("groups", "rank", "world_size"))),
        "reshard_after_forward": reshard,
        "shard_placement_fn": _on_dim_0 if given["shard_param_on_dim_0"] else None,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
    }
    pack_below = int(megabytes * (1 << 20)) if megabytes else None
    buffers = given["buffer_dtype"] or compute
    return _Plan(module, arguments, buffers, pack_below, given["param_init_fn"])


def _check_ahead(plans: Sequence[_Plan]) -> None:
    """Raise errors that are known before units are created in this order; changes nothing.

    Each is planned again once its parameters have memory and values.
    """
    plans = [plan for plan in plans if not isinstance(plan.module, FSDPModule)]
    pending = {plan.module for plan in plans}
    for plan in plans:
        if plan.init_fn is None:
            wrapper_module.check_resets(_without_memory(plan.module, pending))
    plan_calls(((plan.module, plan.arguments) for plan in plans), ahead=True)


def _mesh_of_groups(groups: tuple[tuple[int, ...], ...]) -> DeviceMesh:
    """A 1-D mesh over this rank's group of several independent groups.

    All ranks of the default process group must call it together. Each is in one of ``groups``, all
    of one size, in ascending order, as torch numbers the ranks of a process group and pieces are
    held; otherwise it raises a `ValueError`. The same groups get one mesh.
    """
    world = default_mesh()  # starts the default process group
    named = sorted(rank for group in groups for rank in group)
    if named != list(range(world.size())) or len({len(group) for group in groups}) != 1:
        raise coded(
            ValueError,
            "xla-groups",
            f"sharding_groups={[list(group) for group in groups]} must be groups of equal size "
            f"that name each of the {world.size()} ranks once; pass for example [[0, 1], [2, 3]] "
            f"for 4 ranks",
        )
    ordered = tuple(tuple(sorted(group)) for group in groups)
    return _made_mesh(ordered, world.device_type, current_world())


@functools.lru_cache(maxsize=64)
def _made_mesh(groups: tuple[tuple[int, ...], ...], device_type: str, world: object) -> DeviceMesh:
    return DeviceMesh(device_type, torch.tensor(groups), mesh_dim_names=("group", "shard"))["shard"]


def _mesh(groups: Sequence[Sequence[int]] | None, rank: int | None, size: int | None) -> DeviceMesh:
    if groups is None:
        mesh = default_mesh()
    else:
        mesh = _mesh_of_groups(tuple(tuple(int(r) for r in group) for group in groups))
    for name, told, known in (
        ("sharding_rank", rank, mesh.get_local_rank()),
        ("sharding_world_size", size, mesh.size()),
    ):
        if told is not None and told != known:
            raise coded(
                ValueError,
                "xla-group-position",
                f"{name}={told} does not fit the sharding group {mesh.mesh.tolist()}, where it is "
                f"{known}; leave {name} out",
            )
    return mesh


def _on_dim_0(param: nn.Parameter) -> Shard:
    return Shard(0)


# ---- modules below


def _chosen_below(module: nn.Module, policy: Policy | None, given: _Given) -> list[Choice]:
    """The modules below that a policy chooses, and that are in no wrapper yet."""
    if policy is None:
        return []
    wrappers = [m for m in module.modules() if isinstance(m, XlaFullyShardedDataParallel)]
    taken = {below for each in wrappers for below in each.modules()}
    params = [p for below in taken for p in below._parameters.values() if p is not None]
    inner = {name: value for name, value in given.items() if not name.startswith("auto_wrap")}
    return chosen_modules(
        module, policy, ignored_modules=taken, ignored_params=params, options=inner
    )


def _own_modules(
    module: nn.Module, pending: Set[nn.Module] = frozenset()
) -> list[tuple[nn.Module, str]]:
    """A module and those below that are in no other wrapper, with what their names begin with."""

    def leaves_out(below: nn.Module) -> bool:
        return below in pending or isinstance(below, XlaFullyShardedDataParallel)

    return walk(module, leaves_out)


def _without_memory(
    module: nn.Module, pending: Set[nn.Module] = frozenset()
) -> list[tuple[nn.Module, str]]:
    """Those of them that have tensors on the meta device."""
    return [
        (member, prefix)
        for member, prefix in _own_modules(module, pending)
        if any(tensor.is_meta for _, tensor in wrapper_module.tensors_of(member))
    ]


def _materialize(
    module: nn.Module, init: Callable[[nn.Module], object] | None, device: str
) -> None:
    """Give parameters on the meta device memory and values."""
    found = _without_memory(module)
    if not found:
        return
    if init is None:
        wrapper_module.reset(found, device)
    else:
        init(module)
    wrapper_module.check_values(list(_own_modules(module)))

"""`FullyShardedDataParallel`: the wrapper of torch's FSDP1 over units of `fully_shard`.

    FullyShardedDataParallel(module, …)
      plans everything (`fsdp2.fsdp1.planned`), and raises if something is invalid creates wrappers
      of modules below first fully_shard(module, …), and setters of its unit
    forward ──> the module's own; its unit does the rest

A step therefore costs the same as without the wrapper, plus one call per wrapper.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.errors import coded
from fsdp2.core.facts import PrefetchTime, ProcessGroup, UnitRecord, require_record
from fsdp2.fsdp1 import optimizer_states as states
from fsdp2.fsdp1.comm_hooks import Hook, HookedReduceScatter, HookedReplicas
from fsdp2.fsdp1.config import (
    HYBRID,
    KEEPS_GATHERED,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fsdp2.fsdp1.construction import (
    cast_buffers,
    clean_states,
    follow_original_parameters,
    in_full_precision,
    is_wrapper,
    keep_low_precision,
    materialise,
    synchronise,
)
from fsdp2.fsdp1.flat_parameter import FlatParameter
from fsdp2.fsdp1.planned import (
    Given,
    WrapperPlan,
    arguments_of,
    check_plans,
    chosen_below,
    plan_wrapper,
)
from fsdp2.fsdp1.state_dicts import (
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
    use_full_state_dicts,
)
from fsdp2.full import gathered
from fsdp2.interop.wrapped import TorchWrapperIdentity
from fsdp2.optim.norms import clip_grad_norm_
from fsdp2.sharding.api import fully_shard
from fsdp2.sharding.module import FSDPModule
from fsdp2.wrap.choices import Policy, wrap_chosen
from fsdp2.wrap.wrapper_module import WrapperModule, flags_put_back

ProcessGroups = ProcessGroup | tuple[ProcessGroup, ProcessGroup]
"""One group, or two: to shard over and to replicate over."""


class FullyShardedDataParallel(WrapperModule, TorchWrapperIdentity):
    """Wrap a module and shard its parameters, with the interface of torch's FSDP1.

    Names, order, defaults and meaning of the arguments are those of torch's documentation of
    ``torch.distributed.fsdp.FullyShardedDataParallel``; docs/compat_fsdp1.md has a row for each.
    Parameters are DTensors with their own names and shapes. Wrap bottom-up, or pass a policy;
    create the optimizer afterwards.

    Args:
        module: the module. Wrappers below it keep their parameters.
        process_group: the ranks to shard over; for hybrid strategies a pair, to shard over and to
            replicate over. ``None`` (default): all ranks; for hybrid strategies, shards inside a
            node.
        sharding_strategy: a `ShardingStrategy`. ``None`` (default): ``FULL_SHARD``.
        cpu_offload: a `CPUOffload`. ``None`` (default): shards stay on the device.
        auto_wrap_policy: selects modules below that get separate wrappers: an object or function of
            `fsdp2.wrap`, or of torch's. ``None`` (default): none.
        backward_prefetch: a `BackwardPrefetch`, or ``None`` for no prefetch in backward. Default
            ``BACKWARD_PRE``.
        mixed_precision: a `MixedPrecision`. ``None`` (default): each parameter's own dtype.
        ignored_modules: modules whose parameters, and those below, are not managed.
        param_init_fn: called with each module if some have parameters on the meta device. ``None``
            (default): their ``reset_parameters()``.
        device_id: the device to compute on. ``None`` (default): the parameters' device, or the
            accelerator, or the CPU without one.
        sync_module_states: whether all ranks get the first one's parameters and buffers. Default
            ``False``.
        forward_prefetch: accepted, no effect: forward always prefetches the next unit.
        limit_all_gathers: accepted, no effect: at most two units are unsharded at any time.
        use_orig_params: parameters have their own names and shapes in any case. With ``True``,
            optimizers that were created earlier train them as well. Default ``False``.
        ignored_states: modules, or parameters, that are not managed.
        device_mesh: instead of ``process_group``: (shard,), or (replicate, shard).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments are inconsistent with each other or with the module; the message names
            them.

    Example::

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())
    """

    _is_fsdp2_wrapper = True
    _comm_hook: Hook

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        given = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "module", "__class__")
        }
        plan = plan_wrapper(module, given)
        chosen, apart = chosen_below(plan)
        inner = [plan_wrapper(c.module, _completed(c.module, **c.options)) for c in chosen]
        check_plans([*inner, plan])
        for below in apart:
            in_full_precision(below)
        wrap_chosen(module, chosen, FullyShardedDataParallel)
        device, mesh = plan.device, plan.mesh
        nn.Module.__init__(self)
        self.compute_device, self._is_inner = device, False
        self._use_orig_params = use_orig_params
        self.forward_prefetch, self.limit_all_gathers = forward_prefetch, limit_all_gathers
        materialise(module, param_init_fn, device, plan.ignored)
        if sync_module_states:
            axes = [mesh.get_group(dim) for dim in range(mesh.ndim)]
            synchronise(module, axes, device, plan.ignored)
        if use_orig_params:
            follow_original_parameters(module)
        _shard(plan)
        self._take(plan)

    def _take(self, plan: WrapperPlan) -> None:
        """Hold the sharded module, and what it was sharded with."""
        mesh = plan.mesh
        self.sharding_strategy, self.backward_prefetch = plan.strategy, plan.prefetch
        self.mixed_precision = plan.precision
        self.cpu_offload = CPUOffload(plan.offload is not None)
        self.process_group = mesh.get_group(mesh.ndim - 1)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self._hold(plan.module)
        clean_states(self)
        use_full_state_dicts(self._record)
        for below in self.fsdp_modules(self):
            if below is not self:
                below._become_inner()

    # ---- the module inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; its unit unshards and reshards the parameters."""
        return self._inside(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module; if a checkpoint wrapper is directly inside, the module in it."""
        inside = self._inside
        held = inside._modules.get("_checkpoint_wrapped_module")
        return inside if held is None else held

    def __dir__(self) -> list[str]:
        """Its own names."""
        return nn.Module.__dir__(self)

    # ---- what is below

    def _become_inner(self) -> None:
        """An enclosing wrapper was created: inputs are cast if its own configuration says so."""
        self._is_inner = True
        precision = self.mixed_precision
        casts = precision.param_dtype if precision.cast_forward_inputs else None
        self._record.cast_to = casts

    @property
    def _record(self) -> UnitRecord:
        return require_record(self._wrapped)

    @property
    def _unit_module(self) -> FSDPModule:
        """The wrapped module, which has the methods of its unit."""
        found: object = self._wrapped
        assert isinstance(found, FSDPModule)
        return found

    @property
    def _has_params(self) -> bool:
        return bool(self._record.unit.own_groups)

    @property
    def _flat_param(self) -> FlatParameter | None:
        return FlatParameter(self._wrapped) if self._has_params else None

    _handle = _flat_param

    def check_is_root(self) -> bool:
        """Return whether no other wrapper encloses this one."""
        return not self._is_inner

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers at and below ``module``, parents first.

        Args:
            module: any module.
            root_only: whether to return only those that no other wrapper encloses. Default
                ``False``.
        """
        found: list[Any] = [member for member in module.modules() if is_wrapper(member)]
        return [member for member in found if not (root_only and member._is_inner)]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` with each module below and with this one, while its parameters are full.

        The parameters of each wrapper are full in turn, and changes by ``fn`` are written back. All
        ranks must call it, and make the same changes.

        Args:
            fn: called with each module, children first.

        Returns:
            The wrapper.
        """
        with gathered(self._wrapped, recurse=False):
            nn.Module.apply(self, fn)
        return self

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which parameters are full; as with `fsdp2.gathered`, every combination
        works.

        Args:
            module: a wrapper, or any module.
            recurse: whether it applies to wrappers below. Default ``True``.
            writeback: whether changes are kept. Default ``True``.
            rank0_only: whether other ranks keep their shards. Default ``False``.
            offload_to_cpu: whether full parameters are in CPU memory. Default ``False``.
            with_grads: whether gradients are full, too. Default ``False``.
        """
        inside: Any = module._wrapped if is_wrapper(module) and not recurse else module
        return gathered(
            inside,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    # ---- state dicts

    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type)
    full_optim_state_dict = staticmethod(states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(states.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(states.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(states.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(states.rekey_optim_state_dict)
    optim_state_dict = staticmethod(states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(states.optim_state_dict_to_load)

    # ---- gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose backwards accumulate gradients on each rank, without communication.

        The first backward after it reduces the sum. It also works with offloaded parameters.
        Strategies that keep parameters unsharded from forward to backward also keep them after
        backward in this context.

        Raises:
            RuntimeError: called on a wrapper inside another one.
        """
        self._require_root("no_sync")
        wrappers = self.fsdp_modules(self)
        with flags_put_back(wrapper._record.unit for wrapper in wrappers):
            for wrapper in wrappers:
                wrapper._unit_module.set_requires_gradient_sync(False, recurse=False)
                if wrapper.sharding_strategy in KEEPS_GATHERED:
                    wrapper._record.unit.reshard_after_backward = False
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients in place so that their norm is at most ``max_norm``.

        All ranks must call it. Equivalent to `fsdp2.clip_grad_norm_` of the wrapper's parameters.

        Args:
            max_norm: the largest norm.
            norm_type: p of the p-norm; ``inf`` too. Default 2.

        Returns:
            The norm before clipping, of shape ``()``, in the widest dtype of the gradients.

        Raises:
            RuntimeError: called on a wrapper inside another one.
        """
        self._require_root("clip_grad_norm_")
        total = clip_grad_norm_(self.parameters(), max_norm, norm_type)
        dtypes = [param.grad.dtype for param in self.parameters() if param.grad is not None]
        return total.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else total

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let a function reduce the gradients of all wrappers below, and of this one.

        Args:
            state: the function's first argument.
            hook: with sharded parameters called as ``hook(state, grad, output)``: reduces the flat
                gradient [ranks * n] and writes this rank's part to the output [n]. With
                ``NO_SHARD`` called as ``hook(state, grad)``: reduces in place. The hook also
                divides. `fsdp2.fsdp1.comm_hooks` has the usual ones; torch's are accepted.

        Raises:
            RuntimeError: called on a wrapper inside another one, or a second time.
            ValueError: a wrapper has a hybrid strategy.
            TypeError: ``hook`` cannot be called.
        """
        self._require_root("register_comm_hook")
        if not callable(hook):
            raise coded(
                TypeError,
                "fsdp1-hook-type",
                f"register_comm_hook takes a function, not {hook!r}; pass one",
            )
        wrappers = self.fsdp_modules(self)
        for wrapper in wrappers:
            if wrapper.sharding_strategy in HYBRID:
                raise coded(
                    ValueError,
                    "fsdp1-hook-hybrid",
                    f"register_comm_hook cannot be used with {wrapper.sharding_strategy.name}, "
                    f"whose gradients are reduced over two groups; use another strategy",
                )
            if wrapper.__dict__.get("_comm_hook") is not None:
                raise coded(
                    RuntimeError,
                    "fsdp1-hook-twice",
                    "register_comm_hook was called before on this model; call it once",
                )
        for wrapper in wrappers:
            wrapper._comm_hook = hook
            unit = wrapper._unit_module
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_reduce_scatter(HookedReduceScatter(state, hook))
            for group in wrapper._record.unit.own_groups:
                if group.replicas is not None and group.replicas.group is not None:
                    hooked = HookedReplicas(group.replicas.group, group.device, state, hook)
                    group.set_replicas(hooked)

    def _require_root(self, method: str) -> None:
        if self._is_inner:
            raise coded(
                RuntimeError,
                "fsdp1-inner",
                f"{method}() was called on a FullyShardedDataParallel inside another; call it on "
                f"the outermost one",
            )


# ---- construction


def _completed(module: nn.Module, **given: Any) -> Given:
    """The arguments of a wrapper by name, with their defaults."""
    bound = _SIGNATURE.bind(None, module, **given)
    bound.apply_defaults()
    return {k: v for k, v in bound.arguments.items() if k not in ("self", "module")}


_SIGNATURE = inspect.signature(FullyShardedDataParallel.__init__)


def _shard(plan: WrapperPlan) -> None:
    """Create a unit from the parameters that no wrapper below has."""
    precision = plan.precision
    unit: Any = plan.module  # an FSDPModule behind this
    cast_buffers(unit, precision.buffer_dtype, plan.ignored)
    fully_shard(unit, **arguments_of(plan))
    record = require_record(unit)
    times = {
        BackwardPrefetch.BACKWARD_PRE: PrefetchTime.BEFORE,
        BackwardPrefetch.BACKWARD_POST: PrefetchTime.AFTER,
        None: PrefetchTime.NEVER,
    }
    unit.set_tuning(backward_prefetch=times[plan.prefetch], recurse=False)
    if precision.cast_root_forward_inputs:  # until another wrapper is made around it
        record.cast_to = precision.param_dtype
    if precision.keep_low_precision_grads and precision.param_dtype is not None:
        params = (param for group in record.unit.own_groups for param in group.params)
        keep_low_precision((param.sharded for param in params), precision.param_dtype)

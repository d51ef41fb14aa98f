"""Steps of a wrapper's constructor before sharding: choose, materialize, synchronize, cast.

    ignored_modules, ignored_states ──> Ignored         modules and parameters that are ignored
    policy                          ──> chosen          which modules get wrappers of their own
    meta parameters                 ──> materialize     param_init_fn, or reset_parameters()
    sync_module_states              ──> synchronise     the first rank's parameters and buffers
    use_orig_params                 ──> follow_original_parameters   optimizers made before
    buffer_dtype                    ──> cast_buffers    and back in state dicts
    classes left in full precision  ──> in_full_precision   inputs to float32, outputs back

No step looks into wrappers that exist already.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.core.errors import coded
from fsdp2.core.facts import (
    ProcessGroup,
    broadcast_from_first,
    cast,
    optimizer_changed,
    record_of,
    walk,
)
from fsdp2.optim import repoint_optimizer
from fsdp2.wrap import wrapper_module
from fsdp2.wrap.wrapper_module import INSIDE, Members


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper of ours."""
    return getattr(type(module), "_is_fsdp2_wrapper", False)


def own_modules(
    module: nn.Module, pending: Set[nn.Module] = frozenset()
) -> list[tuple[nn.Module, str]]:
    """``module`` and those below it, breadth first, without what a wrapper or a unit has."""

    def leaves_out(below: nn.Module) -> bool:
        return below in pending or is_wrapper(below) or record_of(below) is not None

    return walk(module, leaves_out, by_depth=True)


# ---- what is left alone


@dataclass(frozen=True)
class Ignored:
    """The modules and parameters that a wrapper does not manage."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


def ignored_of(
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Module] | Iterable[nn.Parameter] | None,
) -> Ignored:
    """The modules and parameters that the two arguments name."""
    if ignored_modules is not None and ignored_states is not None:
        raise coded(
            ValueError,
            "fsdp1-ignored-twice",
            "FullyShardedDataParallel got ignored_modules and ignored_states; pass only "
            "ignored_states",
        )
    given: Iterable[object] | None = ignored_modules if ignored_states is None else ignored_states
    named: list[object] = [] if given is None else list(given)
    kinds: tuple[type, ...] = (nn.Module,) if ignored_states is None else (nn.Module, nn.Parameter)
    for member in named:
        if not isinstance(member, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise coded(
                TypeError,
                "fsdp1-ignored-type",
                f"FullyShardedDataParallel's ignored modules and states are of {wanted}, but got "
                f"a {type(member).__name__}; leave it out",
            )
        if isinstance(member, nn.Module) and is_wrapper(member):
            raise coded(
                ValueError,
                "fsdp1-ignored-wrapper",
                "FullyShardedDataParallel got a FullyShardedDataParallel to ignore; pass the "
                "modules or parameters to ignore when you create that wrapper",
            )
    roots = [member for member in named if isinstance(member, nn.Module)]
    if roots and len(roots) < len(named):
        raise coded(
            ValueError,
            "fsdp1-ignored-mixed",
            "FullyShardedDataParallel(ignored_states=…) got modules and parameters; pass only one "
            "kind",
        )
    modules = {below for root in roots for below, _ in own_modules(root)}
    params = {param for module in modules for param in module.parameters(recurse=False)}
    params |= {member for member in named if isinstance(member, nn.Parameter)}
    return Ignored(frozenset(modules), frozenset(params))


# ---- which modules are wrapped


def check_nothing_wrapped(module: nn.Module) -> None:
    """Raise if a policy would find wrappers below ``module``."""
    for name, below in module.named_modules():
        if is_wrapper(below) or record_of(below) is not None:
            raise coded(
                ValueError,
                "fsdp1-wrapped-before",
                f"FullyShardedDataParallel(auto_wrap_policy=…) found that '{name}' is sharded "
                f"already; leave the policy out, or wrap nothing before",
            )


# ---- values


def check_can_materialise(
    module: nn.Module,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Ignored,
    pending: Set[nn.Module],
) -> None:
    """Raise what `materialise` would before it calls anybody; changes nothing."""
    if init_fn is not None and not callable(init_fn):
        raise coded(
            TypeError,
            "fsdp1-init-type",
            f"FullyShardedDataParallel(param_init_fn=…) takes a function of a module, not "
            f"{init_fn!r}",
        )
    if init_fn is None:
        members = list(own_modules(module, pending))
        wrapper_module.check_resets(_to_materialise(members, ignored))


def _to_materialise(members: Members, ignored: Ignored) -> Members:
    """Those that have tensors; none if no tensor is on the meta device."""
    having = [
        each
        for each in members
        if each[0] not in ignored.modules and any(True for _ in wrapper_module.tensors_of(each[0]))
    ]
    tensors = (t for member, _ in having for _, t in wrapper_module.tensors_of(member))
    return having if any(tensor.is_meta for tensor in tensors) else []


def materialise(
    module: nn.Module,
    init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    ignored: Ignored,
) -> None:
    """Give memory and values to parameters and buffers on the meta device, if there are any."""
    members = [each for each in own_modules(module) if each[0] not in ignored.modules]
    having = _to_materialise(members, ignored)
    if not having:
        return
    if init_fn is None:
        wrapper_module.reset(having, device)
    else:
        for member, _ in members:
            init_fn(member)
    wrapper_module.check_values(members, ignored.params)


def synchronise(
    module: nn.Module, groups: Iterable[ProcessGroup], device: torch.device, ignored: Ignored
) -> None:
    """Give all ranks the first one's parameters and buffers, before they are sharded."""
    tensors = {
        tensor: None
        for member, _ in own_modules(module)
        if member not in ignored.modules
        for _, tensor in wrapper_module.tensors_of(member)
        if tensor not in ignored.params
    }
    for group in groups:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor).detach()
            sent = local.to(device).contiguous()
            broadcast_from_first(group, sent)
            if sent is not local:
                local.copy_(sent)


# ---- optimizers that were made before

WRAPPED = "_fsdp2_wrapped"
"""Attribute of an original parameter that a wrapper with ``use_orig_params=True`` has sharded."""


def follow_original_parameters(module: nn.Module) -> None:
    """Let optimizers that hold a module's original parameters hold the sharded ones when they step.

    torch's FSDP1 keeps the parameter objects where ``use_orig_params=True``, so that clients make
    optimizers first. Each optimizer is looked at when anything was registered or sharded since.
    """
    for param in module.parameters():
        param.__dict__[WRAPPED] = True


def _repoint(optimizer: torch.optim.Optimizer) -> None:
    held = (param for group in optimizer.param_groups for param in group["params"])
    if any(WRAPPED in param.__dict__ for param in held):
        repoint_optimizer(optimizer)


optimizer_changed.add(_repoint, first=True)  # before they are refused


# ---- dtypes


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Ignored) -> None:
    """Cast floating-point buffers of a wrapper's own modules; state dicts hold their own dtypes."""
    if dtype is None:
        return
    members = [each for each in own_modules(module) if each[0] not in ignored.modules]
    for member, before in wrapper_module.cast_buffers(members, dtype).items():
        member.register_state_dict_post_hook(functools.partial(_cast_back, before))


def _cast_back(
    dtypes: dict[str, torch.dtype],
    module: nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    _: object,
) -> None:
    """Give buffers in a state dict the dtypes that they had before they were cast."""
    for name, dtype in dtypes.items():
        held = state_dict.get(prefix + name)
        if isinstance(held, torch.Tensor):
            state_dict[prefix + name] = held.to(dtype)


def in_full_precision(module: nn.Module) -> None:
    """Let ``module`` compute in float32: its inputs are cast to it, its outputs back."""
    dtypes: list[torch.dtype] = []

    def before(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        dtypes[:] = [
            value.dtype
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ][:1]
        return cast(args, torch.float32), cast(kwargs, torch.float32)

    def after(_: nn.Module, args: object, output: object) -> object:
        return cast(output, dtypes.pop()) if dtypes else output

    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    module.register_forward_hook(after)


def keep_low_precision(params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let the gradients of sharded parameters stay in ``dtype``."""

    def narrow(param: torch.Tensor) -> None:
        grad = param.grad
        if grad is not None and grad.dtype != dtype:
            param.grad_dtype = None  # any
            param.grad = grad.to(dtype)

    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(narrow)


# ---- names


def clean_states(wrapper: nn.Module) -> None:
    """Let state dicts of a wrapper, and those that it loads, have no word of it in their names."""
    reference = weakref.ref(wrapper)

    def saved(_: nn.Module, state_dict: dict[str, object], prefix: str, __: object) -> None:
        rename(state_dict, f"{prefix}{INSIDE}.", prefix)
        versions: dict[str, object] = getattr(state_dict, "_metadata", {})
        for key in list(versions):
            value = versions.pop(key)
            versions[f"{key}.".replace(f"{INSIDE}.", "")[:-1]] = value

    def loaded(_: nn.Module, state_dict: dict[str, object], prefix: str, *__: object) -> None:
        if reference() is not None:
            rename(state_dict, prefix, f"{prefix}{INSIDE}.")

    wrapper.register_state_dict_post_hook(saved)
    wrapper.register_load_state_dict_pre_hook(loaded)


def rename(state_dict: dict[str, object], old: str, new: str) -> None:
    """Replace a prefix of keys in place; other keys stay where they are in the order."""
    for key in list(state_dict):
        value = state_dict.pop(key)
        if key.startswith(old):
            key = new + key[len(old) :]
        state_dict[key] = value

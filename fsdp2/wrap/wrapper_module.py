"""A module around a unit: what the wrappers of FSDP1 and of XLA's FSDP have in common.

    wrapper                    a `WrapperModule`
      └ _fsdp_wrapped_module   the module inside, which is a unit of `fully_shard`
          └ … other wrappers, made before this one

Neither is imported here: each adds its own arguments, methods and state dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp2.core.errors import coded
from fsdp2.core.facts import Unit

INSIDE = "_fsdp_wrapped_module"
"""The attribute under which a wrapper holds its module, as torch's and XLA's do."""

PREFIX = f"{INSIDE}."
"""The prefix that each wrapper adds to names."""

Members = Sequence[tuple[nn.Module, str]]
"""Modules, and what names of their parameters begin with: ``""``, or a name and a dot."""


class WrapperModule(nn.Module):
    """A wrapper: its attributes are those of the module inside, and no name has a trace of it.

    `nn.Module`'s methods are called as such, so that another base class may stand in between.
    """

    _wrapped: nn.Module
    """The module that became the unit."""

    def _hold(self, module: nn.Module) -> None:
        self.add_module(INSIDE, module)
        # Clients put wrappers of their own around it later, such as ``checkpoint_wrapper``'s.
        self.__dict__["_wrapped"] = module

    @property
    def _inside(self) -> nn.Module:
        found = self._modules[INSIDE]
        assert found is not None
        return found

    def __getattr__(self, name: str) -> Any:
        """Return the wrapper's attribute, otherwise that of the module inside."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            inside = self.__dict__.get("_modules", {}).get(INSIDE)
            if inside is None:
                raise
            return getattr(inside, name)

    def __getitem__(self, key: object) -> Any:
        """Index the module inside, such as an ``nn.Sequential``."""
        inside: Any = self._inside
        return inside[key]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of ``nn.Module``, by the names of the unwrapped model."""
        for name, param in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            yield name.replace(PREFIX, ""), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As of ``nn.Module``, by the names of the unwrapped model."""
        for name, buffer in nn.Module.named_buffers(self, prefix, recurse, remove_duplicate):
            yield name.replace(PREFIX, ""), buffer


@contextmanager
def flags_put_back(units: Iterable[Unit]) -> Iterator[None]:
    """A context in which units' flags of a backward may be set: they are as before at the end."""
    before = [(unit, unit.sync, unit.all_reduce, unit.reshard_after_backward) for unit in units]
    try:
        yield
    finally:
        for unit, sync, all_reduce, reshard in before:
            unit.sync, unit.all_reduce, unit.reshard_after_backward = sync, all_reduce, reshard


# ---- values and dtypes, before a module becomes a unit


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a module's own parameters and buffers."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def check_resets(members: Members) -> None:
    """Raise if `reset` could not initialize modules; changes nothing."""
    for member, prefix in members:
        if not callable(getattr(member, "reset_parameters", None)):
            raise coded(
                ValueError,
                "meta-no-reset",
                f"'{prefix.removesuffix('.') or '(root)'}' is on the meta device, and its class "
                f"{type(member).__name__} has no reset_parameters(); pass param_init_fn",
            )


def reset(members: Members, device: torch.device | str) -> None:
    """Give modules memory and their initial values, by their ``reset_parameters()``."""
    check_resets(members)
    for member, _ in members:
        resets: Any = member
        member.to_empty(device=device, recurse=False)
        with torch.no_grad():
            resets.reset_parameters()


def check_values(members: Members, ignored: Set[torch.Tensor] = frozenset()) -> None:
    """See that an initialization has left nothing on the meta device."""
    for member, prefix in members:
        for key, tensor in tensors_of(member):
            if tensor.is_meta and tensor not in ignored:
                name = prefix + key
                raise coded(
                    ValueError,
                    "meta-left",
                    f"'{name}' is still on the meta device after param_init_fn; let that function "
                    f"give each parameter memory, for example with to_empty(), and initialise it",
                )


def cast_buffers(members: Members, dtype: torch.dtype) -> dict[nn.Module, dict[str, torch.dtype]]:
    """Cast modules' own floating-point buffers."""
    found: dict[nn.Module, dict[str, torch.dtype]] = {}
    for member, _ in members:
        for name, buffer in member._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                found.setdefault(member, {})[name] = buffer.dtype
                buffer.data = buffer.to(dtype)
    return found

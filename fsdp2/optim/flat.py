"""Element-wise optimizers over flat shards: a few long tensors instead of many short ones.

    param_groups[i]["params"]   [A, B, C, D]                DTensors, as for other optimizers
    flat shard of a group       [ a a a | b b | c | pad ]   rows of A, B and C on this rank
    runs                        [ a a a   b b   c ] [d]     tensors that the inner optimizer steps
    state of a run              exp_avg: [ a a a b b c ]    `state` shows its rows as DTensors

Gradients that a reduction delivered are adjacent, in the order of a run (`fsdp2.optim.runs`), so
that the run's gradient is a view of them; otherwise they are copied into one tensor for that step.
If only some parameters of a run have a gradient, the run is cut in two from then on, and the others
are not stepped.

Only the layout of memory differs: state dicts are those of the plain optimizer (decision 13).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp2.core.errors import coded
from fsdp2.core.facts import uncompiled
from fsdp2.optim import offloaded
from fsdp2.optim.in_backward import InBackward, Sectioned
from fsdp2.optim.runs import ParamGroupOptions, Params, ParamState, Section, localized, wrapped

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers of torch that update each element independently."""


WHOLE = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Muon,
    torch.optim.SparseAdam,
)
"""Optimizers of torch that need several elements at a time, or gradients that are not dense."""


class FlatOptimizer(Sectioned):
    """An element-wise optimizer that steps the flat shards of a model's units.

    The results are those of the plain optimizer over ``model.parameters()``; a step takes about as
    much host time as a step over one tensor per unit. `param_groups` holds the parameters
    themselves, so that learning-rate schedules, `clip_grad_norm_`, ``GradScaler`` and
    ``torch.distributed.checkpoint`` work, and state dicts can be exchanged with the plain
    optimizer in both directions. Parameters that no unit manages are stepped separately.

    Args:
        params: parameters, named parameters or parameter groups, as for the class itself; or a
            module: its parameters.
        optimizer_class: an element-wise class, such as ``torch.optim.AdamW``.
        elementwise: ``True`` asserts that a class that torch does not define updates each element
            independently: it uses only the values and gradients of a parameter, not its norm or
            shape, and its state consists of numbers and of tensors of the parameter's shape.
        step_in_backward: whether a unit's parameters are stepped, and their gradients dropped, as
            soon as its reduction has delivered them, so that gradients of at most two units exist
            at a time. `step` then steps the remaining parameters, and ends the iteration. This
            excludes features that need all gradients first: `clip_grad_norm_`, gradient scalers,
            closures, and several reductions before a step. Default ``False``.
        offload: whether states are kept in CPU memory and stepped there, unit by unit: while one
            unit is stepped, parameters and gradients of the next are copied to the host. Then the
            parameters are copied back. Pass ``fused=True`` if the class has it: these kernels are
            made for the CPU. Shards in CPU memory are stepped in place. Default ``False``:
            states are on the device of the shards.
        **options: passed to ``optimizer_class``: ``lr``, ``betas``, ``fused`` …

    Raises:
        TypeError: ``params`` holds no parameters, or ``optimizer_class`` is not known to be
            element-wise. With ``elementwise=True``: torch's class is known not to be element-wise,
            or (in the first step) state has other tensors.
        ValueError: there are no parameters, or another optimizer steps one in backward.

    `state` is computed from the runs: its tensors are views, which may be written; its step counts
    and other numbers are copies.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = fsdp2.optim.FlatOptimizer(
            model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True
        )
    """

    def __init__(
        self,
        params: nn.Module | Params,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        elementwise: bool = False,
        step_in_backward: bool = False,
        offload: bool = False,
        **options: object,
    ) -> None:
        _check(params, optimizer_class)
        if optimizer_class not in ELEMENTWISE and not elementwise:
            name = getattr(optimizer_class, "__name__", optimizer_class)
            raise coded(
                TypeError,
                "not-elementwise",
                f"FlatOptimizer does not know whether {name} updates each element independently, "
                f"which stepping several parameters as one tensor requires; use the class without "
                f"FlatOptimizer, or pass elementwise=True if it does",
            )
        self._make_inner = functools.partial(optimizer_class, **options)
        if optimizer_class not in ELEMENTWISE:
            self._make_inner = _watched(optimizer_class, self._make_inner)
        self._sections = [Section(self._make_inner)]
        self._loaded = {}
        self._in_backward: InBackward | None = None
        self._offloads = False
        self._staging = None
        # The base class takes the same arguments as the class, and reads iterators only once.
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, {})
        devices = [param.device for param in self._params()]
        device = devices[0] if devices else torch.device("cpu")
        inner = self._make_inner([nn.Parameter(torch.empty(0, device=device))])
        self._class, self.defaults = type(inner), inner.defaults
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._offloads = offload and any(map(offloaded.travels, devices))
        if step_in_backward:
            self._in_backward = InBackward(self)
        elif self._offloads:
            self.split()

    def __getstate__(self) -> NoReturn:
        raise coded(
            TypeError,
            "copied-optimizer",
            f"{type(self).__name__} cannot be copied or pickled: it steps the shards of its "
            f"model's units; save its state_dict(), and load that into one made for the other "
            f"model",
        )

    def __setstate__(self, state: ParamState) -> None:
        """``load_state_dict`` ends with this call."""
        self.state = state.pop("state")
        super().__setstate__(state)

    # ---- what users see

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class of the inner optimizer."""
        return self._class

    @property
    def state(self) -> defaultdict[torch.Tensor, ParamState]:
        """State by parameter; tensors of the parameter's shape are DTensors sharded like it."""
        found: dict[torch.Tensor, ParamState] = {}
        for section in self._sections:
            found.update(section.states())
        for param, state in self._loaded.items():
            found[param] = {key: wrapped(value, param) for key, value in state.items()}
        return defaultdict(dict, {p: found[p] for p in self._params() if p in found})

    @state.setter
    def state(self, state: Mapping[torch.Tensor, ParamState]) -> None:
        self._loaded = {param: localized(kept) for param, kept in state.items()}
        for section in self._sections:
            section.drop()

    def add_param_group(self, param_group: ParamGroupOptions) -> None:
        """As ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        for section in self._sections:
            section.stale = True
        if self._in_backward is not None:
            self._in_backward.watch()
        elif self._offloads:
            self.split()

    @torch.no_grad()
    @uncompiled
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss; with gradients enabled.
        """
        loss = None
        if closure is not None:
            if self._in_backward is not None:
                raise coded(
                    ValueError,
                    "stepped-closure",
                    "FlatOptimizer(step_in_backward=True) has already stepped when a closure "
                    "returns, so step() takes no closure; call backward() and then step()",
                )
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.end()
        else:
            self.step_sections()
        return loss


def _check(params: object, optimizer_class: object) -> None:
    """Raise for wrong first arguments."""
    if not isinstance(params, nn.Module | Iterable) or isinstance(params, torch.Tensor):
        raise coded(
            TypeError,
            "flat-optimizer-params",
            f"FlatOptimizer takes parameters as its first argument, not {_shown(params)}; pass "
            f"FlatOptimizer(model.parameters(), torch.optim.AdamW, lr=…)",
        )
    if not callable(optimizer_class) or isinstance(optimizer_class, nn.Module):
        raise coded(
            TypeError,
            "flat-optimizer-class",
            f"FlatOptimizer takes an optimizer class as its second argument, not "
            f"{_shown(optimizer_class)}; pass FlatOptimizer(model.parameters(), "
            f"torch.optim.AdamW, lr=…)",
        )


def _watched(
    optimizer_class: Any, make_inner: Callable[..., torch.optim.Optimizer]
) -> Callable[..., torch.optim.Optimizer]:
    """Refuse classes that need whole parameters; let others raise for state of another kind."""
    if optimizer_class in WHOLE:
        raise coded(
            TypeError,
            "flat-whole",
            f"{optimizer_class.__name__} needs full parameters, so FlatOptimizer cannot step "
            f"several as one tensor, even with elementwise=True; pass model.parameters() to the "
            f"class, or use fsdp2.optim.Muon for Muon",
        )

    def make(params: object) -> torch.optim.Optimizer:
        inner = make_inner(params)
        inner.register_step_post_hook(_check_states)
        return inner

    return make


def _check_states(inner: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise for state that cannot be divided between parameters, such as scales of blocks."""
    for param, state in inner.state.items():
        for key, value in state.items():
            by_element = value is None or isinstance(value, bool | int | float | complex | str)
            if type(value) in (torch.Tensor, nn.Parameter):
                by_element = value.shape == param.shape or value.numel() == 1
            if not by_element:
                raise coded(
                    TypeError,
                    "flat-state",
                    f"{type(inner).__name__} keeps {_shown(value)} as state {key!r} of a tensor "
                    f"{tuple(param.shape)}, which is not one value per element, so FlatOptimizer "
                    f"cannot divide it between parameters; pass model.parameters() to the class",
                )


def _shown(given: object) -> str:
    return repr(given) if isinstance(given, str | float | type) else f"a {type(given).__name__}"

"""Muon over sharded parameters: each rank orthogonalizes only the matrices that it owns.

momentum_buffer   sharded like the parameter; lerp of it and the gradient on each rank's rows
bf16 rows         are sent to the owner: torch's Muon also casts to bf16 first
Newton-Schulz     of whole matrices, one call per shape
bf16 updates      are sent back; weight decay and the step itself are on rows
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import coded
from fsdp2.core.facts import uncompiled
from fsdp2.optim.matrices.blocks import Split, matrices_of
from fsdp2.optim.matrices.elementwise import Elementwise
from fsdp2.optim.matrices.exchange import Item, Message, Stack, Wave
from fsdp2.optim.matrices.members import Member, resolved
from fsdp2.optim.matrices.newton_schulz import COEFFICIENTS, EPS, STEPS, flops, orthogonalized
from fsdp2.optim.matrices.owners import MatrixOwners
from fsdp2.optim.matrices.plan import StepPlan
from fsdp2.optim.runs import ParamGroupOptions, Params, ParamState, keep, localized

Given = torch.Tensor | tuple[str, torch.Tensor]
"""A parameter, with its name or without."""

RowUpdate = tuple[torch.Tensor, torch.Tensor, tuple[int, int]]
"""A view of rows, their updates, and the shape of the whole matrix."""

OptimizerClass = Callable[..., torch.optim.Optimizer]

Choice = Iterable[str] | Callable[[str, torch.Tensor], bool]
"""The user's choice of parameters: patterns of names, or a function of name and parameter."""

_ADJUSTED = (None, "original", "match_rms_adamw", "spectral_unclamped")


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` over sharded parameters, with an element-wise optimizer for the others.

    Results are those of ``torch.optim.Muon`` over unsharded parameters; on a CPU, they are bitwise
    identical. One rank of its mesh, the owner, orthogonalizes each matrix. fsdp2 chooses owners
    by FLOPs, also over replicas and tensor-parallel ranks. The momentum of a unit is sent to
    the owners in one message, and updates come back in another, while another unit is computed.

    All ranks of a parameter's mesh must step together. If a rank has no gradient for a parameter
    that others have, it counts as zeros; if no rank has one, the parameter is not stepped.

    Args:
        params: parameters, named parameters or parameter groups, as for torch's; or a module.
            ``elementwise_class`` steps parameters without two dims, and those of ``elementwise``,
            in separate parameter groups after the others. A group with ``"elementwise": True``
            contains only such parameters.
        lr: learning rate of matrices. Default 1e-3.
        weight_decay: decoupled weight decay of matrices. Default 0.1.
        momentum: factor of the average of gradients. Default 0.95.
        nesterov: whether the present gradient is added once more. Default ``True``.
        ns_coefficients: a, b, c of Newton-Schulz. Default: torch's.
        eps: lower bound of norms. Default 1e-7.
        ns_steps: steps of Newton-Schulz. Default 5.
        adjust_lr_fn: how the learning rate depends on the shape of a matrix: ``"original"``,
            ``"match_rms_adamw"`` or ``"spectral_unclamped"``. Default ``None``: ``"original"``.
        elementwise: which matrices are stepped element by element: names, with ``*`` and ``?``, or
            a function of name and parameter. Pass embeddings and heads. Default: none.
        elementwise_class: an element-wise torch optimizer. Default ``torch.optim.AdamW``.
        elementwise_options: its options. Default ``None``: its defaults, also for ``lr``.
        split: a function of name and weight that cuts the weight into matrices: it returns 2-D
            views, such as ``weight.unbind()`` for experts [E, m, n] or ``weight.chunk(3)`` for a
            fused projection, or ``None`` to leave the weight uncut. The weight that it gets has
            its full shape, but no values. Default ``None``: no weight is cut.
        batched: whether one call orthogonalizes all matrices of the same shape. Default ``True``;
            on a GPU, the last bit of results may depend on it.

    Raises:
        TypeError: a parameter is complex.
        ValueError: an option is out of range, a name in ``elementwise`` matches no parameter,
            ``split`` does not cut a weight into matrices, or a group with ``"elementwise": False``
            has parameters that are not matrices.

    Example::

        optimizer = fsdp2.optim.Muon(
            model.named_parameters(),
            lr=0.02,
            elementwise=["embed.*", "head.*"],
            elementwise_options={"lr": 3e-4, "betas": (0.9, 0.95)},
        )
    """

    def __init__(
        self,
        params: nn.Module | Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        *,
        elementwise: Choice = (),
        elementwise_class: OptimizerClass = torch.optim.AdamW,
        elementwise_options: Mapping[str, object] | None = None,
        split: Split | None = None,
        batched: bool = True,
    ) -> None:
        ranges = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        for name, value in ranges.items():
            if not value >= 0.0:
                raise coded(
                    ValueError,
                    "muon-range",
                    f"Muon({name}={value}) is out of range; pass 0 or a positive number",
                )
        if adjust_lr_fn not in _ADJUSTED:
            raise coded(
                ValueError,
                "muon-adjust",
                f"Muon(adjust_lr_fn={adjust_lr_fn!r}) is not known; pass one of {_ADJUSTED}",
            )
        if not 0 <= ns_steps < 100 or len(ns_coefficients) != 3:
            raise coded(
                ValueError,
                "muon-steps",
                f"Muon takes fewer than 100 steps of Newton-Schulz and three coefficients, not "
                f"ns_steps={ns_steps} and ns_coefficients={ns_coefficients}",
            )
        defaults = {
            **ranges,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._choice = _Choice(elementwise)
        self._elementwise = Elementwise(elementwise_class, elementwise_options or {})
        self._split = split
        self._batched = batched
        self._is_elementwise: list[bool] = []  # by parameter group
        self._names: list[tuple[torch.Tensor, str]] = []
        self._plan: StepPlan | None = None
        given = list(params.named_parameters()) if isinstance(params, nn.Module) else list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self._drops_names = isinstance(params, nn.Module)
        super().__init__(cast(Params, groups), defaults)
        self._choice.check([name for _, name in self._names])

    # ---- the arithmetic

    def _dtype_of_messages(self, dtype: torch.dtype) -> torch.dtype:
        """bf16, in which Newton-Schulz computes."""
        return torch.bfloat16

    def momentum_of(
        self,
        grads: Sequence[torch.Tensor],
        states: Sequence[ParamState],
        group: ParamGroupOptions,
    ) -> list[torch.Tensor]:
        """The momentum with this step's gradient; with Nesterov, added once more."""
        momentum = number_of(group, "momentum")
        buffers = []
        for grad, state in zip(grads, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, list(grads), 1 - momentum)
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_lerp(list(grads), buffers, momentum))

    def orthogonalized(self, stack: torch.Tensor, group: ParamGroupOptions) -> torch.Tensor:
        """Orthogonalize matrices of one shape, [k, rows, columns], which may be overwritten."""
        coefficients = cast("tuple[float, float, float]", group["ns_coefficients"])
        steps, eps = cast(int, group["ns_steps"]), number_of(group, "eps")
        return orthogonalized(stack, coefficients, steps, eps)

    def step_size(self, shape: tuple[int, int], group: ParamGroupOptions) -> float:
        """The learning rate, adjusted to the shape."""
        rows, columns = shape
        rate, adjusted = number_of(group, "lr"), group["adjust_lr_fn"]
        if adjusted == "match_rms_adamw":
            return rate * (0.2 * math.sqrt(max(rows, columns)))
        if adjusted == "spectral_unclamped":
            return rate * math.sqrt(rows / columns)
        return rate * math.sqrt(max(1, rows / columns))

    def write_rows(
        self, rows: torch.Tensor, updates: Sequence[RowUpdate], group: ParamGroupOptions
    ) -> None:
        """Step the local shard of a parameter: weight decay, then updates."""
        if group.get("weight_decay"):
            rows.mul_(1 - number_of(group, "lr") * number_of(group, "weight_decay"))
        for view, update, shape in updates:
            view.add_(update.to(view.device), alpha=-self.step_size(shape, group))

    # ---- what users see

    def owners(self) -> list[MatrixOwners]:
        """The owners of matrices, for each mesh; empty before the first step."""
        return [] if self._plan is None else self._plan.owners()

    def add_param_group(self, param_group: ParamGroupOptions) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; may add two, one of them element-wise.

        Args:
            param_group: ``"params"`` and options; ``"elementwise"`` decides for all of them.
        """
        options = {k: v for k, v in param_group.items() if k not in ("params", "elementwise")}
        kind = param_group.get("elementwise")
        params = cast("torch.Tensor | Iterable[Given]", param_group["params"])
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        sides: tuple[list[Given], list[Given]] = [], []
        for given in listed:
            name, param = given if isinstance(given, tuple) else ("", given)
            side = self._is_no_matrix(name, param) if kind is None else bool(kind)
            if kind is False and self._is_no_matrix(name, param, chosen=False):
                raise coded(
                    ValueError,
                    "muon-group",
                    f"a group with \"elementwise\": False has '{name}' of shape "
                    f"{tuple(param.shape)}, which is not a matrix; leave the entry out, or cut "
                    f"the weight into matrices with split=",
                )
            self._names.append((param, name))
            sides[side].append(param if self._drops_names else given)
        for is_elementwise, members in zip((False, True), sides, strict=True):
            if members or (not listed and not is_elementwise):
                own = {} if is_elementwise and not kind else options
                self._add(members, is_elementwise, own)

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    @uncompiled
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss; with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        each = list(zip(self.param_groups, self._is_elementwise, strict=True))
        elementwise = [group for group, is_elementwise in each if is_elementwise]
        if elementwise:
            self._elementwise.step(elementwise, self.state)
        if len(elementwise) < len(each):
            self._step_matrices()
        return loss

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_plan": None}

    # ---- groups

    def _add(self, members: list[Given], is_elementwise: bool, options: ParamGroupOptions) -> None:
        defaults = self.defaults
        try:
            if is_elementwise:
                self.defaults = self._elementwise.defaults
            super().add_param_group({"params": members, **options})
        finally:
            self.defaults = defaults
        self._is_elementwise.append(is_elementwise)

    def _is_no_matrix(self, name: str, param: torch.Tensor, chosen: bool = True) -> bool:
        if chosen and self._choice(name, param):
            return True
        if param.is_complex():
            raise coded(
                TypeError,
                "muon-complex",
                f"'{name}' {tuple(param.shape)} is complex, which an optimizer of whole matrices "
                f"does not support; name it in elementwise=",
            )
        return not matrices_of(name, param.shape, self._split)

    # ---- a step of matrices

    def _step_matrices(self) -> None:
        """Update all matrices, wave by wave; all ranks start messages in the same order."""
        params = [
            (place, param)
            for place, group in enumerate(self.param_groups)
            if not self._is_elementwise[place]
            for param in group["params"]
        ]
        if self._plan is None or not self._plan.fits(params):
            names = {id(resolved(param)): name for param, name in self._names}
            self._plan = StepPlan(params, names, self._split, self._dtype_of_messages)
        plan = self._plan
        gradients = {member: member.gradient() for member in plan.members}
        waves = plan.waves(plan.present(list(gradients.values())), self._weigh, self._batched)
        unit = max((wave.all_nbytes for wave in waves), default=0)
        started = (wave.start(self._rows_to_send(wave.members, gradients)) for wave in waves)
        incoming = next(started, iter(()))
        outgoing: list[tuple[Wave, Message]] = []  # one, or none
        for wave in waves:
            if outgoing and 2 * wave.nbytes + outgoing[0][0].nbytes > 2 * unit:
                self._finish(outgoing)  # memory for two waves only
            stacks = deque(wave.stacks(incoming))
            updates = self._updates(stacks, 1 if len(stacks) > 1 else 0)
            self._finish(outgoing)
            incoming = next(started, iter(()))
            updates += self._updates(stacks, len(stacks))
            outgoing.append((wave, wave.send_back(updates)))
            del updates
        self._finish(outgoing)

    def _rows_to_send(
        self, members: Sequence[Member], gradients: Mapping[Member, torch.Tensor | None]
    ) -> dict[Member, torch.Tensor]:
        """The momentum of rows, group by group."""
        found: dict[Member, torch.Tensor] = {}
        by_group: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            by_group[member.group].append(member)
        for place, own in by_group.items():
            grads = [_or_zeros(gradients[member], member) for member in own]
            states = [localized(self.state[member.param]) for member in own]
            rows = self.momentum_of(grads, states, self.param_groups[place])
            found.update(zip(own, rows, strict=True))
            for member, state in zip(own, states, strict=True):
                keep(self.state[member.param], state, member.param)
        return found

    def _updates(self, stacks: deque[Stack], count: int) -> list[Stack]:
        """Update the matrices of the next stacks, and keep only the updates."""
        found = []
        for _ in range(count):
            stack = stacks.popleft()
            group = self.param_groups[stack.items[0].member.group]
            update = self.orthogonalized(stack.matrices, group)
            found.append(Stack(stack.items, stack.items[0].matrix.unseen(update)))
        return found

    def _finish(self, outgoing: list[tuple[Wave, Message]]) -> None:
        """Wait for the updates of this rank's rows, and step each parameter."""
        while outgoing:
            wave, message = outgoing.pop()
            of_member: defaultdict[Member, list[RowUpdate]] = defaultdict(list)
            for piece, values in message:  # this rank has none of some items
                member = piece.item.member
                view = piece.box.within(member.spread.own).of(member.rows)
                of_member[member].append((view, values, piece.item.matrix.shape))
            for member, updates in of_member.items():
                self.write_rows(member.rows, updates, self.param_groups[member.group])
            torch.autograd.graph.increment_version(
                [member.param for member in wave.members if isinstance(member.param, DTensor)]
            )

    def _weigh(self, item: Item) -> tuple[float, int]:
        itemsize = item.member.line.dtype.itemsize
        work = flops(*item.matrix.shape, self.defaults["ns_steps"])
        return work, item.matrix.box.numel * itemsize


def number_of(group: ParamGroupOptions, name: str) -> float:
    """An option that is a number, perhaps in a tensor."""
    return float(cast(float, group[name]))


class _Choice:
    """The user's choice of element-wise parameters."""

    def __init__(self, given: Choice) -> None:
        self._function = given if callable(given) else None
        self._patterns = [] if callable(given) else list(given)

    def __call__(self, name: str, param: torch.Tensor) -> bool:
        if self._function is not None:
            return bool(self._function(name, param))
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)

    def check(self, names: Sequence[str]) -> None:
        """Raise if a pattern matches no name."""
        for pattern in self._patterns:
            if not fnmatch.filter(names, pattern):
                raise coded(
                    ValueError,
                    "muon-name",
                    f"elementwise={pattern!r} matches no parameter name; pass the model or its "
                    f"named_parameters(), and names from there",
                )


def _or_zeros(grad: torch.Tensor | None, member: Member) -> torch.Tensor:
    """A gradient, or zeros if only other ranks have one."""
    if grad is not None:
        return grad
    dtype = getattr(member.param, "grad_dtype", None) or member.param.dtype
    return torch.zeros_like(member.rows, dtype=dtype)

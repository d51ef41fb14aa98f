"""Optimizers of whole matrices: their common part, and the methods of a subclass.

    step()    element-wise parameters            Elementwise
              matrices, wave by wave             _run
                before_exchange(grads, states)     rows that are sent to the owner
                update(matrix, state)              a whole matrix, on the owner
                write_rows(rows, updates)          rows

State of rows consists of DTensors that are sharded like the parameter. State of matrices exists
only on their owners, as plain tensors under ``matrix0.…`` of the parameter's state.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import cast, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import coded
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.modules.dynamo import uncompiled
from fsdp2.optim.matrices.blocks import Split, matrices_of
from fsdp2.optim.matrices.elementwise import Elementwise
from fsdp2.optim.matrices.exchange import Item, Message, Stack, Wave
from fsdp2.optim.matrices.members import MatrixMembers, Member, resolved
from fsdp2.optim.matrices.owners import MatrixOwners
from fsdp2.optim.matrices.plan import StepPlan, specs_of
from fsdp2.optim.runs import ParamGroupOptions, ParamState, wrapped

Params = Iterable[torch.Tensor] | Iterable[ParamGroupOptions] | Iterable[tuple[str, torch.Tensor]]
"""Parameters or groups, as torch's optimizers take them."""

Given = torch.Tensor | tuple[str, torch.Tensor]
"""A parameter, with its name or without."""

MatrixState = MutableMapping[str, object]
"""State that an optimizer keeps for one matrix, on its owner."""

RowUpdate = tuple[torch.Tensor, torch.Tensor, tuple[int, int]]
"""A view of rows, their updates, and the shape of the whole matrix."""

OptimizerClass = Callable[..., torch.optim.Optimizer]

Choice = Iterable[str] | Callable[[str, torch.Tensor], bool]
"""The user's choice of parameters: patterns of names, or a function of name and parameter."""


class MatrixOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that need whole matrices.

    A subclass implements `update`, and others of its methods if it needs them: `before_exchange`
    for state that is sharded like the parameters, `step_size`, `flops`, `travels_as`,
    `update_stack`. All ranks of a parameter's mesh must step together. If a rank has no gradient
    for a parameter that others have, it counts as zeros; if no rank has one, the parameter is not
    stepped.

    Args:
        params: the model, or the parameters, as for `Muon`.
        defaults: options of groups of matrices, among them ``"lr"``, and ``"weight_decay"`` if
            weights decay.
        elementwise: which matrices are stepped element by element, as for `Muon`.
        elementwise_class: the class for parameters that are not matrices, as for `Muon`.
        elementwise_options: the options of that class, as for `Muon`.
        split: a function that cuts weights into matrices, as for `Muon`.
        batched: whether `update_stack` gets all matrices of one shape together, or each by itself.

    Example::

        class SignOfMatrix(fsdp2.optim.MatrixOptimizer):
            def update(self, gradient, state, group):
                return torch.linalg.matrix_norm(gradient, 2) * gradient.sign()

        optimizer = SignOfMatrix(model, {"lr": 1e-3})
    """

    def __init__(
        self,
        params: nn.Module | Params,
        defaults: Mapping[str, object],
        *,
        elementwise: Choice = (),
        elementwise_class: OptimizerClass = torch.optim.AdamW,
        elementwise_options: Mapping[str, object] | None = None,
        split: Split | None = None,
        batched: bool = True,
    ) -> None:
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
        super().__init__(cast(Params, groups), dict(defaults))
        self._choice.check([name for _, name in self._names])

    # ---- methods of a subclass

    def update(
        self, gradient: torch.Tensor, state: MatrixState, group: ParamGroupOptions
    ) -> torch.Tensor:
        """The update of a matrix, on its owner; times the step size, it is subtracted.

        Args:
            gradient: [rows, columns], or the result of `before_exchange`; may be overwritten.
            state: the state of this matrix, which is empty in the first step.
            group: options.
        """
        raise coded(
            NotImplementedError,
            "matrix-update",
            f"{type(self).__name__} has no update(gradient, state, group); implement it; its "
            f"result, times the learning rate, is subtracted from a matrix",
        )

    def update_stack(
        self,
        gradients: torch.Tensor,
        states: Sequence[MatrixState],
        group: ParamGroupOptions,
    ) -> torch.Tensor:
        """The updates of matrices of one shape, [k, rows, columns]. Default: `update` of each."""
        each = zip(gradients, states, strict=True)
        return torch.stack([self.update(gradient, state, group) for gradient, state in each])

    def before_exchange(
        self,
        grads: Sequence[torch.Tensor],
        states: Sequence[ParamState],
        group: ParamGroupOptions,
    ) -> list[torch.Tensor]:
        """The rows that this rank sends to owners. Default: the gradients.

        Args:
            grads: this rank's rows of gradients; must not be overwritten.
            states: the state of each: tensors of the shape of its rows, from earlier steps.
            group: options.
        """
        return list(grads)

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which matrices and updates are sent, for gradients of ``dtype``."""
        return dtype

    def flops(self, rows: int, columns: int) -> float:
        """Work of one update, by which owners are chosen. Default: a product with a square."""
        return 2.0 * rows * columns * min(rows, columns)

    def step_size(self, shape: tuple[int, int], group: ParamGroupOptions) -> float:
        """The factor of updates of matrices of ``shape``. Default: the learning rate."""
        return number_of(group, "lr")

    def write_rows(
        self,
        rows: torch.Tensor,
        updates: Sequence[RowUpdate],
        group: ParamGroupOptions,
    ) -> None:
        """Step this rank's rows of a parameter. Default: weight decay, then updates.

        Args:
            rows: this rank's rows.
            updates: for each matrix, a view of its elements in ``rows``, their updates, its shape.
            group: options.
        """
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

    def __setstate__(self, state: dict[str, object]) -> None:
        """``load_state_dict`` ends with this call, and a copy begins with it."""
        super().__setstate__(state)
        if self._plan is not None:
            self._plan.is_loaded = True

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
        plan = self._plan
        if plan is None or not plan.fits(self.param_groups):
            plan = self._plan = self._bind()
        gradients = [member.gradient() for member in plan.members.listed]
        waves = plan.waves(plan.members.present(gradients), self._weigh, self._batched)
        if plan.is_loaded:
            plan.is_loaded = False
            for item in plan.items():
                if item.member.param in self.state:  # in the same order on all ranks
                    _StateOfMatrix(self.state, item).settle()
        _run(waves, _Step(self, dict(zip(plan.members.listed, gradients, strict=True))))

    def _bind(self) -> StepPlan:
        names = {id(resolved(param)): name for param, name in self._names}
        members = MatrixMembers(self._split, self.travels_as)
        for place, group in enumerate(self.param_groups):
            if not self._is_elementwise[place]:
                for param in group["params"]:
                    members.add(param, names.get(id(param), ""), place)
        return StepPlan(members, specs_of(self.param_groups))

    def _weigh(self, item: Item) -> tuple[float, int]:
        itemsize = item.member.line.dtype.itemsize
        return self.flops(*item.matrix.shape), item.matrix.box.numel * itemsize


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


class _StateOfMatrix(MatrixState):
    """State of one matrix, under its own names in the state of its parameter."""

    def __init__(self, state: MutableMapping[torch.Tensor, ParamState], item: Item) -> None:
        self._state = state[item.member.param]
        self._is_owned = item.owner == item.member.line.position
        self._prefix = f"matrix{item.number}."

    def __getitem__(self, key: str) -> object:
        return self._state[self._prefix + key]

    def __setitem__(self, key: str, value: object) -> None:
        self._state[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._state[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return iter([key[start:] for key in self._state if key.startswith(self._prefix)])

    def settle(self) -> None:
        """Make loaded state plain on the owner, and drop it on other ranks.

        All ranks may have loaded all of it, and state of the parameter's shape as a DTensor.
        """
        for key in sorted(self):
            value = self[key]
            if isinstance(value, DTensor):
                self[key] = value.full_tensor()
        if not self._is_owned:
            self.clear()

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Step:
    """One step of an optimizer, for `_run`."""

    def __init__(
        self, optimizer: MatrixOptimizer, gradients: Mapping[Member, torch.Tensor | None]
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients

    def rows_to_send(self, members: Sequence[Member]) -> dict[Member, torch.Tensor]:
        """The results of `MatrixOptimizer.before_exchange` for rows, group by group."""
        optimizer = self._optimizer
        found: dict[Member, torch.Tensor] = {}
        by_group: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            by_group[member.group].append(member)
        for place, own in by_group.items():
            grads = [self._gradient(member) for member in own]
            states = [_row_state(optimizer.state[member.param]) for member in own]
            rows = optimizer.before_exchange(grads, states, optimizer.param_groups[place])
            found.update(zip(own, rows, strict=True))
            for member, state in zip(own, states, strict=True):
                kept = optimizer.state[member.param]
                for key, value in state.items():
                    if key not in kept or local_of(kept[key]) is not value:
                        kept[key] = wrapped(value, member.param)
        return found

    def update(self, stack: Stack) -> torch.Tensor:
        """The result of `MatrixOptimizer.update_stack` for matrices."""
        optimizer = self._optimizer
        states = [_StateOfMatrix(optimizer.state, item) for item in stack.items]
        group = optimizer.param_groups[stack.items[0].member.group]
        return optimizer.update_stack(stack.matrices, states, group)

    def write(self, members: Sequence[Member], updates: dict[Item, torch.Tensor]) -> None:
        """Let `MatrixOptimizer.write_rows` step each parameter."""
        optimizer = self._optimizer
        of_member: defaultdict[Member, list[RowUpdate]] = defaultdict(list)
        for item, values in updates.items():
            own = item.member.spread.own
            held = item.held_by(item.member.spread.position).within(own)
            view = held.of(item.member.rows)
            of_member[item.member].append((view, values, item.matrix.shape))
        for member in members:
            if member in of_member:
                group = optimizer.param_groups[member.group]
                optimizer.write_rows(member.rows, of_member[member], group)
        torch.autograd.graph.increment_version(
            [member.param for member in members if isinstance(member.param, DTensor)]
        )

    def _gradient(self, member: Member) -> torch.Tensor:
        grad = self._gradients[member]
        if grad is not None:
            return grad
        dtype = getattr(member.param, "grad_dtype", None) or member.param.dtype
        return torch.zeros_like(member.rows, dtype=dtype)


def _row_state(state: ParamState) -> ParamState:
    """The state that `before_exchange` has stored, as rows."""
    return {k: local_of(v) for k, v in state.items() if not k.startswith("matrix")}


# ---- wave by wave

_Outgoing = tuple[Wave, Message]


def _run(waves: Sequence[Wave], step: _Step) -> None:
    """Update all matrices; all ranks start messages in the same order."""
    unit = max((wave.all_nbytes for wave in waves), default=0)
    incoming = waves[0].start(step.rows_to_send(waves[0].members)) if waves else None
    outgoing: _Outgoing | None = None
    for index, wave in enumerate(waves):
        if outgoing is not None and 2 * wave.nbytes + outgoing[0].nbytes > 2 * unit:
            outgoing = _finished(outgoing, step)  # memory for two waves only
        assert incoming is not None
        stacks = deque(wave.stacks(incoming))
        first = 1 if len(stacks) > 1 else 0
        updates = _updates(stacks, first, step)
        outgoing = _finished(outgoing, step)
        incoming = None
        if index + 1 < len(waves):
            following = waves[index + 1]
            incoming = following.start(step.rows_to_send(following.members))
        updates += _updates(stacks, len(stacks), step)
        outgoing = wave, wave.send_back(updates)
        del updates
    _finished(outgoing, step)


def _finished(outgoing: _Outgoing | None, step: _Step) -> _Outgoing | None:
    """Finish the message; ``None`` is typed like the caller's variable."""
    if outgoing is not None:
        wave, message = outgoing
        step.write(wave.members, wave.received(message))
    return None


def _updates(stacks: deque[Stack], count: int, step: _Step) -> list[Stack]:
    """Update the next stacks, and keep only the updates."""
    found = []
    for _ in range(count):
        stack = stacks.popleft()
        update = step.update(stack)
        found.append(Stack(stack.items, stack.items[0].matrix.unseen(update)))
    return found

"""Runs a model's forward and backward on a `VirtualDevice`: the calls that hooks would make.

    Node("root", [Node("a"), Node("b")], calls=[0, 1, 1])      calls a, then b twice
    Simulation(root).iteration()                               forward, backward, optimizer step

In backward a node's gradients appear when its last call's backward has run, as autograd's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.group import GroupOptions, OptimizerSteps, ParamGroup, State
from fsdp2.core.scheduler import Scheduler, Unit
from fsdp2.core.virtual import (
    VirtualCollectives,
    VirtualDevice,
    VirtualParam,
    VirtualTensor,
    _Counted,
)

Check = Callable[["Simulation", str], None]


@dataclass(eq=False)
class Node:
    """A module with a unit of its own.

    Attributes:
        name: its name.
        children: modules below it.
        calls: positions in ``children``, in the order its forward calls them.
        shapes: shapes of its own parameters; none gives a unit without groups.
        reshard_after_forward: as for `fully_shard`.
        grad_to_input: whether its inputs require grad, so that it sees its backward's end.
        used: whether its output gets a gradient.
    """

    name: str
    children: list[Node] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    shapes: Sequence[tuple[int, ...]] = ((8, 8), (8,))
    reshard_after_forward: bool | None = None
    grad_to_input: bool = True
    used: bool = True
    unit: Unit | None = None
    pending_calls: int = 0

    def walk(self) -> list[Node]:
        """This node and all below it, parents first."""
        return [self, *(node for child in self.children for node in child.walk())]


class Simulation:
    """One root, its scheduler and its device.

    Args:
        root: the model.
        device: where it runs.
        world_size: ranks of the shard axis.
        coalesces: whether the backend coalesces.
        precision: mixed precision, which adds casts.
        check: called after every step with this object and what was done.
    """

    def __init__(
        self,
        root: Node,
        device: VirtualDevice,
        world_size: int = 2,
        coalesces: bool = True,
        precision: MixedPrecisionPolicy | None = None,
        check: Check | None = None,
    ) -> None:
        self.root = root
        self.device = device
        self.active: list[Unit] = []
        self._check = check
        self._precision = precision or MixedPrecisionPolicy()
        self._grad_dtype = self._precision.param_dtype or torch.float32
        for node in root.walk():
            self._make_unit(node, world_size, coalesces)
        units = [node.unit for node in root.walk() if node.unit is not None]
        units[0].is_root = True
        self.scheduler = Scheduler(units, device)

    def _make_unit(self, node: Node, world_size: int, coalesces: bool) -> None:
        groups: list[ParamGroup] = []
        if node.shapes:
            params = [
                VirtualParam(self.device, f"{node.name}.{i}", shape, torch.float32)
                for i, shape in enumerate(node.shapes)
            ]
            group = ParamGroup(
                node.name,
                params,  # type: ignore[arg-type]  # simulated parameters, same interface
                VirtualCollectives(self.device, world_size, coalesces),
                self.device,
                self.device,
                GroupOptions(self._precision),
                None,
            )
            group.adopt()
            groups.append(group)
        node.unit = Unit(node.name, groups)
        node.unit.reshard_after_forward = node.reshard_after_forward

    # ---- an iteration

    def iteration(self, backward: bool = True, step: bool = True) -> None:
        """Forward; backward and an optimizer step if asked for."""
        self.forward(expects_backward=backward)
        self._done("loss")
        if backward:
            self.backward()
            self._done("end of backward")
        if step:
            self.optimizer_step()

    def forward(self, expects_backward: bool = True) -> None:
        """One forward of the root."""
        assert self.root.unit is not None
        self.scheduler.begin_forward(self.root.unit, expects_backward)
        self._forward(self.root)

    def backward(self) -> None:
        """One backward of the root; units that see no end are finished at the end."""
        for node in self.root.walk():
            node.pending_calls = 0
        self._count_calls(self.root)
        self._backward(self.root)
        self.scheduler.end_backward()
        self.active.clear()

    def optimizer_step(self) -> None:
        """Read gradients, write shards, drop gradients."""
        for node in self.root.walk():
            for param in self._params(node):
                if param.gradient is not None and param.rows is not None:
                    self.device.run("step", [param.gradient, param.rows], [param.rows])
                param.gradient = None
        OptimizerSteps.count += 1

    def _params(self, node: Node) -> list[VirtualParam]:
        assert node.unit is not None
        return [cast(VirtualParam, param) for group in node.unit.groups for param in group.params]

    def _forward(self, node: Node) -> None:
        unit = node.unit
        assert unit is not None
        self.active.append(unit)
        self.scheduler.enter_forward(unit)
        self._compute(node, f"forward {node.name}")
        for position in node.calls:
            self._forward(node.children[position])
            self._compute(node, f"forward {node.name}")
        self.scheduler.exit_forward(unit)
        self.active.pop()
        self._done(f"exit forward {node.name}")

    def _compute(self, node: Node, name: str) -> None:
        """Kernels that read the gathered parameters, and a new activation."""
        activation = VirtualTensor(_Counted(self.device, "activation"), (1,), torch.float32)
        gathered = [p.gathered for p in self._params(node) if p.gathered is not None]
        self.device.run(name, gathered, [activation])
        self._done(name)

    def _count_calls(self, node: Node) -> None:
        if node.used:
            node.pending_calls += 1
            for position in node.calls:
                self._count_calls(node.children[position])

    def _backward(self, node: Node) -> None:
        if not node.used:
            return
        unit = node.unit
        assert unit is not None
        if unit not in self.active:
            self.active.append(unit)
        self.scheduler.enter_backward(unit)
        self._compute(node, f"backward {node.name}")
        for position in reversed(node.calls):
            self._backward(node.children[position])
            self._compute(node, f"backward {node.name}")
        node.pending_calls -= 1
        if node.pending_calls == 0:
            self._leave_gradients(node)
        if node.grad_to_input:
            self.scheduler.exit_backward(unit)
            self.active.remove(unit)
            self._done(f"exit backward {node.name}")

    def _leave_gradients(self, node: Node) -> None:
        for param in self._params(node):
            if param.full_grad is None:
                name = f"gradient {param.name}"
                owner = _Counted(self.device, name)
                param.full_grad = VirtualTensor(owner, param.shape, self._grad_dtype)
                self.device.run("gradient", [], [param.full_grad])
            else:
                self.device.run("gradient", [param.full_grad], [param.full_grad])

    def _done(self, what: str) -> None:
        if self._check is not None:
            self._check(self, what)

    # ---- what is gathered

    def gathered_ahead(self) -> list[Unit]:
        """Units that are gathered though they are neither under way nor kept on request."""
        return [
            unit
            for unit in self.scheduler.units
            if unit not in self.active
            and any(group.state is not State.SHARDED for group in unit.groups)
            and not self._is_kept(unit)
        ]

    @staticmethod
    def _is_kept(unit: Unit) -> bool:
        return not unit.frees_after_forward or not unit.reshard_after_backward

"""Runs a model's forward and backward on a `VirtualDevice`: the calls that hooks would make.

    root = Node("root", [Node("a"), Node("b")], calls=[0, 1, 1])      calls a, then b twice
    Simulation(root, VirtualDevice()).iteration()                     forward, backward, step

Each forward leaves a `Call`, a tree of the calls that it made, and a backward goes through it in
reverse. A node's gradients appear when its last call's backward has run, as autograd's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, MixedPrecisionPolicy
from fsdp2.core.group import ParamGroup
from fsdp2.core.layout import ROWS, Cut
from fsdp2.core.post_forward import SmallerGroup
from fsdp2.core.progress import OptimizerSteps
from fsdp2.core.scheduler import Scheduler
from fsdp2.core.stand_ins import VirtualParam
from fsdp2.core.streams import Lane
from fsdp2.core.unit import Phase, Unit
from fsdp2.core.virtual import (
    USER,
    VirtualCollectives,
    VirtualDevice,
    VirtualReplicas,
    VirtualTensor,
    _Counted,
)

Check = Callable[["Simulation", str], None]
Shapes = Sequence[tuple[int, ...]]


@dataclass(eq=False)
class Node:
    """A module with a unit of its own.

    Attributes:
        name: its name.
        children: modules below it.
        calls: positions in ``children``, in the order its forward calls them.
        shapes: shapes of its own parameters; none gives a unit without groups.
        more: shapes of parameters on meshes of their own, of half as many ranks: a group each.
        cut: how a parameter of a shape is sharded over so many ranks.
        reshard_after_forward: as for `fully_shard`.
        grad_to_input: whether its inputs require grad, so that it sees its backward's end.
        used: whether its output gets a gradient.
        frozen: how many of its parameters, the first ones, do not require grad.
        absent: how many of its parameters, the last ones, get no gradient in backward.
    """

    name: str
    children: list[Node] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    shapes: Shapes = ((8, 8), (8,))
    more: Sequence[Shapes] = ()
    cut: Callable[[tuple[int, ...], int], Cut] = lambda shape, ranks: ROWS
    reshard_after_forward: bool | None = None
    grad_to_input: bool = True
    used: bool = True
    frozen: int = 0
    absent: int = 0
    unit: Unit | None = None

    def walk(self) -> list[Node]:
        """This node and all below it, parents first."""
        return [self, *(node for child in self.children for node in child.walk())]


@dataclass(eq=False)
class Call:
    """One forward of a node, and those inside it, in order."""

    node: Node
    inner: list[Call] = field(default_factory=list)

    def used_nodes(self) -> list[Node]:
        """The node of every call that backward reaches, once a call."""
        if not self.node.used:
            return []
        return [self.node, *(node for call in self.inner for node in call.used_nodes())]


class Simulation:
    """One root, its scheduler and its device.

    Args:
        root: the model.
        device: where it runs.
        world_size: ranks of the shard axis.
        coalesces: whether the backend coalesces.
        precision: mixed precision, which adds casts.
        copies: ranks of the replicate axis.
        offload: whether shards and gradients live in CPU memory, and of which kind.
        smaller: to how many ranks' shards forward frees, where that divides a group's ranks.
        options: what else a user may change about groups.
        check: called after every step with this object and what was done.

    Attributes:
        active: units whose forward or backward is under way.
        calls: forwards whose backward is still to come, the oldest first.
    """

    def __init__(
        self,
        root: Node,
        device: VirtualDevice,
        world_size: int = 2,
        coalesces: bool = True,
        precision: MixedPrecisionPolicy | None = None,
        copies: int = 1,
        offload: CPUOffloadPolicy | None = None,
        smaller: int | None = None,
        options: GroupOptions | None = None,
        check: Check | None = None,
    ) -> None:
        self.root = root
        self.device = device
        self.active: list[Unit] = []
        self.calls: list[Call] = []
        self._check = check
        self._precision = precision or MixedPrecisionPolicy()
        self._grad_dtype = self._precision.param_dtype or torch.float32
        self._options = replace(options or GroupOptions(), precision=self._precision)
        self._replicas = VirtualReplicas(device, copies) if copies > 1 else None
        self._offload = offload
        self._smaller = smaller
        for node in root.walk():
            self._make_unit(node, world_size, coalesces)
        units = [node.unit for node in root.walk() if node.unit is not None]
        units[0].is_root = True
        self.scheduler = Scheduler(units, device)

    def _make_unit(self, node: Node, world_size: int, coalesces: bool) -> None:
        groups: list[ParamGroup] = []
        if node.shapes:
            groups.append(self._make_group(node, node.name, node.shapes, world_size, coalesces))
        for number, shapes in enumerate(node.more, 1):
            name, ranks = f"{node.name}/{number}", max(world_size // 2, 1)
            groups.append(self._make_group(node, name, shapes, ranks, coalesces))
        node.unit = Unit(node.name, groups)
        node.unit.reshard_after_forward = node.reshard_after_forward

    def _make_group(
        self, node: Node, name: str, shapes: Shapes, world_size: int, coalesces: bool
    ) -> ParamGroup:
        params = [
            VirtualParam(
                self.device,
                f"{name}.{i}",
                shape,
                torch.float32,
                node.cut(shape, world_size),
            )
            for i, shape in enumerate(shapes)
        ]
        group = ParamGroup(
            name,
            params,  # type: ignore[arg-type]  # simulated parameters, same interface
            VirtualCollectives(self.device, world_size, coalesces),
            self.device,
            self.device,
            self._options,
            None,
            self._replicas,
            self._offload,
        )
        group.adopt()
        smaller = self._smaller
        if smaller is not None and 1 < smaller < world_size and world_size % smaller == 0:
            neighbours = VirtualCollectives(self.device, smaller, coalesces)
            group.set_smaller_group(SmallerGroup(neighbours, None))  # type: ignore[arg-type]  # no mesh
        return group

    # ---- an iteration

    def iteration(self, backward: bool = True, step: bool = True) -> None:
        """Forward; backward and an optimizer step if asked for."""
        self.forward(expects_backward=backward)
        if backward:
            self.backward()
        if step:
            self.optimizer_step()

    def forward(self, expects_backward: bool = True, start: Node | None = None) -> None:
        """One forward of the root, or of another node that is called on its own."""
        node = start or self.root
        assert node.unit is not None
        self._freeze()
        self.scheduler.begin_forward(node.unit, expects_backward)
        call = self._forward(node)
        if expects_backward:
            self.calls.append(call)
        self._done("loss")

    def backward(self, forwards: int = 1) -> None:
        """One backward through the last ``forwards`` forwards, as of the sum of their losses.

        Units that see no end are finished at the end.
        """
        calls = [self.calls.pop() for _ in range(forwards)]
        pending = Counter(node for call in calls for node in call.used_nodes())
        self.scheduler.in_backward = True
        for call in calls:
            self._backward(call, pending)
        self.scheduler.end_backward()
        self.active.clear()
        self._done("end of backward")

    def finalize(self, wait: bool) -> None:
        """What a caller does who ends backwards himself; without ``wait`` he does it later."""
        self.scheduler.finalize(wait)
        self.active.clear()
        self._done("finalize")
        if not wait:
            self.scheduler.wait_for_reductions()

    def load_state_dict(self) -> None:
        """Write shards, with whatever runs where they are."""
        for node in self.root.walk():
            for param in self._params(node):
                assert param.rows is not None
                self.device.run("load_state_dict", [], [param.rows])
        OptimizerSteps.count += 1

    def optimizer_step(self) -> None:
        """Read gradients, write shards, drop gradients."""
        for node in self.root.walk():
            for param in self._params(node):
                self._step(param)
        OptimizerSteps.count += 1

    def step_elsewhere(self) -> None:
        """As `optimizer_step`, on a stream of the user's, for whose event the next gathers wait.

        Gradients stay, since that stream may still read them; see `drop_gradients`.
        """
        self.device.follow(USER, self.device.record(Lane.COMPUTE, "backward done"))
        with self.device.on(USER):
            for node in self.root.walk():
                for param in self._params(node):
                    self._update(param)
        self.scheduler.post_optim_event = self.device.record(USER, "optimizer done")
        OptimizerSteps.count += 1

    def drop_gradients(self) -> None:
        """As ``zero_grad()``."""
        for node in self.root.walk():
            for param in self._params(node):
                param.gradient = None

    def step_in_backward(self, wanted: bool = True) -> None:
        """From now on a hook on each parameter does the step as soon as ``.grad`` is there."""
        for node in self.root.walk():
            for param in self._params(node):
                param.hook = self._step if wanted else None

    def _step(self, param: VirtualParam) -> None:
        self._update(param)
        param.gradient = None

    def _update(self, param: VirtualParam) -> None:
        if param.gradient is not None and param.rows is not None:
            self.device.run("step", [param.gradient, param.rows], [param.rows])

    @staticmethod
    def _params(node: Node) -> list[VirtualParam]:
        assert node.unit is not None
        groups = node.unit.groups
        return [cast(VirtualParam, param) for group in groups for param in group.params]

    def _freeze(self) -> None:
        for node in self.root.walk():
            for position, param in enumerate(self._params(node)):
                param.sharded.requires_grad = position >= node.frozen

    def _forward(self, node: Node) -> Call:
        unit = node.unit
        assert unit is not None
        call = Call(node)
        self.active.append(unit)
        self.scheduler.enter_forward(unit)
        self._compute(node, f"forward {node.name}")
        for position in node.calls:
            call.inner.append(self._forward(node.children[position]))
            self._compute(node, f"forward {node.name}")
        self.scheduler.exit_forward(unit)
        self.active.pop()
        self._done(f"exit forward {node.name}")
        return call

    def _compute(self, node: Node, name: str) -> None:
        """Kernels that read the gathered parameters, and a new activation."""
        activation = VirtualTensor(_Counted(self.device, "activation"), (1,), torch.float32)
        assert node.unit is not None
        reads = name.startswith("forward") or node.unit.unshard_in_backward
        gathered = [p.gathered for p in self._params(node) if reads and p.gathered is not None]
        self.device.run(name, gathered, [activation])
        self._done(name)

    def _backward(self, call: Call, pending: Counter[Node]) -> None:
        node = call.node
        if not node.used:
            return
        unit = node.unit
        assert unit is not None
        if unit not in self.active:
            self.active.append(unit)
        self.scheduler.enter_backward(unit)
        self._compute(node, f"backward {node.name}")
        for inner in reversed(call.inner):
            self._backward(inner, pending)
            self._compute(node, f"backward {node.name}")
        pending[node] -= 1
        if pending[node] == 0:
            self._leave_gradients(node)
        if node.grad_to_input:
            self.scheduler.exit_backward(unit)
            self.active.remove(unit)
            self._done(f"exit backward {node.name}")

    def _leave_gradients(self, node: Node) -> None:
        params = self._params(node)
        for param in params[: len(params) - node.absent]:
            if not param.sharded.requires_grad:
                continue
            if param.full_grad is None:
                owner = _Counted(self.device, f"gradient {param.name}")
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
            and unit.phase
            is not Phase.BACKWARD  # backward skips it, and takes it along all the same
            and unit.is_gathered
            and not self._is_kept(unit)
        ]

    @staticmethod
    def _is_kept(unit: Unit) -> bool:
        return not unit.frees_after_forward or not unit.reshard_after_backward

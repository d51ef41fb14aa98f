"""Runs a model's forward and backward on a `VirtualDevice`: the calls that hooks would make.

    root = Node("root", [Node("a"), Node("b")], calls=[0, 1, 1])      calls a, then b twice
    Simulation(root, VirtualDevice()).iteration()                     forward, backward, step

Each forward leaves a `Call`, a tree of the calls that it made, and a backward goes through it in
reverse. A node's gradients appear when its last call's backward has run, as autograd's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, MixedPrecisionPolicy
from fsdp2.core.device.streams import Event, Lane
from fsdp2.core.gather.keeping import SmallerGroup
from fsdp2.core.layout.layout import ROWS, Cut
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import MOVES, Phase, Unit, lend, watched_phase
from fsdp2.testing.parameters import PaperGradients, VirtualParam
from fsdp2.testing.virtual import VirtualCollectives, VirtualDevice
from fsdp2.tracing.record.notes import USER

Check = Callable[["Simulation", str], None]
Shapes = Sequence[tuple[int, ...]]


def check_move(unit: Unit, before: Phase, after: Phase) -> None:
    """Refuse a move that `MOVES` does not have; for `fsdp2.core.schedule.unit.watching`."""
    assert after in MOVES[before], (
        f"unit '{unit.title}' cannot go from {before.value} to {after.value}"
    )


class CheckedUnit(Unit):
    """A unit that refuses such moves."""

    __slots__ = ()

    phase = watched_phase(check_move)


@dataclass(eq=False)
class Node:
    """A module with a unit of its own.

    Attributes:
        name: its name.
        children: modules below it.
        calls: positions in ``children``, in the order its forward calls them.
        shapes: shapes of its own parameters; none gives a unit without groups.
        more: shapes of parameters on meshes of their own, of half as many ranks: a group each.
        whole: shapes of parameters that stay whole on all ranks: one group.
        cut: how a parameter of a shape is sharded over so many ranks.
        reshard_after_forward: as for `fully_shard`.
        grad_to_input: whether its inputs require grad, so that it sees its backward's end.
        used: whether its output gets a gradient.
        frozen: how many of its parameters, the first ones, do not require grad.
        absent: how many of its parameters, the last ones, get no gradient in backward.
        tied: other nodes that use the first parameter of ``shapes``, too.
    """

    name: str
    children: list[Node] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    shapes: Shapes = ((8, 8), (8,))
    more: Sequence[Shapes] = ()
    whole: Shapes = ()
    cut: Callable[[tuple[int, ...], int], Cut] = lambda shape, ranks: ROWS
    reshard_after_forward: bool | None = None
    grad_to_input: bool = True
    used: bool = True
    frozen: int = 0
    absent: int = 0
    tied: list[Node] = field(default_factory=list)
    unit: Unit = field(init=False, repr=False)  # a simulation makes it

    def walk(self) -> list[Node]:
        """This node and all below it, parents first."""
        return [self, *(node for child in self.children for node in child.walk())]


@dataclass(eq=False)
class Call:
    """One forward of a node, and those inside it, in order."""

    node: Node
    inner: list[Call] = field(default_factory=list)

    def used_nodes(self) -> list[Node]:
        """The node of every call that backward reaches, one per call."""
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
        levels: whether these hold pieces of the shards, not copies, where there are several.
        offload: whether shards and gradients live in CPU memory, and of which kind.
        smaller: to how many ranks' shards forward frees, where that divides a group's ranks.
        options: what else a user may change about groups. Default: nothing, and no parameter is
            packed for being small.
        window: how many units are gathered ahead.
        check: called after every step with this object and what was done.

    Attributes:
        active: units whose forward or backward is running.
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
        window: int = 1,
        check: Check | None = None,
        levels: bool = False,
    ) -> None:
        self.root = root
        self.device = device
        self.active: list[Unit] = []
        self.calls: list[Call] = []
        self._check = check
        self._precision = precision or MixedPrecisionPolicy()
        self._grad_dtype = self._precision.param_dtype or torch.float32
        self._options = replace(options or GroupOptions(pack_below=0), precision=self._precision)
        self._replicas = self._collectives(copies) if copies > 1 and not levels else None
        self._nodes = copies if levels else 1
        self._every = self._collectives(world_size * copies)
        self._offload = offload
        self._smaller = smaller
        for node in root.walk():
            self._make_unit(node, world_size, coalesces)
        self._owners: dict[Node, list[Node]] = {}  # of what else a node uses
        for node in root.walk():
            for user in node.tied:
                self._owners.setdefault(user, []).append(node)
                lend(node.unit.own_groups[0], node.unit, user.unit)
        units = [node.unit for node in root.walk()]
        units[0].is_root = True
        for unit in units:
            unit.prefetch_window = window
        self.scheduler = Scheduler(units, device)  # type: ignore[arg-type]  # simulated

    def _make_unit(self, node: Node, world_size: int, coalesces: bool) -> None:
        groups = []
        if node.shapes:
            groups.append(self._make_group(node, node.name, node.shapes, world_size, coalesces))
        for number, shapes in enumerate(node.more, 1):
            name, ranks = f"{node.name}/{number}", max(world_size // 2, 1)
            groups.append(self._make_group(node, name, shapes, ranks, coalesces))
        if node.whole:
            group = self._make_group(node, f"{node.name}/whole", node.whole, 1, coalesces)
            group.set_replicas(self._every)
            group.is_whole = True
            groups.append(group)
        node.unit = CheckedUnit(node.name, groups, self._options)
        node.unit.reshard_after_forward = node.reshard_after_forward

    def _make_group(
        self, node: Node, name: str, shapes: Shapes, world_size: int, coalesces: bool
    ) -> ParamGroup:
        device: Any = self.device
        params: Any = [
            VirtualParam(device, f"{name}.{i}", shape, torch.float32, node.cut(shape, world_size))
            for i, shape in enumerate(shapes)
        ]
        crosses = self._nodes > 1 and world_size > 1
        group = ParamGroup(
            name,
            params,
            self._options,
            self._collectives(world_size, coalesces),
            *(device, device, device),
            replicas=self._replicas,
            between=self._collectives(self._nodes, coalesces) if crosses else None,
            offload=self._offload,
            gradients_of=PaperGradients,  # type: ignore[arg-type]  # simulated
        )
        smaller = self._smaller
        if smaller is not None and 1 < smaller < world_size and world_size % smaller == 0:
            mesh: Any = None
            group.set_smaller_group(SmallerGroup(self._collectives(smaller, coalesces), mesh))
        return group

    def _collectives(self, size: int, coalesces: bool = False) -> Any:
        return VirtualCollectives(self.device, size, coalesces)

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
        self.scheduler.begin_backward(object, records=False)
        for call in calls:
            self._backward(call, pending)
        self.scheduler.end_backward()
        self.active.clear()
        self._done("end of backward")

    def finalize(self, wait: bool) -> None:
        """Ends the backward, as a caller can do itself; without ``wait`` it waits later."""
        self.scheduler.finalize(wait)
        self.active.clear()
        self._done("finalize")
        if not wait:
            self.scheduler.wait_for_reductions()

    def write(self, kind: str) -> None:
        """Write shards with whatever runs where they are, such as "load_state_dict"."""
        for param in self._every_param():
            assert param.rows is not None
            self.device.run(kind, [], [param.rows])
        Counts.steps += 1

    def optimizer_step(self) -> None:
        """Read gradients, write shards, drop gradients; the host first waits for copies of them."""
        self.scheduler.settle()
        for param in self._every_param():
            self._step(param)
        Counts.steps += 1

    def step_elsewhere(self) -> None:
        """As `optimizer_step`, on a stream of the user's, for whose event the next gathers wait.

        Gradients stay, since that stream may still read them; see `drop_gradients`.
        """
        self.device.follow(USER, self.device.record(Lane.COMPUTE, "backward done"))
        with self.device.on(USER):
            for param in self._every_param():
                self._update(param)
        self.scheduler.post_optim_event = cast(Event, self.device.record(USER, "optimizer done"))
        Counts.steps += 1

    def drop_gradients(self) -> None:
        """As ``zero_grad()``."""
        for param in self._every_param():
            param.gradient = None

    def step_in_backward(self, wanted: bool = True) -> None:
        """From now on a hook on each parameter does the step as soon as ``.grad`` is there."""
        for param in self._every_param():
            param.hook = self._step if wanted else None

    def _step(self, param: VirtualParam) -> None:
        self._update(param)
        param.gradient = None

    def _update(self, param: VirtualParam) -> None:
        if param.gradient is not None and param.rows is not None:
            self.device.run("step", [param.gradient, param.rows], [param.rows])

    def _every_param(self) -> list[VirtualParam]:
        return [param for node in self.root.walk() for param in self._params(node)]

    @staticmethod
    def _params(node: Node) -> list[VirtualParam]:
        groups = node.unit.own_groups
        return [cast(VirtualParam, param) for group in groups for param in group.params]

    def _freeze(self) -> None:
        for node in self.root.walk():
            for position, param in enumerate(self._params(node)):
                param.sharded.requires_grad = position >= node.frozen

    def _forward(self, node: Node) -> Call:
        unit = node.unit
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
        activation = self.device.empty((1,), torch.float32, "activation")
        reads = name.startswith("forward") or node.unit.unshard_in_backward
        params = self._params(node) + [self._params(o)[0] for o in self._owners.get(node, ())]
        gathered = [p.gathered for p in params if reads and p.gathered is not None]
        self.device.run(name, gathered, [activation])
        self._done(name)

    def _backward(self, call: Call, pending: Counter[Node]) -> None:
        node = call.node
        if not node.used:
            return
        unit = node.unit
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
        for owner in (node, *self._owners.get(node, ())):
            if owner.tied and not any(pending[user] for user in (owner, *owner.tied)):
                self._leave_gradient(self._params(owner)[0])  # after the last use of all
        if node.grad_to_input:
            self.scheduler.exit_backward(unit)
            self.active.remove(unit)
            self._done(f"exit backward {node.name}")

    def _leave_gradients(self, node: Node) -> None:
        params = self._params(node)
        for param in params[bool(node.tied) : len(params) - node.absent]:
            self._leave_gradient(param)

    def _leave_gradient(self, param: VirtualParam) -> None:
        if not param.sharded.requires_grad:
            return
        if param.full_grad is None:
            name = f"gradient {param.name}"
            param.full_grad = self.device.empty(param.shape, self._grad_dtype, name)
            self.device.run("gradient", [], [param.full_grad])
        else:
            self.device.run("gradient", [param.full_grad], [param.full_grad])

    def _done(self, what: str) -> None:
        if self._check is not None:
            self._check(self, what)

    # ---- what is gathered

    def gathered_ahead(self, kept: Collection[Unit] = ()) -> list[Unit]:
        """Units that are gathered although they are neither running nor kept on request.

        Args:
            kept: more that are kept, whatever their flags say now.
        """
        ahead = []
        left = []  # tied ones
        for unit in self.scheduler.units:
            states = {group: group.state for group in unit.own_groups}
            gathered = [g for g, s in states.items() if not (s.needs_gather or s.is_sharded)]
            tied = [group for group in gathered if group in unit.ties]
            left += tied
            if len(gathered) > len(tied) and not self._is_in_use(unit):
                ahead.append(unit)
        users = {g: {u for u in self.scheduler.units if g in u.ties} for g in left}
        known = {u for u in self.scheduler.units if self._is_in_use(u)}.union(ahead, kept)
        left = [group for group in left if not users[group].intersection(known)]
        while left:  # each came along with a unit that uses it
            unit = max(self.scheduler.units, key=lambda u: sum(u in users[g] for g in left))
            ahead.append(unit)
            left = [group for group in left if unit not in users[group]]
        return [unit for unit in ahead if unit not in kept]

    def _is_in_use(self, unit: Unit) -> bool:
        """Whether it is running, or kept."""
        # Of a backward that skips it: it takes it along all the same.
        under_way = unit in self.active or unit.phase is Phase.BACKWARD
        return under_way or not (unit.frees_after_forward and unit.reshard_after_backward)

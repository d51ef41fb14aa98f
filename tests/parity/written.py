"""Random programs that write weights by hand between steps, each against the unsharded model.

    seed ──> a model, its units, an optimizer ──> statements, as source: steps, evaluations,
               │ fully_shard on every rank          │ writes, averages swapped in, checkpoints
               └ a plain copy on every rank         └ run by both, one by one, and compared

A program is source, so that one that fails is printed as a program that a reader can run.

Nothing is resharded to be compared: a write that does not reach the next forward shows in what
that returns. A write may be refused (`ShardingStateError`), by `fsdp2.debug(check_writes=True)`
too, and DTensor refuses unsharded parameters beside sharded ones where a backward is to come, or
the program has unsharded units itself: it ends there, and counts as refused.

Computation is in float64, as in `tests.parity.programs`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import checkpoint as checkpoints
from fsdp2 import errors
from fsdp2.core.modules.registry import records_below
from tests.common import parity, workers

WIDTH = 6
ROWS = 3
TIMEOUT = 60.0
TOLERANCE = parity.Tolerance(rtol=1e-7, atol=1e-9)
"""Ten times that of `tests.parity.programs`: what Adam has divided is written, and read again."""

Built = list[tuple[int, int | None]]
"""A model's blocks: rows of each, and of the block in it if there is one."""


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, rows: int, inner: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)
        self.inner = None if inner is None else Block(inner)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        return x + 0.5 * self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self, blocks: Built) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(Block(*each) for each in blocks)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(torch.tanh(x))
        return out


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A piece of source that both models run."""

    kind: str
    source: str
    plain: str | None = None


@dataclass(frozen=True)
class Script:
    """A program."""

    seed: int
    world: int
    blocks: Built
    shape: tuple[int, ...]
    units: tuple[tuple[str, bool | int | None], ...]
    optimizer: str
    statements: tuple[Statement, ...] = ()
    reshards: bool = False

    def text(self) -> str:
        """As a reader would run it."""
        lines = [
            f"# {self.world} ranks; tests.parity.written has Net, x, out, noise, finish and whole",
            f"model = Net({self.blocks}).double()",
            f"mesh = init_device_mesh('cpu', {self.shape})",
            *(f"fully_shard({u}, mesh=mesh, reshard_after_forward={r})" for u, r in self.units),
            f"held, optimizer = list(model.parameters()), {self.optimizer}",
        ]
        for statement in self.statements:
            only = "  # the plain model: " + (statement.plain or "nothing")
            first, *rest = statement.source.splitlines()
            lines += [first + (only if statement.plain is not None else ""), *rest]
        return "\n".join(lines)


EVALUATIONS = (
    "with torch.no_grad():\n    out(model(x({n})))",
    "with torch.no_grad():\n    out(model(x({n})))",
    "with torch.inference_mode():\n    out(model(x({n})).clone())",
    "model.eval()\nwith torch.no_grad():\n    out(model(x({n})))\nmodel.train()",
    "out(model(x({n})))",
    "with torch.no_grad():\n    out(model(model(x({n})) @ torch.ones(5, 6, dtype=torch.double)))",
)

STEPS = (
    "loss(model(x({n}))).backward()\nfinish(model)\noptimizer.step()\noptimizer.zero_grad()",
    "loss(model(x({n}))).backward()\nfinish(model)\noptimizer.step()\noptimizer.zero_grad()",
    "loss(model(x({n}))).backward()\nfinish(model)\noptimizer.step()\nmodel.zero_grad(False)",
    "loss(model(x({n}))).backward()\nloss(model(x(-{n}))).backward()\nfinish(model)\n"
    "optimizer.step()\noptimizer.zero_grad()",
    "(loss(model(x({n}))) + loss(model(x(-{n})))).backward()\nfinish(model)\n"
    "optimizer.step()\noptimizer.zero_grad()",
    "loss(model(x({n}))).backward()\nfinish(model)\n"
    "with torch.no_grad():\n    out(model(x(-{n})))\noptimizer.step()\noptimizer.zero_grad()",
    "loss(model(x({n}))).backward()\nfinish(model)\nwith torch.no_grad():\n"
    "    for p in held:\n        p.sub_(p.grad, alpha=0.1)\nmodel.zero_grad()",
)

TARGETS = (
    "model.parameters()",
    "model.parameters()",
    "held",
    "held[::2]",
    "optimizer.param_groups[0]['params']",
    "(p for _, p in model.named_parameters())",
    "model.state_dict().values()",
    "model.head.parameters()",
    "model.blocks[0].parameters()",
    "[model.scale]",
)

CHANGES = (
    "p.mul_(0.5)",
    "p.add_(noise(p, {n}))",
    "p.copy_(noise(p, {n}))",
    "p.data.mul_(1.5)",
    "p.data.copy_(noise(p, {n}))",
    "p.lerp_(noise(p, {n}), 0.3)",
    "p.sub_(p.detach() * 0.25)",
    "rows(p).mul_(0.75)",
    "rows(p).detach().numpy().__imul__(0.9)",
    "p.detach().neg_()",
    "p.clamp_(-0.1, 0.1)",
    "nn.init.constant_(p, 0.05)",
)

BETWEEN = (
    "l = loss(model(x({n})))\nfor p in {t}:\n    p.data.mul_(1.1)\nl.backward()\nfinish(model)\n"
    "optimizer.step()\noptimizer.zero_grad()"
)

LISTS = (
    "torch._foreach_mul_([*{t}], 0.5)",
    "torch._foreach_add_([*{t}], [noise(p, {n}) for p in {t}])",
    "torch._foreach_lerp_([*{t}], [noise(p, {n}) for p in {t}], 0.3)",
)

AVERAGES = (
    "torch._foreach_lerp_(ema, [p.detach() for p in {t}], 0.4)",
    "for e, p in zip(ema, {t}):\n        e.mul_(0.6).add_(p.detach(), alpha=0.4)",
)

SWAPS = (
    "for e, p in zip(ema, {t}):\n        kept = p.detach().clone()\n        p.copy_(e)\n"
    "        e.copy_(kept)",
    "for e, p in zip(ema, {t}):\n        kept = p.data.clone()\n        p.data.copy_(e)\n"
    "        e.copy_(kept)",
    "torch._foreach_add_([*{t}], ema)\n    torch._foreach_sub_(ema, [*{t}])\n"
    "    torch._foreach_neg_(ema)\n    torch._foreach_sub_([*{t}], ema)",
)

CHECKPOINTS = (
    (
        "state = {{k: v.clone() for k, v in model.state_dict().items()}}",
        "model.load_state_dict(state)",
    ),
    ("save(model, optimizer, {n})", "load(model, optimizer, {n})"),
    ("state = whole_states(model)", "load_whole_states(model, state)"),
    (
        "state = copy.deepcopy(optimizer.state_dict()), "
        "{{k: v.clone() for k, v in model.state_dict().items()}}",
        "model.load_state_dict(state[1])\noptimizer.load_state_dict(state[0])",
    ),
)

PLACES = (
    ("model.unshard()", ""),
    ("model.reshard()", ""),
    ("for unit in units:\n    unit.unshard()", ""),
    ("for unit in units:\n    unit.reshard()", ""),
    ("model.set_tuning(keep_rows={b})", ""),
    ("model.set_reshard_after_forward(False)", ""),
    ("model.set_reshard_after_forward(True)", ""),
    ("model.set_reshard_after_backward({b}, recurse=True)", ""),
    ("for unit in units:\n    unit.set_reshard_after_forward({b}, recurse=False)", ""),
)


class Author:
    """Writes the program of a seed."""

    def __init__(self, seed: int, world: int, between: bool = False) -> None:
        self.between = between
        self.rng = random.Random(f"written {seed} on {world}")
        self.numbers = itertools.count(1)
        self.script = self._setting(seed, world)

    def _setting(self, seed: int, world: int) -> Script:
        rng = self.rng
        blocks: Built = [
            (rng.choice((1, 3, 4, 7)), rng.choice((None, None, 2, 5)))
            for _ in range(rng.randint(1, 3))
        ]
        shape = (2, 2) if world == 4 and rng.random() < 0.3 else (world,)
        choices = [None, None, True, False, *([2] if shape == (4,) else [])]
        units: list[tuple[str, bool | int | None]] = []
        for number, (_, inner) in enumerate(blocks):
            if inner is not None and rng.random() < 0.5:
                units.append((f"model.blocks[{number}].inner", rng.choice(choices)))
            if rng.random() < 0.6:
                units.append((f"model.blocks[{number}]", rng.choice(choices)))
        units.append(("model", rng.choice(choices)))
        optimizer = rng.choice(
            (
                "torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)",
                "torch.optim.SGD(model.parameters(), 0.1)",
                "torch.optim.AdamW(model.parameters(), 0.02)",
                "torch.optim.AdamW(model.parameters(), 0.02, fused=True)",
            )
        )
        return Script(seed, world, blocks, shape, tuple(units), optimizer)

    def write(self) -> Script:
        """The whole program."""
        statements: list[Statement] = []
        for _ in range(self.rng.randint(4, 9)):
            statements += self._next()
        return replace(self.script, statements=tuple(statements))

    def _next(self) -> list[Statement]:
        makers: list[tuple[Callable[[], list[Statement]], int]] = [
            (lambda: [self._of("evaluate", EVALUATIONS)], 25),
            (lambda: [self._of("train", STEPS)], 25),
            (lambda: [self._written()], 25),
            (self._average, 10),
            (self._checkpoint, 8),
            (self._estimate, 5),
            (lambda: [self._place()], 6),
            (lambda: [self._gathered()], 4),
            (lambda: [self._part()], 4),
            (lambda: [self._between()], 10 if self.between else 0),
        ]
        made = self.rng.choices([m for m, _ in makers], [weight for _, weight in makers])[0]
        return made()

    def _filled(self, source: str, target: str = "") -> str:
        number = next(self.numbers)
        return source.format(n=number, t=target, b=self.rng.random() < 0.5)

    def _of(self, kind: str, sources: Sequence[str]) -> Statement:
        return Statement(kind, self._filled(self.rng.choice(sources)))

    def _written(self) -> Statement:
        target = self.rng.choice(TARGETS)
        if self.rng.random() < 0.3:
            body = self._filled(self.rng.choice(LISTS), target)
            if "model.state_dict" in target or target.startswith("("):
                body = self._filled(self.rng.choice(LISTS), "held")
        else:
            body = f"for p in {target}:\n        {self._filled(self.rng.choice(CHANGES))}"
        return Statement("write", f"with torch.no_grad():\n    {body}")

    def _between(self) -> Statement:
        """A write between a forward and its backward, which autograd does not see."""
        target = self.rng.choice(TARGETS[:4])
        return Statement("between", self._filled(BETWEEN, target))

    def _average(self) -> list[Statement]:
        """An average of weights: begun, updated after steps, swapped in, and back."""
        target = self.rng.choice(("model.parameters()", "held"))
        within = "with torch.no_grad():\n    "
        made = [Statement("average", f"ema = [p.detach().clone() for p in {target}]")]
        for _ in range(self.rng.randint(1, 2)):
            made.append(self._of("train", STEPS))
            made.append(
                Statement("average", within + self._filled(self.rng.choice(AVERAGES), target))
            )
        swap = self.rng.choice(SWAPS).format(t=target)
        made += [Statement("swap", within + swap), self._of("evaluate", EVALUATIONS)]
        if self.rng.random() < 0.8:
            made.append(Statement("swap", within + swap))
        return made

    def _checkpoint(self) -> list[Statement]:
        take, put = (self._filled(source) for source in self.rng.choice(CHECKPOINTS))
        number = next(self.numbers)
        if "save(" in take:
            take, put = f"save(model, optimizer, {number})", f"load(model, optimizer, {number})"
        between = [self._of("train", STEPS), self._written(), self._of("evaluate", EVALUATIONS)]
        kept = [each for each in between if self.rng.random() < 0.7]
        return [Statement("save", take), *kept, Statement("load", put)]

    def _estimate(self) -> list[Statement]:
        """Gradients estimated by two evaluations, as MeZO's."""
        number = next(self.numbers)
        target = self.rng.choice(("model.parameters()", "held"))
        shift = "with torch.no_grad():\n    for p in {t}:\n        p.add_(noise(p, {n}), alpha={a})"
        one, two, three = (
            Statement("estimate", shift.format(t=target, n=number, a=a)) for a in (0.1, -0.2, 0.05)
        )
        looks = [self._of("evaluate", EVALUATIONS) for _ in range(2)]
        return [one, looks[0], two, looks[1], three]

    def _place(self) -> Statement:
        source, plain = self.rng.choice(PLACES)
        return Statement("place", self._filled(source), plain)

    def _gathered(self) -> Statement:
        change = self._filled(self.rng.choice(CHANGES[:7]))
        loop = f"    for p in model.parameters():\n        {change}"
        return Statement("gathered", f"with torch.no_grad(), whole(model):\n{loop}")

    def _part(self) -> Statement:
        """A unit below the root is called by itself."""
        parts = [unit for unit, _ in self.script.units if unit != "model"]
        if not parts:
            return self._of("evaluate", EVALUATIONS)
        part = self.rng.choice(parts)
        return Statement("part", self._filled(f"with torch.no_grad():\n    out({part}(x({{n}})))"))


# -- what sources name ----------------------------------------------------------------------------


class Side:
    """One of the two models, with what the sources name."""

    def __init__(self, script: Script, folder: str, sharded: bool) -> None:
        self.sharded, self.folder, self.shown = sharded, folder, list[Tensor]()
        self.reshards = sharded and script.reshards
        self.has_stayed = False  # unsharded after any statement, so that averages may be of such
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(script.seed)
            self.model: Any = Net(script.blocks).double()
        names: dict[str, Any] = {"model": self.model}
        if sharded:
            mesh = init_device_mesh("cpu", script.shape)
            for unit, reshard in script.units:
                fsdp2.fully_shard(eval(unit, names), mesh=mesh, reshard_after_forward=reshard)
        units = [eval(unit, names) for unit, _ in script.units]
        own = {name: getattr(self, name) for name in ("out", "loss", "finish", "whole", "save")}
        own |= {name: getattr(self, name) for name in ("load", "whole_states")}
        own["load_whole_states"] = self.load_whole_states
        self.names = names | own | {"units": units, "held": list(self.model.parameters())}
        self.names |= {"torch": torch, "nn": nn, "noise": noise, "rows": rows, "x": x}
        self.names["copy"] = __import__("copy")
        self.names["optimizer"] = eval(script.optimizer, self.names)

    def run(self, statement: Statement) -> None:
        """One statement; what it shows is in `shown`."""
        self.shown.clear()
        source = statement.source
        if not self.sharded and statement.plain is not None:
            source = statement.plain
        exec(source, self.names)
        self.has_stayed = self.has_stayed or self._stays()
        for unit in self.names["units"] if self.reshards else ():
            unit.reshard()

    def _stays(self) -> bool:
        """Whether units stay unsharded: for a backward to come, or as the program asked for it."""
        records = records_below(self.model)
        units = [record.unit for record in records]
        if any(unit.claimed or not unit.reshard_after_backward for unit in units):
            return True
        return any(r.scheduler is not None and r.scheduler.has_calls_to_come for r in records)

    def out(self, value: Tensor) -> None:
        self.shown.append(value.detach().clone())

    def loss(self, value: Tensor) -> Tensor:
        self.out(value)
        return value.square().mean()

    def finish(self, model: nn.Module) -> None:
        """Gradients as data parallelism has them."""
        for param in model.parameters() if not self.sharded else ():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return fsdp2.gathered(model) if self.sharded else contextlib.nullcontext()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if self.sharded:
            checkpoints.save(self.folder, model, optimizer, step=number)
        else:
            states = __import__("copy").deepcopy((model.state_dict(), optimizer.state_dict()))
            self.names[f"saved_{number}"] = states

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if self.sharded:
            checkpoints.load(self.folder, model, optimizer, step=number)
        else:
            states = __import__("copy").deepcopy(self.names[f"saved_{number}"])
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])

    def whole_states(self, model: nn.Module) -> dict[str, Tensor]:
        return {key: parity.full(value).clone() for key, value in model.state_dict().items()}

    def load_whole_states(self, model: nn.Module, states: dict[str, Tensor]) -> None:
        with self.whole(model):
            model.load_state_dict(states)

    def values(self) -> list[Tensor]:
        """Of the parameters that the optimizer holds."""
        held: Iterable[Tensor] = self.names["held"]
        return [parity.full(param.detach()).clone() for param in held]


def x(number: int) -> Tensor:
    """An input of this rank's."""
    generator = torch.Generator().manual_seed(abs(number) * 64 + dist.get_rank() * 2 + (number < 0))
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def noise(param: Tensor, number: int) -> Tensor:
    """The same small numbers on all ranks, sharded as a parameter is."""
    seed = number * 1000 + sum(param.shape)
    values = torch.randn(
        param.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    values = 0.1 * values
    if not isinstance(param, DTensor):
        return values
    mesh: DeviceMesh = param.device_mesh
    return distribute_tensor(values, mesh, param.placements, src_data_rank=None)


def rows(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


# -- running --------------------------------------------------------------------------------------


REFUSED = "refused: "
BROKEN = "not a program: "
_MIXED = "got mixed torch.Tensor and DTensor"


def outcome(script: Script) -> str:
    """Run a program on this rank: "" if nothing is wrong; else what is, alike on all ranks."""
    folders = [tempfile.mkdtemp(prefix="written-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, 0)
    stack = contextlib.ExitStack()
    try:
        sharded, plain = (Side(script, folders[0], each) for each in (True, False))
        stack.enter_context(fsdp2.debug(check_writes=True))
        for position, statement in enumerate((*script.statements, *LAST)):
            found = _compared(sharded, plain, statement)
            said: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(said, found)
            worst = next((each for each in said if each), "")
            if worst:
                return f"{position}: {worst}"
        return ""
    finally:
        stack.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folders[0], ignore_errors=True)


LAST = (
    Statement("evaluate", "with torch.no_grad():\n    out(model(x(0)))"),
    Statement("train", "loss(model(x(0))).backward()\nfinish(model)"),
    Statement("compare", "pass"),
)


def _compared(sharded: Side, plain: Side, statement: Statement) -> str:
    try:
        plain.run(statement)
    except Exception as error:  # what it names was left out
        return f"{BROKEN}{error}"
    try:
        sharded.run(statement)
    except errors.ShardingStateError as error:
        return f"{REFUSED}{error}"
    except Exception as error:
        if _MIXED in str(error) and sharded.has_stayed:
            return f"{REFUSED}{_MIXED}"
        return f"{statement.kind} raised {type(error).__name__}: {str(error)[:300]}"
    try:
        parity.assert_close(sharded.shown, plain.shown, TOLERANCE, statement.kind)
        if statement.kind == "compare":
            parity.assert_close(
                sharded.values(), plain.values(), TOLERANCE, "parameters at the end"
            )
    except AssertionError as error:
        return str(error)
    return ""


def failure_of(script: Script) -> str:
    """Run a program on its ranks: "" if nothing is wrong, or if it was refused."""
    try:
        said: str = workers.run_on_ranks(script.world, outcome, script, timeout=TIMEOUT)[0]
    except AssertionError as error:  # a RankError: a hang, or ranks that part
        return str(error)
    return said


def written(seed: int, world: int, between: bool = False) -> Script:
    """The program of a seed."""
    return Author(seed, world, between).write()


def check(seed: int, world: int, *, reshards: bool = False, between: bool = False) -> None:
    """Run the program of a seed; a failure shows it as a reader would run it."""
    script = replace(written(seed, world, between), reshards=reshards)
    found = failure_of(script)
    assert not found or REFUSED in found, f"seed {seed} on {world} ranks: {found}\n{script.text()}"

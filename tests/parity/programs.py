"""Random programs on real ranks, each against the same program without sharding.

    seed ──> a model of pieces, units, flags ──> statements: train, evaluate, generate, raise, …
               │ fully_shard on every rank          │ run by both, statement by statement
               └ a plain copy on every rank         └ losses, gradients, parameters compared

All ranks run the same program on data of their own. The plain copy's gradients are averaged over
the ranks, so it is what data parallelism means, whatever was accumulated and whenever it travelled.

Computation is in float64: sums in another order differ by some 1e-15 of their largest addend, and a
term that is missing, taken twice or out of date by a share of it. `TOLERANCE` is in between.

Left out: parameters tied between units, and units that not all ranks use.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.common import parity

WIDTH = 6
ROWS = 3
TOLERANCE = parity.Tolerance(rtol=1e-8, atol=1e-10)
"""Some 1e-14 was seen. Adam divides a gradient by its size, so noise in a small one grows."""


# -- models ---------------------------------------------------------------------------------------


class OnPurposeError(Exception):
    """What a program's forward or backward raises on purpose."""


@dataclass
class Run:
    """What a forward is given besides its input."""

    caches: dict[int, list[Tensor]] | None = None
    raises: int | None = None
    catches: int | None = None


BOXES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda box: box),
    "tuple": (lambda x: (x, None), lambda box: box[0]),
    "dict": (lambda x: {"x": x, "more": [1]}, lambda box: box["x"]),
    "namespace": (lambda x: SimpleNamespace(x=x), lambda box: box.x),
}


class Piece(nn.Module):
    """A part of a model: an input and a `Run`, to an output in a box."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.box, self.how = number, "tensor", ""
        self.keeps_aux = False
        self.aux: Tensor | None = None

    def forward(self, x: Tensor, run: Run) -> Any:
        if run.raises == self.number:
            raise OnPurposeError
        y = self.compute(x, run)
        if self.keeps_aux:
            self.aux = (y * x).mean()
        return BOXES[self.box][0](y)

    def compute(self, x: Tensor, run: Run) -> Tensor:
        raise NotImplementedError

    def called(self, x: Tensor, run: Run) -> Tensor:
        """Its output, out of its box."""
        if self.how and run.caches is None and torch.is_grad_enabled():
            out = checkpoint(self, x, run, use_reentrant=self.how == "reentrant")
        else:
            out = self(x, run)
        return BOXES[self.box][1](out)


class Dense(Piece):
    def __init__(self, number: int, hidden: int) -> None:
        super().__init__(number)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def compute(self, x: Tensor, run: Run) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Norm(Piece):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.LayerNorm(WIDTH)

    def compute(self, x: Tensor, run: Run) -> Tensor:
        return self.norm(x)


class Scale(Piece):
    """Parameters of few and odd rows, one of them of a single element."""

    def __init__(self, number: int, rows: int) -> None:
        super().__init__(number)
        self.rows = nn.Parameter(torch.randn(rows, WIDTH) / 2)
        self.one = nn.Parameter(torch.ones(1))

    def compute(self, x: Tensor, run: Run) -> Tensor:
        return torch.sin(x * self.one) + self.rows.mean(0)


class Attend(Piece):
    """Reads what it was given in earlier forwards, too, where the `Run` has a cache."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)

    def compute(self, x: Tensor, run: Run) -> Tensor:
        keys, values = self.key(x), self.value(x)
        if run.caches is not None:
            cache = run.caches.setdefault(self.number, [])
            cache += [keys, values]
            keys, values = torch.cat(cache[::2]), torch.cat(cache[1::2])
        return x + torch.softmax(x @ keys.T, -1) @ values


class Pack(Piece):
    """Other pieces in some order, perhaps one of them twice, and perhaps parameters of its own."""

    def __init__(self, number: int, parts: list[Piece], order: list[int], own: bool) -> None:
        super().__init__(number)
        self.parts, self.order = nn.ModuleList(parts), order
        self.mix = nn.Linear(WIDTH, WIDTH) if own else None
        self.unused = nn.Parameter(torch.ones(3)) if own and number % 3 == 0 else None

    def compute(self, x: Tensor, run: Run) -> Tensor:
        for index in self.order:
            part = self.parts[index]
            assert isinstance(part, Piece)
            try:
                x = part.called(x, run)
            except OnPurposeError:
                if self.number != run.catches:
                    raise
        return x if self.mix is None else torch.tanh(self.mix(x))


def inner_first(piece: Piece) -> list[Piece]:
    """A piece and all inside of it, each once and behind its own parts."""
    found: dict[Piece, None] = {}
    for part in piece.parts if isinstance(piece, Pack) else ():
        assert isinstance(part, Piece)
        found.update(dict.fromkeys(inner_first(part)))
    found[piece] = None
    return list(found)


class Builder:
    """A random model, the same for the same seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0
        self.shared: list[Piece] = []  # which are units: parameters are not tied between others

    def build(self) -> Pack:
        """The root."""
        self.shared = [self._leaf() for _ in range(self.rng.choice((0, 0, 1)))]
        parts = [self._piece(depth=2) for _ in range(self.rng.randint(2, 4))]
        return self._pack(parts)

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _piece(self, depth: int) -> Piece:
        rng = self.rng
        if self.shared and rng.random() < 0.3:
            return self.shared[0]
        if depth and rng.random() < 0.35:
            return self._pack([self._piece(depth - 1) for _ in range(rng.randint(1, 3))])
        return self._leaf()

    def _leaf(self) -> Piece:
        kind = self.rng.random()
        number = self._number()
        if kind < 0.45:
            return Dense(number, self.rng.choice((1, 5, 7, 8)))
        if kind < 0.6:
            return Norm(number)
        if kind < 0.75:
            return Scale(number, self.rng.choice((1, 2, 3, 5)))
        return Attend(number)

    def _pack(self, parts: list[Piece]) -> Pack:
        rng = self.rng
        parts = list(dict.fromkeys(parts))
        order = list(range(len(parts)))
        style = rng.random()
        if style < 0.25:
            rng.shuffle(order)
        elif style < 0.5:
            order.append(rng.choice(order))
        return Pack(self._number(), parts, order, own=rng.random() < 0.6)


@dataclass
class Statement:
    """One thing that a program does."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


class Program:
    """A model, how it is sharded, and what is done with it: all from a seed."""

    def __init__(self, seed: int, world: int) -> None:
        self.seed, self.world = seed, world
        self.rng = rng = random.Random(seed * 64 + world)
        self.more = random.Random(
            f"{seed} on {world}"
        )  # of what was added: the rest stays as it is
        self.plain = self._model(random.Random(seed))
        self.model: Any = self._model(random.Random(seed))
        self.pieces = [m for m in self.plain.modules() if isinstance(m, Piece)]
        self.numbers = [piece.number for piece in self.pieces]
        self.carries = rng.random() < 0.2
        """Whether forwards of one step hand a cache on, with gradient."""
        self._choose_details()
        self._shard()
        make = rng.choice((torch.optim.SGD, torch.optim.SGD, torch.optim.Adam))
        self.optimizers = [make(m.parameters(), lr=0.05) for m in (self.model, self.plain)]
        self.statements = [self._statement() for _ in range(rng.randint(4, 8))]
        self.statements.append(self._train())
        self._add_more()
        self.inputs = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    # ---- what is chosen

    def _model(self, rng: random.Random) -> Pack:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Builder(rng).build().double()

    def _both(self) -> Iterator[tuple[Piece, Piece]]:
        mine = {m.number: m for m in self.model.modules() if isinstance(m, Piece)}
        return ((mine[piece.number], piece) for piece in self.pieces)

    def _choose_details(self) -> None:
        rng = self.rng
        for pair in self._both():
            box = rng.choice(("tensor", "tensor", "tensor", *BOXES))
            how = rng.choice(("", "", "", "", "", "not", "reentrant"))
            frozen, aux = rng.random() < 0.15, rng.random() < 0.1
            if how == "reentrant" and box not in ("tensor", "tuple"):
                box = "tensor"  # torch follows gradients of no other container there
            for piece in pair:
                piece.box, piece.how = box, "" if aux else how
                piece.keeps_aux = aux
                if frozen:
                    piece.requires_grad_(False)
        self.checkpoints = any(piece.how for piece in self.pieces)
        inside: set[int] = set()  # of what is checkpointed: a value that is kept there has no graph
        for piece in self.pieces:
            if piece.how:
                inside.update(m.number for m in piece.modules() if isinstance(m, Piece))
        for pair in self._both():
            for piece in pair:
                piece.keeps_aux = piece.keeps_aux and piece.number not in inside

    def _shard(self) -> None:
        rng, world = self.rng, self.world
        if world == 4 and rng.random() < 0.25:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            size = 2
        else:
            mesh = init_device_mesh("cpu", (world,))
            size = world
        owners = Counter(
            part.number
            for pack in self.pieces
            if isinstance(pack, Pack)
            for part in pack.parts
            if isinstance(part, Piece)
        )
        choices: list[Any] = [None, None, True, False, *([2] if size == 4 else [])]
        self.units: list[Any] = []
        self.together = together = self._list_of_two(owners)
        self.owners = owners
        for piece in inner_first(self.model):
            if piece is self.model or piece in together:
                if together and piece is together[-1]:
                    fsdp2.fully_shard(together, mesh=mesh)
                    self.units += together
                continue
            if owners[piece.number] > 1 or rng.random() < 0.55:
                reshard = rng.choice(choices)
                fsdp2.fully_shard(piece, mesh=mesh, reshard_after_forward=reshard)
                self.units.append(piece)
        fsdp2.fully_shard(self.model, mesh=mesh, reshard_after_forward=rng.choice(choices))
        if len(self.units) > 1 and rng.random() < 0.15:
            first, second = rng.sample(self.units, 2)
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
        if rng.random() < 0.1:
            self.model.set_reduce_scatter_unused_params(True)
            self.zeros = True
        else:
            self.zeros = False

    def _list_of_two(self, owners: Counter[int]) -> list[Any]:
        """Two parts that become one unit, in one program of eight."""
        packs = [m for m in self.model.modules() if isinstance(m, Pack)]
        pack = self.more.choice(packs)
        first = self.more.randrange(len(pack.parts))
        chosen = [*pack.parts][first : first + 2]
        if self.more.random() > 0.12 or len(chosen) < 2:
            return []
        alone = all(owners[part.number] == 1 and not isinstance(part, Pack) for part in chosen)
        return chosen if alone else []

    def _add_more(self) -> None:
        """Statements and options that came later, so that older seeds mean what they meant."""
        more = self.more
        packs = [piece for piece in self.pieces if isinstance(piece, Pack)]
        for statement in self.statements:
            if statement.kind == "train":
                statement.options["again"] = more.random() < 0.1
                statement.options["interleaved"] = more.random() < 0.15
                pack = more.choice(packs)
                part = more.choice([m.number for m in pack.parts if isinstance(m, Piece)])
                # A side door that not every step uses is to raise, if the first did not.
                doors = self.carries or any(piece.keeps_aux for piece in self.pieces)
                if more.random() < 0.1 and self.owners[part] == 1 and not doors:
                    statement.options["survives"] = (part, pack.number)
            elif statement.kind == "evaluate":
                statement.options["inference"] = more.random() < 0.2
        alone = [unit for unit in self.units if unit not in self.together]
        if alone and more.random() < 0.3:
            unit = more.choice(alone)
            at = more.randrange(len(self.statements))
            self.statements.insert(at, Statement("part_alone", {"number": unit.number}))

    def _train(self) -> Statement:
        rng = self.rng
        micro = rng.choice((1, 1, 1, 2, 3))
        return Statement(
            "train",
            {
                "micro": micro,
                "sync": rng.choice(("each", "last")),
                "forwards": rng.choice((2, 3)) if self.carries else rng.choice((1, 1, 1, 2, 3)),
                "apart": not self.carries and rng.random() < 0.3,
                "grad": rng.random() < 0.5,
                "between": rng.choice((None, None, None, "evaluate", "generate")),
                "to_none": rng.random() < 0.7,
                "clip": rng.random() < 0.2,
            },
        )

    def _statement(self) -> Statement:
        rng = self.rng
        kind = rng.random()
        if kind < 0.55:
            return self._train()
        if kind < 0.65:
            return Statement("evaluate", {"grad": rng.random() < 0.4, "mode": rng.random() < 0.5})
        if kind < 0.75:
            return Statement("generate", {"length": rng.randint(1, 4)})
        if kind < 0.85:
            return Statement(
                "raise_in_forward",
                {"number": rng.choice(self.numbers), "reset": rng.random() < 0.4},
            )
        if kind < 0.9:
            return Statement("raise_in_backward", {"reset": rng.random() < 0.5})
        if kind < 0.95:
            return Statement("change_flags", {"unit": rng.random(), "keep": rng.random() < 0.5})
        return Statement("freeze", {"number": rng.choice(self.numbers)})

    # ---- what is done

    def run(self) -> None:
        """Run all statements."""
        for position, statement in enumerate(self.statements):
            self.where = f"seed {self.seed}, statement {position}: {statement}"
            getattr(self, statement.kind)(**statement.options)
        self._compare_params()

    def _input(self, grad: bool = False) -> Tensor:
        x = torch.randn(ROWS, WIDTH, generator=self.inputs, dtype=torch.float64)
        return x.requires_grad_(grad)

    def _forwards(
        self, model: Any, inputs: list[Tensor], survives: tuple[int, int] | None = None
    ) -> list[Tensor]:
        """A loss for each input."""
        caches: Any = {} if self.carries else None
        losses = []
        for x in inputs:
            box = model(x, Run(caches, *(survives or ())))
            out = BOXES[model.box][1](box)
            loss = out.square().mean()
            for piece in model.modules():
                if isinstance(piece, Piece) and piece.aux is not None:
                    loss = loss + 0.1 * piece.aux
                    piece.aux = None
            losses.append(loss)
        return losses[-1:] if self.carries else losses

    def train(
        self,
        micro: int,
        sync: str,
        forwards: int,
        apart: bool,
        grad: bool,
        between: str | None,
        to_none: bool,
        clip: bool,
        again: bool = False,
        interleaved: bool = False,
        survives: tuple[int, int] | None = None,
    ) -> None:
        """A step of an optimizer, after some micro-batches."""
        self.reduced = False
        for number in range(micro):
            self.model.set_requires_gradient_sync(sync == "each" or number == micro - 1)
            inputs = [self._input(grad) for _ in range(forwards)]
            copies = [x.detach().clone().requires_grad_(grad) for x in inputs]
            mine = self._forwards(self.model, inputs, survives)
            theirs = self._forwards(self.plain, copies, survives)
            if interleaved:
                self.evaluate(grad=False, mode=True)
            parity.assert_close(
                [x.detach() for x in mine], [x.detach() for x in theirs], TOLERANCE, self.where
            )
            for losses in (mine, theirs):
                if not any(loss.requires_grad for loss in losses):
                    continue
                self.reduced = True
                for total in losses if apart else [torch.stack(losses).sum()]:
                    if again:
                        total.backward(retain_graph=True)
                    total.backward()
            if grad:
                parity.assert_close([x.grad for x in inputs], [x.grad for x in copies], TOLERANCE)
            if between == "evaluate":
                self.evaluate(grad=False, mode=False)
            elif between == "generate":
                self.generate(length=2)
        self._compare_grads()
        if clip:
            norm = fsdp2.clip_grad_norm_(self.model.parameters(), 0.1)
            other = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)
            parity.assert_close(norm.double(), other.double(), TOLERANCE, self.where)
        for optimizer in self.optimizers:
            optimizer.step()
        self._compare_params()
        self.model.zero_grad(set_to_none=to_none)
        self.plain.zero_grad(set_to_none=to_none)

    def evaluate(self, grad: bool, mode: bool, inference: bool = False) -> None:
        """A forward whose backward never comes."""
        x = self._input()
        without = torch.inference_mode if inference else torch.no_grad
        with contextlib.nullcontext() if grad else without():
            for model in (self.model, self.plain):
                model.train(mode)
            mine, theirs = (self._forwards(m, [x])[0].detach() for m in (self.model, self.plain))
        parity.assert_close(mine, theirs, TOLERANCE, self.where)

    def generate(self, length: int) -> None:
        """Forwards without gradient, each with what those before have left."""
        x = self._input()
        outputs = []
        with torch.no_grad():
            for model in (self.model, self.plain):
                y, caches = x, dict[int, list[Tensor]]()
                for _ in range(length):
                    y = BOXES[model.box][1](model(y, Run(caches)))
                outputs.append(y)
        parity.assert_close(outputs[0], outputs[1], TOLERANCE, self.where)

    def raise_in_forward(self, number: int, reset: bool) -> None:
        """A forward that raises, and is given up."""
        x = self._input()
        raised = 0
        for model in (self.model, self.plain):
            try:
                model(x, Run(raises=number))
            except OnPurposeError:
                raised += 1
        assert raised in (0, 2), self.where
        if reset:
            self.model.reset_iter_state()

    def raise_in_backward(self, reset: bool) -> None:
        """A backward that raises in the middle."""
        x = self._input(grad=True)
        loss = self._forwards(self.model, [x])[-1]

        def fail(_: Tensor) -> None:
            raise OnPurposeError

        x.register_hook(fail)
        if loss.requires_grad:
            with contextlib.suppress(OnPurposeError):
                loss.backward()
        if reset:
            self.model.reset_iter_state()
        else:
            with torch.no_grad():
                self.model(x.detach(), Run())
        self.model.zero_grad()
        self.plain.zero_grad()

    def part_alone(self, number: int) -> None:
        """A unit below the root is called by itself, and trained."""
        x = self._input()
        self.model.set_requires_gradient_sync(True)
        for pair in self._both():
            for piece in pair:
                if piece.number == number:
                    out = BOXES[piece.box][1](piece(x, Run()))
                    piece.aux = None
                    if out.requires_grad:
                        out.square().mean().backward()
        self.reduced = False  # units that were not called count for nothing
        self._compare_grads(called=number)
        self.model.zero_grad()
        self.plain.zero_grad()

    def change_flags(self, unit: float, keep: bool) -> None:
        """Other flags for a unit; parameters come and go by hand."""
        units = [*self.units, self.model]
        chosen = units[int(unit * len(units))]
        chosen.set_reshard_after_forward(keep)
        chosen.unshard()
        if keep:
            chosen.reshard()

    def freeze(self, number: int) -> None:
        """Freeze a piece, or the other way round."""
        for pair in self._both():
            for piece in pair:
                if piece.number == number:
                    piece.requires_grad_(not any(p.requires_grad for p in piece.parameters()))

    # ---- what is compared

    def _compare_grads(self, called: int | None = None) -> None:
        world = self.world
        for param in self.plain.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= world
            elif self.zeros and self.reduced and param.requires_grad:
                param.grad = torch.zeros_like(param)  # and Adam counts its step
        expected = parity.full_grads(self.plain)
        self.model.reshard()
        for unit in self.units:
            unit.reshard()
        found = parity.full_grads(self.model)
        if called is not None and self.zeros:  # those of the whole model, or of the unit: as it is
            found = {n: g if expected[n] is not None else None for n, g in found.items()}
        parity.assert_close(found, expected, TOLERANCE, self.where)

    def _compare_params(self) -> None:
        for unit in (*self.units, self.model):
            unit.reshard()
        parity.assert_close(
            parity.full_params(self.model), parity.full_params(self.plain), TOLERANCE, self.where
        )

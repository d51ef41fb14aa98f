"""Small models for the tests. Each is built from a seed, so that every rank, and every
implementation that is compared, starts from the same values.

A model says which of its submodules become units of their own (`units`), in the order in which
`fully_shard` is to be called on them: children before parents, the root last and not listed.
Attention has no key bias: its gradient is zero but for rounding noise, which AdamW would blow up to
steps of a whole learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 8  # width of the models' inputs and, where they have a choice, of their layers


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Builds a model from a seed and leaves the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def units(model: nn.Module) -> list[nn.Module]:
    """The submodules that become units of their own: marked with `is_unit`; innermost first."""
    marked = [module for module in model.modules() if getattr(module, "is_unit", False)]
    return [module for module in reversed(marked) if module is not model]


class OddMLP(nn.Module):
    """Linears whose dim 0 divides by no world size above 1. Who holds how many of d rows:

    d     2 ranks     4 ranks
    1     1 0         1 0 0 0
    3     2 1         1 1 1 0
    5     3 2         2 2 1 0
    7     4 3         2 2 2 1
    """

    def __init__(self, dims: tuple[int, ...] = (7, 3, 5, 1)) -> None:
        super().__init__()
        sizes = (DIM, *dims)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes, dims, strict=False))
        for layer in self.layers:
            layer.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else torch.tanh(x))
        return x


class Block(nn.Module):
    """A transformer block of width DIM: two norms, causal attention, an MLP with a bias-free half.

    Not only parameters: a dropout at rate 0 (a module without parameters) and a buffer that scales
    the attention. The MLP holds an odd number of rows, so one slot is uneven for every world size.
    """

    is_unit = True

    def __init__(self, heads: int = 2, hidden: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.norm2 = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM, bias=False)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("scale", torch.tensor((DIM // heads) ** -0.5))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~mask, -torch.inf).softmax(-1)
        return self.out((weights.to(v.dtype) @ v).transpose(1, 2).reshape(x.shape))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks between an embedding and a head, which are of the root's group; ids in, logits out.

    `tied` gives the head the embedding's weight: one parameter in two slots of the root's group.
    """

    def __init__(self, blocks: int = 2, vocab: int = 13, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pair(nn.Module):
    """A unit that holds a unit: the outer weight is used before and after the inner unit runs."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(DIM, DIM)
        self.inner = nn.Linear(DIM, DIM)
        self.inner.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.outer(x)))))


class Nested(nn.Module):
    """Units within units, three deep with the root."""

    def __init__(self, pairs: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.pairs = nn.ModuleList(Pair() for _ in range(pairs))
        self.last = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for pair in self.pairs:
            x = pair(x)
        return self.last(x)


class MLP(nn.Module):
    """`depth` linear layers of width DIM, each a unit, and tanh between; the root owns `head`."""

    def __init__(self, depth: int = 3, out: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(depth))
        for layer in self.layers:
            layer.is_unit = True
        self.head = nn.Linear(DIM, out)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@dataclass
class Halves:
    """What a `Fork` in mode "dataclass" returns."""

    left: Tensor
    rest: dict[str, Tensor | None]


class Fork(nn.Module):
    """A unit with two outputs, returned in the container that `mode` names."""

    is_unit = True

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.left = nn.Linear(DIM, DIM)
        self.right = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> object:
        left, right = torch.tanh(self.left(x)), torch.sin(self.right(x))
        if self.mode == "tuple":
            return left, (right, None, 3)
        if self.mode == "dict":
            return {"left": left, "rest": [{"right": right}, "label"]}
        if self.mode == "dataclass":
            return Halves(left, {"right": right, "nothing": None})
        raise ValueError(f"no container named {self.mode!r}")


def halves(output: object) -> tuple[Tensor, Tensor]:
    """The two tensors of a `Fork`'s output."""
    if isinstance(output, Halves):
        left, right = output.left, output.rest["right"]
    elif isinstance(output, dict):
        left, right = output["left"], output["rest"][0]["right"]
    else:
        assert isinstance(output, tuple)
        left, (right, *_) = output
    assert isinstance(left, Tensor)
    assert isinstance(right, Tensor)
    return left, right


class Forked(nn.Module):
    """Two forks in a row; `used` picks which halves of each go on: the others get no gradient."""

    def __init__(self, mode: str, used: str = "both") -> None:
        super().__init__()
        self.used = used
        self.forks = nn.ModuleList(Fork(mode) for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        for fork in self.forks:
            left, right = halves(fork(x))
            x = {"both": left + right, "left": left, "right": right}[self.used]
        return self.head(x)


class Repeated(nn.Module):
    """One unit that runs `times` times in every forward."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.times = times
        self.first = nn.Linear(DIM, DIM)
        self.block = nn.Linear(DIM, DIM)
        self.block.is_unit = True
        self.first.is_unit = True
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = torch.tanh(self.block(x))
        return self.head(x)


class Choosy(nn.Module):
    """Runs the units that `active` names; the others get no gradient. All ranks agree on it."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("a", "b", "c")})
        for choice in self.choices.values():
            choice.is_unit = True
        self.spare = nn.Linear(DIM, DIM)  # of the root's group, never used
        self.head = nn.Linear(DIM, 2)
        self.active: tuple[str, ...] = ("a", "c")

    def forward(self, x: Tensor) -> Tensor:
        for name in self.active:
            x = torch.tanh(self.choices[name](x))
        return self.head(x)


class Buffered(nn.Module):
    """A unit with buffers it reads and writes: a persistent, a non-persistent, an integer one."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("shift", torch.linspace(-1, 1, DIM), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean(0), 0.5)
                self.calls += 1
        return torch.tanh(self.linear(x) + self.shift - self.mean).to(x.dtype)


class Keeper(nn.Linear):
    """Keeps what ``keep`` makes of its weight, a view of it, for somebody else."""

    keep: Callable[[Tensor], Tensor] = staticmethod(torch.t)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.keep(self.weight)
        return super().forward(x)


class ReadsKept(nn.Module):
    """Reads what a part of it has kept, after another part has run."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.keeper, self.between = Keeper(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.keeper(x))
        weight = self.keeper.kept
        return x @ weight

"""A model of blocks for ``torch.compile``, the ways to compile its blocks, and what dynamo counted.

model = sharded(api, build, "in place, then sharded", Compiler("aot_eager"))

inlet ── block 0 ── block 1 ── outlet        each block a unit, one graph; the rest the root's
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.common.models import DIM

HIDDEN = 11  # uneven on two ranks
OUT = 3

IN_FORWARD, OUTSIDE_FSDP, INSIDE_FSDP = "in forward", "around the unit", "inside the unit"
CHECKPOINTS = (IN_FORWARD, OUTSIDE_FSDP, INSIDE_FSDP)
"""``torch.utils.checkpoint`` in the compiled forward; a wrapper around the sharded, compiled block;
a wrapper that is compiled and sharded (the order of torchtitan)."""

BLOCK_WAYS = (
    "wrapped, then sharded",
    "sharded, then wrapped",
    "in place, then sharded",
    "sharded, then in place",
)
ROOT_WAYS = ("root wrapped", "root in place")


class Block(nn.Module):
    """Pre-norm MLP. Its forward is one graph."""

    is_unit = True

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.checkpoints = checkpoints

    def run(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return x + checkpoint(self.run, x, use_reentrant=False)
        return x + self.run(x)


class Stack(nn.Module):
    """Blocks between two linears, which are of the root's group."""

    def __init__(self, blocks: int = 2, checkpoints: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(blocks))
        self.outlet = nn.Linear(DIM, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


@dataclass
class Compiler:
    """How to compile, and what was: made anew for each model."""

    backend: str = "aot_eager"
    fullgraph: bool = True
    counter: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.backend != "none":
            self.counter = CompileCounterWithBackend(self.backend)

    def wrap(self, module: nn.Module) -> Any:
        return torch.compile(module, backend=self.counter, fullgraph=self.fullgraph)

    def in_place(self, module: nn.Module) -> None:
        module.compile(backend=self.counter, fullgraph=self.fullgraph)

    @property
    def graphs(self) -> int:
        """Graphs that were compiled so far, recompilations counted again."""
        return self.counter.frame_count if self.counter is not None else 0

    @property
    def operators(self) -> int:
        """Their operators, all together."""
        return self.counter.op_count if self.counter is not None else 0


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, nothing left behind, inductor without processes of its own."""
    torch._dynamo.reset()
    counters.clear()
    with contextlib.ExitStack() as stack:
        if hasattr(torch, "_inductor"):
            from torch._inductor import config

            stack.enter_context(config.patch(compile_threads=1))
        try:
            yield
        finally:
            torch._dynamo.reset()


def graph_breaks() -> dict[str, int]:
    """Reasons for graph breaks since `fresh_dynamo`, and how often."""
    return dict(counters["graph_break"])


def sharded(
    api: Any,
    model: Any,
    way: str,
    compiler: Compiler,
    *,
    checkpoints: str | None = None,
    root: Callable[[Any], None] | None = None,
    **arguments: Any,
) -> Any:
    """Compiles and shards a `Stack`: its blocks, then the root."""
    compiles = compiler.backend != "none"
    for i, block in enumerate(model.blocks):
        if checkpoints == INSIDE_FSDP:
            block = checkpoint_wrapper(block)
        if compiles and way == "wrapped, then sharded":
            block = compiler.wrap(block)
        if compiles and way == "in place, then sharded":
            compiler.in_place(block)
        api.fully_shard(block, **arguments)
        if compiles and way == "sharded, then in place":
            compiler.in_place(block)
        if compiles and way == "sharded, then wrapped":
            block = compiler.wrap(block)
        if checkpoints == OUTSIDE_FSDP:
            block = checkpoint_wrapper(block)
        model.blocks[i] = block
    api.fully_shard(model, **arguments)
    if root is not None:
        root(model)
    if compiles and way == "root wrapped":
        return compiler.wrap(model)
    if compiles and way == "root in place":
        compiler.in_place(model)
    return model


def plain_name(name: str) -> str:
    """A parameter's name without those of wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

"""The output of a run: tables, one line (or a bar) of progress, and the figures in them.

With `rich` and a terminal, tables and a live bar; otherwise plain text, one line per report.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2 import report

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table

    HAS_RICH = True
except ModuleNotFoundError:  # the `examples` extra is not installed
    HAS_RICH = False


@dataclass(frozen=True)
class StepReport:
    """One line of progress."""

    step: int  # optimizer steps done
    steps: int  # in all
    loss: float  # nats, mean over the global batch
    tokens_per_second: float  # over all ranks
    peak_bytes: int  # this rank's

    def fields(self) -> str:
        return (
            f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"peak {format_bytes(self.peak_bytes)}"
        )

    def line(self) -> str:
        width = len(str(self.steps))
        return f"step {self.step:{width}d}/{self.steps}  {self.fields()}"


class ProgressReporter:
    """A bar on a terminal, else one line a report. Ranks other than 0 pass `show=False`."""

    def __init__(self, steps: int, start: int, show: bool) -> None:
        self._show = show
        self._bar: Progress | None = None
        if show and HAS_RICH and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[report]}"),
            )
            self._task = self._bar.add_task("train", total=steps, completed=start, report="")

    def __enter__(self) -> ProgressReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, report: StepReport) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, report=report.fields())
        elif self._show:
            print(report.line(), flush=True)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """First column to the left, the others to the right."""
    if HAS_RICH and sys.stdout.isatty():
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    print(flush=True)


def print_groups(model: torch.nn.Module) -> None:
    """The model's groups: what is gathered and freed together, and what a rank holds of it."""
    print(f"Groups, each gathered and freed as one\n{report(model)}", flush=True)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state: on this rank, and unsharded."""

    rank: int
    unsharded: int


def state_bytes(
    params: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> StateBytes:
    """Counted on the tensors themselves: sharded `params`, frozen or trained, and what hangs on."""
    rank = unsharded = 0
    for param in params:
        for tensor in (param, param.grad, *optimizer.state.get(param, {}).values()):
            if isinstance(tensor, Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                rank += local.numel() * local.element_size()
                unsharded += tensor.numel() * tensor.element_size()
    return StateBytes(rank, unsharded)


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def printable(text: bytes) -> str:
    """Generated bytes as text that cannot upset a terminal."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c == "\n" else " " if c == "\t" else "?" for c in decoded
    )

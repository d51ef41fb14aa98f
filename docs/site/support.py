"""The support matrix: which feature which tests run, read from marks of tests without running them.

    pytestmark = [pytest.mark.ranks, pytest.mark.feature("HSDP")]      # all tests of a module
    @pytest.mark.feature("Levels", "Accumulation")                     # one test

A test counts for CPU ranks if it is marked ``ranks`` or ``clients``; in tests/accelerator for the
simulated accelerator; in tests/gpu for a GPU. Versions of torch are those that CI installs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FEATURES = (
    "Training with the results of torch's FSDP2",
    "Mixed precision",
    "Accumulation of gradients",
    "Activation checkpointing",
    "HSDP",
    "Levels",
    "Tensor parallelism",
    "Expert parallelism",
    "Pipeline parallelism",
    "Context parallelism",
    "Uneven shards, shards on dims other than 0",
    "Small parameters that stay replicated",
    "Tied parameters",
    "Frozen parameters, LoRA",
    "QLoRA with torchao",
    "CPU offload",
    "Gradient norms and clipping",
    "FlatOptimizer",
    "Optimizer steps in backward",
    "Optimizer states in CPU memory",
    "Muon",
    "EMA",
    "torch.compile of blocks",
    "CUDA graphs",
    "Graph mode",
    "Second derivatives",
    "Wire formats",
    "All-gather hooks of tensor subclasses",
    "Collectives of your own",
    "Explicit prefetch",
    "Checkpoints on another number of ranks",
    "Asynchronous checkpoints",
    "Checkpoints in object stores",
    "Export to and import from safetensors",
    "State dicts, DCP",
    "Preemption",
    "Replica groups that fail and heal",
    "Full tensors",
    "Exceptions on all ranks",
    "Check for ranks that disagree",
    "Timelines",
    "FSDP1's wrapper",
    "XLA's wrapper",
    "Scripts for torch's FSDP2, unchanged",
    "accelerate, Trainer, trl, Lightning",
    "NCCL with one rank",
    "NCCL with several ranks",
    "Several machines",
    "Windows and macOS",
)
"""Rows of the matrix, in its order. A row that no test is marked with is untested."""

COLUMNS = {"ranks": "CPU ranks", "accelerator": "simulated accelerator", "gpu": "GPU"}

_CI = (ROOT / ".github" / "workflows" / "ci.yml", ROOT / ".ci" / "run")


@dataclass(frozen=True)
class Test:
    """A test function, what runs it, and which features it is marked with."""

    path: str
    name: str
    kind: str
    late: bool
    features: tuple[str, ...]


def versions() -> tuple[list[str], list[str]]:
    """Versions of torch on which CI runs the default tests, and those for all other tests."""
    workflow, script = (path.read_text(encoding="utf-8") for path in _CI)
    every = re.findall(r"install --quiet torch==(\d+\.\d+)", script)
    found = {*re.findall(r'- \{ torch: "([\d.]+)"', workflow), *every}
    return sorted(found), sorted({*every})


def _marks(nodes: list[ast.expr]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and arguments of each mark among decorators, or in the value of ``pytestmark``."""
    for node in nodes:
        if isinstance(node, ast.List):
            yield from _marks(node.elts)
        call = node.func if isinstance(node, ast.Call) else node
        if isinstance(call, ast.Attribute | ast.Name):
            given = node.args if isinstance(node, ast.Call) else []
            texts = (each.value for each in given if isinstance(each, ast.Constant))
            name = call.attr if isinstance(call, ast.Attribute) else call.id
            yield name, tuple(text for text in texts if isinstance(text, str))


def tests() -> Iterator[Test]:
    """All test functions."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        whole = [
            node.value
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        folder = path.parent.name
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                marks = [*_marks(whole), *_marks(node.decorator_list)]
                names = {name for name, _ in marks}
                kind = folder if folder in COLUMNS else "ranks" if names & _RANKS else "alone"
                late = bool(names & {"extended", "exhaustive", "clients"})
                features = {text for name, texts in marks if name == "feature" for text in texts}
                source = path.relative_to(ROOT).as_posix()
                yield Test(source, node.name, kind, late, tuple(sorted(features)))


_RANKS = {"ranks", "clients"}


def table(repository: str) -> str:
    """The matrix in Markdown; a count of tests links to the first file that has them."""
    found = [test for test in tests() if test.features]
    default, every = (", ".join(each) for each in versions())
    lines = [f"| feature | {' | '.join(COLUMNS.values())} | torch |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        own = [test for test in found if feature in test.features]
        cells = []
        for kind in COLUMNS:
            counted = [test for test in own if test.kind == kind]
            tests_ = "1 test" if len(counted) == 1 else f"{len(counted)} tests"
            written = " written" if kind == "gpu" else ""
            path = counted[0].path if counted else ""
            cells.append(f"[{tests_}{written}]({repository}/blob/main/{path})" if path else "-")
        ran = [test for test in own if test.kind != "gpu"]
        on = default if not all(test.late for test in ran) else every
        lines.append(f"| {feature} | {' | '.join(cells)} | {on if ran else '**untested**'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(".."))

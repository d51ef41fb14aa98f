"""benchmarks/planned_steps: the plan is of the step that is measured, and what is said of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import planned_steps, stats, step, variants
from benchmarks.models import PRESETS, Llama, recompute_blocks
from fsdp2.planning import Hardware
from fsdp2.planning.hardware import load, write
from fsdp2.testing.null_group import CallLog, null_world
from fsdp2.testing.stand_in import device as stand_in

CPU = torch.device("cpu")


def machine() -> Hardware:
    """As a CPU is calibrated."""
    return replace(load("h100"), device="cpu", backend="gloo", shared=True)


@pytest.mark.parametrize(
    ("preset", "recompute"), [("tiny", False), ("tiny", True), ("tiny-moe", False)]
)
def test_a_plan_has_the_collectives_of_the_step(preset: str, recompute: bool) -> None:
    config, log = PRESETS[preset], CallLog()
    options = planned_steps.parse(["--device", "cpu"])
    with null_world(options.world_size, observer=log):
        with torch.device("meta"):
            model = Llama(config)
        if recompute:
            recompute_blocks(model)
        variants.place(model, "fsdp2", options.precision, options.world_size, CPU)
        assert variants.coalesces(CPU)
        run = step.make_step(model, config, CPU)
        for _ in range(variants.STEADY):
            log.clear()
            run()
    options.recompute = recompute
    there = planned_steps.as_measured(machine(), "cpu", ranks=0, coalesces=True)
    made = planned_steps.planned(config, options, there)
    rest = options.world_size / (options.world_size + 1)  # of whole tensors and this rank's parts
    seen = [
        (call.name.split("_single")[0], call.tensors // 2, call.nbytes * rest) for call in log.calls
    ]
    recording = made.rehearsal.recording
    said = [
        (note.name.replace("-", "_"), note.tensors, note.nbytes)
        for note in recording.operations
        if note.kind == "collective"
    ]
    assert said == seen
    assert len(said) == 3 * config.layers + 2  # the root's stays until its backward
    assert made.time.communication == 0.0


def test_real_ranks_pay_for_collectives() -> None:
    options = planned_steps.parse(["--device", "cpu", "--ranks", "2"])
    options.recompute = False
    there = planned_steps.as_measured(machine(), "cpu", ranks=2, coalesces=False)
    made = planned_steps.planned(PRESETS["tiny"], options, there)
    assert made.settings.world == 2
    assert made.time.communication > 0.0
    assert there == machine()


def test_logits_are_there_until_the_step_ends() -> None:
    """As `step.make_step` keeps them: between two vocabularies lie rows and logits."""
    options = planned_steps.parse(["--device", "cpu"])
    options.recompute = False
    there = planned_steps.as_measured(machine(), "cpu", ranks=0, coalesces=True)
    config = PRESETS["tiny"]
    more = 2 * config.vocab
    found = [
        planned_steps.planned(each, options, there).memory.before.live
        for each in (config, replace(config, vocab=more))
    ]
    rows = 2 * (more - config.vocab) // options.world_size * config.dim * 4
    logits = config.batch * config.seq * (more - config.vocab) * 4
    assert found[1] - found[0] == rows + logits


def test_the_null_group_costs_a_call() -> None:
    free = planned_steps.as_measured(machine(), "cuda", ranks=0, coalesces=True)
    assert free.collective("all-gather", 10**9, tuple(range(8)), 8) == 0.0
    assert free.rate(torch.float32, 8) == machine().flops["float32"]
    assert free.host_collective == machine().host_op


def test_backends_are_those_of_the_steps() -> None:
    def found(device: str, ranks: int, coalesces: bool) -> str:
        return planned_steps.as_measured(machine(), device, ranks, coalesces).backend

    assert found("cpu", 2, False) == "gloo"
    assert found("cuda", 2, True) == "nccl"
    assert found("cuda", 2, False) == "nccl2"
    assert found(stand_in.NAME, 0, True) == "nccl"


def test_both_are_printed() -> None:
    rows = {
        "a": {"planned": {"ms": 8.0, "GB": 1.0}, "measured": {"ms": [10.0, 16.0, 8.0], "GB": [2.0]}}
    }
    ratios = planned_steps.ratios(rows)
    _, (row,) = planned_steps.table({"rows": rows, "ratios": ratios, "lost": {}})
    assert row == ["a", "8.00", "10.00", "-20.0%", "1.0000", "2.0000", "-50.0%"]
    assert ratios["a, planned / measured, ms"] == stats.Summary(0.8, 0.5, 1.0)


needs_tools = pytest.mark.skipif(stand_in.missing_tool() is not None, reason="needs c++ and ninja")


@pytest.mark.extended
@needs_tools
def test_memory_is_as_planned_on_the_stand_in(tmp_path: Path) -> None:
    """A CPU's kernels, which the stand-in computes with, have a little memory of their own."""
    file, results = tmp_path / "machine.json", tmp_path / "results.json"
    write(machine(), file)
    planned_steps.main(
        [
            *("--presets", "tiny,tiny-moe", "--recomputed", "tiny", "--device", stand_in.NAME),
            *("--machine", str(file), "--rounds", "1", "--steps", "1", "--json", str(results)),
        ]
    )
    found = json.loads(results.read_text())["results"]["rows"]
    assert len(found) == 3
    for name, row in found.items():
        assert row["measured"]["GB"] == [pytest.approx(row["planned"]["GB"], rel=0.05)], name

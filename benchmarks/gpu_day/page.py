"""The page of a day: what ran, what did not, and what benchmarks printed."""

from __future__ import annotations

from benchmarks import stats
from benchmarks.gpu_day import runner
from benchmarks.gpu_day.runner import Day
from benchmarks.gpu_day.stages import Stage

NAME = "page.md"


def write(day: Day) -> None:
    """Write it anew, from files."""
    parts = [_head(day), _overview(day), _not_run(day)]
    parts += [_tests(day, stage) for stage in day.stages if stage.is_tests]
    parts += [_measured(day, stage) for stage in day.stages if not stage.is_tests]
    (day.out / NAME).write_text("\n".join(part for part in parts if part))


def _head(day: Day) -> str:
    machine = day.machine
    number = f"{machine.gpus} x " if machine.gpus else ""
    nccl = f"{machine.nccl} ({', '.join(machine.backends)})" if machine.nccl else ""
    facts = {
        "device": number + machine.device + (", the stand-in" * (machine.kind == "stand-in")),
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "NCCL": nccl,
        "torch": machine.torch,
        "Python": machine.python,
        "commit": f"{machine.commit or 'no git'}, sources {machine.sources}",
    }
    lines = [f"- {what}: {value or 'none'}" for what, value in facts.items()]
    text = (
        "Ratios are medians over rounds of runs that took turns, with the smallest and the largest "
        "round; below 1 the first of the two is faster, or smaller. "
        "`none` is the model without sharding, `torch` and `fsdp1` are torch's FSDP2 and FSDP1."
    )
    if machine.kind != "cuda":
        text += " **This is a rehearsal without a GPU: its figures mean nothing.**"
    return "\n".join(["# fsdp2 on this machine", "", *lines, "", text, ""])


def _overview(day: Day) -> str:
    rows = [
        (stage.title, _status(day, stage), f"`{stage.line}`")
        for stage in day.stages
        if day.outcomes[stage.name].status != runner.SKIPPED
    ]
    return "\n".join(["## What ran", "", stats.markdown(("what", "", "command"), rows), ""])


def _status(day: Day, stage: Stage) -> str:
    outcome = day.outcomes[stage.name]
    return runner.said(outcome) + (" (kept)" if outcome.kept else "")


def _not_run(day: Day) -> str:
    rows = [
        (stage.title, day.outcomes[stage.name].why, f"`{stage.line}`")
        for stage in day.stages
        if day.outcomes[stage.name].status == runner.SKIPPED
    ]
    if not rows:
        return ""
    return "\n".join(["## Not run", "", stats.markdown(("what", "why", "command"), rows), ""])


def _tests(day: Day, stage: Stage) -> str:
    found = (day.content(stage) or {}).get("results")
    lines = []
    if found and day.outcomes[stage.name].status != runner.SKIPPED:
        lines.append(f"{found['passed']} passed, {len(found['failed'])} failed.")
        lines += [f"- failed: `{name}`" for name in found["failed"]]
        lines += [f"- {count} skipped: {why}" for why, count in found["skipped"].items()]
    return _section(day, stage, lines)


def _measured(day: Day, stage: Stage) -> str:
    """What the benchmark printed: its tables, ratios, and variants that failed."""
    lines: list[str] = []
    if "results" in (day.content(stage) or {}):
        lines = _quoted(runner.printed(day.file(stage).with_suffix(".log")))
    return _section(day, stage, lines)


def _quoted(text: str) -> list[str]:
    return ["```", text.replace("```", "'''"), "```", ""]


def _section(day: Day, stage: Stage, lines: list[str]) -> str:
    outcome = day.outcomes[stage.name]
    if outcome.status in (runner.SKIPPED, runner.WAITING):
        return ""
    head = [f"## {stage.title}", "", f"`{stage.line}`", ""]
    if outcome.status != runner.DONE:
        head += [f"**{runner.said(outcome)}.** Its last lines:", "", *_quoted(outcome.tail)]
    return "\n".join([*head, *lines, ""])

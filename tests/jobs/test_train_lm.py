"""``python -m fsdp2.examples.train_lm`` as people start it, and as they end it: as a process."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp2 import checkpoint
from fsdp2.examples.model import PRESETS
from fsdp2.planning.presets import Model
from tests.common import jobs
from tests.common.cases import in_turn
from tests.common.combinations import seldom

pytestmark = pytest.mark.ranks

STEPS = 40
RUN = ("--preset", "tiny", "--device", "cpu", "--seed", "1", "--steps", str(STEPS))
TRAIN_LM = jobs.TRAIN_LM

Losses = dict[int, str]


def torchrun(ranks: int) -> tuple[str, ...]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*launcher, "--nproc-per-node", str(ranks), *TRAIN_LM[1:])


def losses_of(out: str) -> Losses:
    """Step -> the loss as printed, with 4 decimals."""
    return dict(jobs.losses_of(out))


def train(*argv: str, command: tuple[str, ...] = TRAIN_LM) -> str:
    code, out, err = jobs.Run(*command, *RUN, *argv).finish()
    assert code == 0, err
    return out


def assert_same_losses(got: Losses, expected: Losses) -> None:
    """To 4 decimals: losses that differ by 1e-8 may still be rounded to different last digits."""
    assert got.keys() == expected.keys()
    for step, loss in got.items():
        assert float(loss) == pytest.approx(float(expected[step]), abs=1.01e-4), f"step {step}"


@pytest.fixture(scope="module")
def two_ranks() -> str:
    """What a run on two ranks prints: the yardstick for every other way to do the same."""
    return train("--nproc", "2")


def started(*argv: str, step: int) -> jobs.Run:
    """A run that has come to a step."""
    job = jobs.Run(*TRAIN_LM, *RUN, *argv)
    job.wait_for(f"step +{step}/")
    return job


# --- the same losses however the work is cut up --------------------------------------------------


def test_it_learns_and_reports(two_ranks: str) -> None:
    assert list(losses_of(two_ranks)) == list(range(1, STEPS + 1))
    for group in ("(root)", "blocks.0 … blocks.1, 2 alike"):
        assert re.search(rf"^{re.escape(group)} +\d", two_ranks, re.M)
    held_out = [
        float(re.search(rf"held-out loss, {which} +([\d.]+) nats", two_ranks)[1])  # type: ignore[index]
        for which in ("first", "final")
    ]
    assert held_out[0] == pytest.approx(5.545, abs=0.1)
    assert held_out[1] < held_out[0] - 1.0
    assert "(50.0%)" in two_ranks


@pytest.mark.extended
def test_other_ways_print_the_losses_of_two_ranks(two_ranks: str) -> None:
    ways = {
        "one rank": ("--nproc", "1"),
        "micro-batches": ("--nproc", "2", "--grad-accum", "2", "--activation-checkpointing"),
        "offloaded shards": ("--nproc", "2", *OFFLOAD),
    }
    expected = losses_of(two_ranks)
    in_turn(ways, lambda argv: assert_same_losses(losses_of(train(*argv)), expected))


@pytest.mark.exhaustive
def test_four_ranks_under_torchrun(two_ranks: str) -> None:
    out = train(command=torchrun(4))
    assert "4 rank(s)" in out
    assert_same_losses(losses_of(out), losses_of(two_ranks))


@pytest.mark.exhaustive
def test_bf16_stays_close(two_ranks: str) -> None:
    out = train("--precision", "bf16", "--reshard-after-forward", "always")
    expected = losses_of(two_ranks)
    for step, loss in losses_of(out).items():
        assert float(loss) == pytest.approx(float(expected[step]), abs=0.05)


@pytest.mark.extended
def test_muon_learns_and_prints_the_losses_of_one_rank() -> None:
    muon = ("--optimizer", "muon")
    losses = losses_of(train("--nproc", "2", *muon))
    assert_same_losses(losses, losses_of(train("--nproc", "1", *muon)))
    assert float(losses[STEPS]) < float(losses[1]) - 1.0


# --- every kind of parallelism trains as one rank does -------------------------------------------

FEW = 10
REPLICATE = ("--nproc", "4", "--replicate", "2")
TP = ("--nproc", "4", "--tp", "2")
ALL = ("--nproc", "8", "--replicate", "2", "--tp", "2")
LORA = ("--lora", "8")
OFFLOAD = ("--cpu-offload",)


def first(losses: Losses, steps: int) -> Losses:
    return {step: loss for step, loss in losses.items() if step <= steps}


@pytest.fixture(scope="module")
def adapters_on_one_rank() -> Losses:
    return losses_of(train("--nproc", "1", *LORA))


@pytest.mark.parametrize("layout", [REPLICATE, TP], ids=" ".join)
@pytest.mark.exhaustive
def test_a_mesh_of_ranks_prints_the_losses_of_two(two_ranks: str, layout: tuple[str, ...]) -> None:
    out = train(*layout, "--grad-accum", "2", "--steps", str(FEW))
    assert "rank(s) (replicate " in out
    assert_same_losses(losses_of(out), first(losses_of(two_ranks), FEW))


@pytest.mark.exhaustive
def test_adapters_learn_and_print_the_losses_of_one_rank(adapters_on_one_rank: Losses) -> None:
    out = train("--nproc", "2", *LORA)
    assert_same_losses(losses_of(out), adapters_on_one_rank)
    assert float(adapters_on_one_rank[STEPS]) < float(adapters_on_one_rank[1]) - 1.0
    assert re.search(r"parameters \([\d,]+ trained\)", out)


@pytest.mark.parametrize(
    ("layout", "more"),
    seldom(
        [
            (TP, OFFLOAD),
            (ALL, ("--grad-accum", "2")),
            *((ALL, more) for more in ((), OFFLOAD, LORA)),
            (REPLICATE, LORA),
        ],
        extended=1,
    ),
    ids=" ".join,
)
def test_combinations(
    two_ranks: str,
    adapters_on_one_rank: Losses,
    layout: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    out = train(*layout, *more, "--steps", "20")
    expected = adapters_on_one_rank if more == LORA else losses_of(two_ranks)
    assert_same_losses(losses_of(out), first(expected, 20))


@pytest.mark.parametrize(
    ("before", "after", "more"),
    seldom(
        [
            (TP, ("--nproc", "1"), OFFLOAD),
            (REPLICATE, TP, LORA),
            (("--nproc", "2"), REPLICATE, ("--grad-accum", "2")),
            (ALL, TP, OFFLOAD),
        ],
        extended=1,
    ),
    ids=" ".join,
)
def test_resumed_on_another_mesh(
    two_ranks: str,
    adapters_on_one_rank: Losses,
    tmp_path: Path,
    before: tuple[str, ...],
    after: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    saving = ("--checkpoint", str(tmp_path), *more)
    train(*before, *saving, "--steps", "6")
    out = train(*after, *saving, "--steps", "12", "--resume")
    expected = adapters_on_one_rank if more == LORA else losses_of(two_ranks)
    assert_same_losses(losses_of(out), {step: expected[step] for step in range(7, 13)})


# --- interrupted ---------------------------------------------------------------------------------


@pytest.mark.extended
def test_exported_weights_are_those_of_the_last_checkpoint(tmp_path: Path) -> None:
    """In the files that Hugging Face's libraries read."""
    run, out = tmp_path / "run", tmp_path / "out"
    end = ("--steps", "2", "--checkpoint", str(run), "--export", str(out))
    assert f"exported to {out}: 1 file(s)" in train("--nproc", "2", *end)
    model = Model(PRESETS["tiny"])
    checkpoint.load_pretrained(model, out)
    saved = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load({"model": saved}, checkpoint_id=run / "step-00000002")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.extended
def test_killed_and_resumed_it_goes_on_as_if_nothing_had_happened(
    two_ranks: str, tmp_path: Path
) -> None:
    saving = ("--checkpoint", str(tmp_path), "--checkpoint-every", "5")
    job = started("--nproc", "2", *saving, step=13)
    job.kill()
    expected, before = losses_of(two_ranks), losses_of(job.out())
    assert before == {step: expected[step] for step in before}
    saved_at = checkpoint.steps(tmp_path)[-1]
    assert saved_at >= 10

    # As if the kill had come in the middle of a save: neither resumed from nor in the way.
    half_written = tmp_path / ".saving-step-00000015"
    half_written.mkdir(exist_ok=True)
    (half_written / "__0_0.distcp").write_bytes(b"half")
    out = train("--nproc", "2", *saving, "--resume")
    assert f"resumed from {tmp_path} at step {saved_at};" in out
    assert losses_of(out) == {s: loss for s, loss in expected.items() if s > saved_at}
    summary = re.compile(r"held-out loss, \w+ +[\d.]+ nats")
    assert summary.findall(out) == summary.findall(two_ranks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000035", "step-00000040"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("whom", "number", "code", "says"),
    [
        ("command", signal.SIGTERM, 128 + signal.SIGTERM, ""),
        ("command", signal.SIGINT, 128 + signal.SIGINT, ""),
        ("command", signal.SIGKILL, -signal.SIGKILL, ""),
        ("rank", signal.SIGKILL, 1, "Signal 9 (SIGKILL) received"),
    ],
)
def test_a_signal_leaves_no_process(whom: str, number: int, code: int, says: str) -> None:
    job = started("--steps", "100000", step=20)
    os.kill(job.ranks()[1] if whom == "rank" else job.process.pid, number)
    found, _, err = job.finish()  # fails where a process is left behind
    assert found == code, err
    assert says in err


def test_a_failing_worker_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "import os, sys, time\n"
        "from fsdp2.examples import flags, launch\n"
        "def prepare(argv, ranks):\n"
        "    return flags.parsed(flags.Common, 'failing', '', argv, ranks)\n"
        "def work(options):\n"
        "    if options.rank == 1:\n"
        "        raise RuntimeError('rank 1 cannot go on')\n"
        "    time.sleep(600)\n"
        "sys.exit(launch.main('failing', None, prepare, work))\n"
    )
    job = jobs.Run(sys.executable, "-m", "failing", PYTHONPATH=f"{jobs.ROOT}:{tmp_path}")
    code, _, err = job.finish()
    assert code == 1
    assert "RuntimeError: rank 1 cannot go on" in err


# --- wrong usage ---------------------------------------------------------------------------------


@pytest.mark.extended
def test_wrong_usage() -> None:
    """In a process of its own, and under torchrun."""
    code, out, err = jobs.Run(*TRAIN_LM, "--nproc", "3").finish()
    assert (code, out) == (2, "")
    assert re.fullmatch(r"train_lm: .* do not divide evenly over 3 ranks\.\n", err)
    code, _, err = jobs.Run(*torchrun(2), "--batch-size", "5").finish()
    assert code != 0
    assert err.count("train_lm: 5 sequences in a micro-batch") == 1
    assert "exitcode  : 2" in err

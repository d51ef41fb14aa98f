"""Runs a client's script twice on two gloo ranks: with torch's own FSDP2, and through `fsdp2.run`.

    run("with_accelerate.py", "plain")
        python               scripts/with_accelerate.py plain   on ranks 0, 1   ──> Seen of torch
        python -m fsdp2.run  scripts/with_accelerate.py plain   on ranks 0, 1   ──> Seen of ours

    check_started("with_launchers.py", "spawn")      one process each, which starts the ranks itself

    check_ours("over_flat_shards.py", "torchao")     a script that imports fsdp2, and asserts

A script knows nothing of fsdp2. It prints, through `scripts/common.py`, the losses of each case on
rank 0, and on each rank the modules of the classes that its sharded model is made of.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 300.0  # seconds for one run of one script
RANK_VARIABLES = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
]


@dataclass
class Seen:
    """What a script reported.

    Attributes:
        losses: by case, in order, each as ``float.hex()`` wrote it.
        classes: by case and rank, the module of each class in the model's order of classes.
    """

    losses: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, dict[int, list[str]]] = field(default_factory=lambda: defaultdict(dict))


def run(script: str, *arguments: str, ranks: int = 2) -> tuple[Seen, Seen]:
    """(torch's, ours)."""
    path = str(SCRIPTS / script)
    return _launch([path, *arguments], ranks), _launch(["-m", "fsdp2.run", path, *arguments], ranks)


def check(script: str, *arguments: str, ranks: int = 2, rtol: float = 0.0) -> None:
    """Asserts that both runs see the same losses, to the bit, and each its own implementation.

    Args:
        script: of `scripts/`.
        arguments: its cases.
        ranks: that run it.
        rtol: how far losses may be apart, relative to torch's, where rounding differs.
    """
    _compare(*run(script, *arguments, ranks=ranks), arguments, ranks, rtol)


def check_started(script: str, case: str, ranks: int = 2) -> None:
    """As `check`, of a script that is started once and starts its ranks itself."""
    path = str(SCRIPTS / script)
    torchs = _launch([path, case], ranks, by_itself=True)
    ours = _launch(["-m", "fsdp2.run", path, case], ranks, by_itself=True)
    _compare(torchs, ours, (case,), ranks)


def check_ours(script: str, case: str, ranks: int = 2) -> None:
    """Runs a script that imports fsdp2; asserts that it comes to its end on all ranks."""
    _launch([str(SCRIPTS / script), case], ranks)


def _compare(torchs: Seen, ours: Seen, cases: Sequence[str], ranks: int, rtol: float = 0.0) -> None:
    for case in cases:
        assert torchs.losses[case], f"{case}: no loss was reported"
        seen, known = (list(map(float.fromhex, each.losses[case])) for each in (ours, torchs))
        assert seen == (pytest.approx(known, rel=rtol, abs=0.0) if rtol else known), case
        assert set(ours.classes[case]) == set(torchs.classes[case]) == set(range(ranks)), case
        for rank in range(ranks):
            assert "torch.distributed.fsdp" in torchs.classes[case][rank], case
            assert "fsdp2.sharding.module" in ours.classes[case][rank], (
                f"{case}: rank {rank} runs torch's"
            )
            assert "fsdp2.sharding.module" not in torchs.classes[case][rank], case


def _launch(command: list[str], ranks: int, by_itself: bool = False) -> Seen:
    port = _free_port()
    started = 1 if by_itself else ranks
    with tempfile.TemporaryDirectory(prefix="clients-") as scratch:
        processes = []
        try:
            for rank in range(started):
                environment = _environment(rank, ranks, port, scratch)
                if by_itself:
                    for name in RANK_VARIABLES:
                        del environment[name]
                with open(Path(scratch, f"rank{rank}"), "wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *command],
                            cwd=scratch,
                            env=environment,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            timed_out = _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        outputs = [Path(scratch, f"rank{rank}").read_text("utf-8") for rank in range(started)]
    # No exit code is asked for: gloo and a DeviceMesh may abort an interpreter that has finished.
    ended = sum(output.splitlines().count("finished") for output in outputs) == ranks
    how = ", out of time" if timed_out else ""
    assert ended, "\n".join(
        f"---- rank {rank}{how}\n{output[-6000:]}" for rank, output in enumerate(outputs)
    )
    return _parse("\n".join(outputs))


def _wait(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Waits for all; returns whether one was out of time."""
    try:
        for process in processes:
            process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        return True
    return False


def _environment(rank: int, ranks: int, port: int, scratch: str) -> dict[str, str]:
    """What torchrun would set, and what keeps clients on this machine and quiet."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "clients",
        "GLOO_SOCKET_IFNAME": "lo" if "lo" in dict(map(reversed, socket.if_nameindex())) else "lo0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": scratch,
        "SCRATCH": scratch,
        "CUDA_VISIBLE_DEVICES": "",
    }


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def _parse(output: str) -> Seen:
    seen = Seen()
    for line in output.splitlines():
        match line.split():
            case ["loss", name, value]:
                seen.losses[name].append(value)
            case ["classes", name, rank, *modules]:
                seen.classes[name][int(rank)] = modules
    return seen

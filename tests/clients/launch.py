"""Runs a client's script twice on two gloo ranks: with torch's own FSDP2, and through `fsdp2.run`.

    check("with_accelerate.py", "plain")
        python               scripts/with_accelerate.py plain   on ranks 0, 1   ──> Seen of torch
        python -m fsdp2.run  scripts/with_accelerate.py plain   on ranks 0, 1   ──> Seen of ours

    check("with_launchers.py", "spawn", alone=True)   one process each, which starts the ranks

    finished("with_optimizers.py", "flat_torchao")    through `fsdp2.run` alone: the script asserts

A script knows nothing of fsdp2. It prints, through `scripts/common.py`, the losses of each case on
rank 0, and on each rank whose the classes are that its sharded model is made of.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.common import jobs

SCRIPTS = Path(__file__).parent / "scripts"


class Seen(NamedTuple):
    """What a script reported: losses by case, and by case and rank whose its classes are."""

    losses: dict[str, list[float]]
    classes: dict[str, dict[int, str]]


def check(script: str, *cases: str, ranks: int = 2, alone: bool = False, rtol: float = 0.0) -> None:
    """Asserts that both runs see the same losses, to the bit, and each its own implementation.

    Args:
        script: of `scripts/`.
        cases: its arguments.
        ranks: that run it.
        alone: it is started once, and starts its ranks itself.
        rtol: how far losses may be apart, relative to torch's, where rounding differs.
    """
    torchs = _launched((str(SCRIPTS / script), *cases), ranks, alone)
    ours = finished(script, *cases, ranks=ranks, alone=alone)
    for case in cases:
        seen, known = ours.losses[case], torchs.losses[case]
        assert known, f"{case}: no loss was reported"
        assert seen == (pytest.approx(known, rel=rtol, abs=0.0) if rtol else known), case
        for found, owner in ((torchs, "torch"), (ours, "fsdp2")):
            assert found.classes[case] == dict.fromkeys(range(ranks), owner), case


def finished(script: str, *cases: str, ranks: int = 2, alone: bool = False) -> Seen:
    """Runs a script through `fsdp2.run`; asserts that it comes to its end on all ranks."""
    return _launched(("-m", "fsdp2.run", str(SCRIPTS / script), *cases), ranks, alone)


def output_of(*arguments: str, folder: Path = jobs.ROOT, **environment: str) -> str:
    """What Python prints with these arguments in a folder; asserts that it ends without error."""
    given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    code, out, err = jobs.Run(
        "env", "-C", str(folder), sys.executable, *arguments, **given
    ).finish()
    assert code == 0, out[-6000:] + err[-6000:]
    return out


def _launched(command: tuple[str, ...], ranks: int, alone: bool) -> Seen:
    port = str(jobs.free_port())
    with tempfile.TemporaryDirectory(prefix="clients-") as scratch:
        runs = []
        try:
            for rank in [None] if alone else range(ranks):
                environment = _environment(port, scratch) | _rank_variables(rank, ranks)
                start = ("env", "-C", scratch, sys.executable, *command)
                runs.append(jobs.Run(*start, **environment))
            # No exit code is asked for: gloo and a DeviceMesh may abort an interpreter that has
            # finished.
            said = [run.finish()[1:] for run in runs]
        finally:
            for run in runs:
                run.kill()
    lines = [line for out, _ in said for line in out.splitlines()]
    assert lines.count("finished") == ranks, "\n".join(
        f"---- rank {rank}\n{out[-6000:]}\n{err[-6000:]}" for rank, (out, err) in enumerate(said)
    )
    seen = Seen(defaultdict(list), defaultdict(dict))
    for line in lines:
        match line.split():
            case ["loss", name, value]:
                seen.losses[name].append(float.fromhex(value))
            case ["classes", name, number, owner]:
                seen.classes[name][int(number)] = owner
    return seen


def _rank_variables(rank: int | None, ranks: int) -> dict[str, str]:
    """What torchrun would set."""
    if rank is None:
        return {}
    own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    counts = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in {**own, **counts}.items()} | {
        "TORCHELASTIC_RUN_ID": "clients"
    }


def _environment(port: str, scratch: str) -> dict[str, str]:
    """Keeps clients on this machine and quiet."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo" if "lo" in dict(map(reversed, socket.if_nameindex())) else "lo0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": scratch,
        "SCRATCH": scratch,
        "CUDA_VISIBLE_DEVICES": "",
    }

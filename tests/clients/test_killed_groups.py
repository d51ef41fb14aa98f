"""torchft's groups on `fsdp2.elastic`: ranks are killed, groups heal, and have the same bits."""

from __future__ import annotations

import inspect
import re

import pytest

from fsdp2 import elastic
from tests.clients.launch import SCRIPTS, output_of
from tests.common import jobs

pytestmark = pytest.mark.clients


def _kill(kind: str, quorum: str, groups: int, kills: int, seed: int) -> int:
    """How many steps all groups had together, behind a run whose hashes are alike."""
    pytest.importorskip("torchft")
    arguments = [kind, quorum, *map(str, (groups, kills, seed))]
    out = output_of(str(SCRIPTS / "groups_with_kills.py"), *arguments)
    found = re.search(rf"^{kills} kills in \d+ steps, (\d+) of them", out, re.MULTILINE)
    assert found, out[-6000:]
    assert "by itself" not in out
    return int(found[1])


@pytest.mark.parametrize(
    ("kind", "quorum"), [("adamw", "async"), ("adamw", "sync"), ("flat", "sync"), ("muon", "async")]
)
def test_a_group_is_killed_and_back(kind: str, quorum: str) -> None:
    assert _kill(kind, quorum, groups=2, kills=2, seed=0) >= 12


@pytest.mark.extended
@pytest.mark.parametrize("seed", [7, 8])
def test_a_hundred_kills(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups, of which two must take part in a step."""
    monkeypatch.setattr(jobs, "TIMEOUT_SECONDS", 3000)
    assert _kill("adamw", "async", groups=3, kills=100, seed=seed) >= 12


def test_the_transport_is_one_of_torchfts() -> None:
    checkpointing = pytest.importorskip("torchft.checkpointing")
    theirs = checkpointing.CheckpointTransport
    for name in ("metadata", "send_checkpoint", "disallow_checkpoint", "recv_checkpoint"):
        own = inspect.signature(getattr(elastic.ShardTransport, name))
        assert list(own.parameters) == list(inspect.signature(getattr(theirs, name)).parameters)
    assert list(inspect.signature(elastic.ShardTransport.shutdown).parameters) == ["self", "wait"]

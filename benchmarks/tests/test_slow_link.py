"""benchmarks/slow_link.py: links that are slow, made and removed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import namespaces, slow_link

_SEND = """
import socket, sys, time
role, nbytes = sys.argv[1], 2_000_000
if role == "take":
    server = socket.create_server(("10.77.0.1", 5555))
    print("ready", flush=True)
    taker, _ = server.accept()
    taken = 0
    while taken < nbytes:
        taken += len(taker.recv(1 << 16))
    taker.sendall(b"!")
else:
    giver = socket.create_connection(("10.77.0.1", 5555))
    giver.sendall(bytes(nbytes))
    assert giver.recv(1) == b"!"
"""


def known() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def dropped_or_delayed(node: str) -> int:
    """Packets that the limit of a node's link has held back."""
    command = ["tc", "-n", node, "-s", "qdisc", "show", "dev", namespaces.INTERFACE]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(text.split("overlimits ")[1].split()[0])


@pytest.mark.extended
@pytest.mark.skipif(namespaces.missing() is not None, reason=f"{namespaces.missing()}")
def test_nodes_reach_each_other_and_links_are_limited() -> None:
    before = known()
    with namespaces.network(2, 50.0) as made:
        first, second = map(namespaces.inside, made.nodes)
        python = [sys.executable, "-c", _SEND]
        take = subprocess.Popen([*first, *python, "take"], stdout=subprocess.PIPE)
        assert take.stdout is not None
        assert take.stdout.readline() == b"ready\n"
        subprocess.run([*second, *python, "give"], check=True, timeout=60)
        assert take.wait(timeout=60) == 0
        take.stdout.close()
        assert dropped_or_delayed(made.nodes[1]) > 0
        sent = subprocess.run(
            [*second, "cat", str(slow_link.SENT)], capture_output=True, check=True
        )
        assert int(sent.stdout) > 2_000_000
    assert known() == before


@pytest.mark.extended
@pytest.mark.skipif(namespaces.missing() is not None, reason=f"{namespaces.missing()}")
def test_fewer_bytes_are_sent() -> None:
    given = ["--preset", "tiny", "--rounds", "1", "--steps", "1", "--mbit", "1000", "--variants"]
    options = slow_link.parse([*given, "fsdp2,8 bit"])
    result = slow_link.measure(options)
    sent = {variant: values["sent"][0] for variant, values in result["rounds"].items()}
    assert sent["8 bit"] < sent["fsdp2"]


def test_a_machine_that_may_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="need Linux and root"):
        slow_link.main([])


def test_ratios_say_how_many_times_as_fast() -> None:
    rounds = {
        "torch": {"step": [4.0, 8.0], "sent": [2.0, 2.0], "loss": [1.0, 1.0]},
        "8 bit": {"step": [1.0, 4.0], "sent": [1.0, 1.0], "loss": [1.0, 1.0]},
    }
    (found,) = slow_link.ratios(rounds).values()
    assert (found.min, found.median, found.max) == (2.0, 3.0, 4.0)
    assert slow_link.ratios({"8 bit": rounds["8 bit"]}) == {}

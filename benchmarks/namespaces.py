"""Nodes that are network namespaces of this machine, joined by a bridge in another one.

    node 0  10.77.0.1 -- link --+
                                +-- bridge
    node 1  10.77.0.2 -- link --+

It needs Linux, root, `ip` and `tc` (iproute2), makes the namespaces itself, and removes them at its
end. The machine's own network stays as it is. Files are those of the machine on all nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

INTERFACE = "fsdp2"  # of each node, in its namespace


@dataclass(frozen=True)
class Network:
    """Nodes by their numbers.

    Attributes:
        nodes: names of their namespaces.
        switch: name of the namespace that has the bridge.
    """

    nodes: tuple[str, ...]
    switch: str

    def set_link(self, number: int, state: str) -> None:
        """Take a node's link "down", so that what is sent is lost, or "up" again."""
        _run("ip", "-n", self.switch, "link", "set", f"port{number}", state)


def missing() -> str | None:
    """Why this machine cannot have such a network; ``None`` where it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces of a network need Linux and root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} (iproute2) cannot be found"
    name = f"fsdp2-{os.getpid()}-try"
    add = ["ip", "netns", "add", name]
    tried = subprocess.run(add, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"a network namespace cannot be made: {tried.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


def address(number: int) -> str:
    """The address of a node."""
    return f"10.77.0.{number + 1}"


def inside(node: str) -> list[str]:
    """The start of a command that runs in a node."""
    return ["ip", "netns", "exec", node]


@contextmanager
def network(nodes: int, mbit: float | None = None) -> Iterator[Network]:
    """Nodes whose links send ``mbit`` megabits per second, or as fast as they can."""
    with ExitStack() as stack:

        def namespace(name: str) -> str:
            full = f"fsdp2-{os.getpid()}-{name}"
            _run("ip", "netns", "add", full)
            stack.callback(_remove, full)
            _run("ip", "-n", full, "link", "set", "lo", "up")
            return full

        switch = namespace("switch")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        names = []
        for number in range(nodes):
            node, port = namespace(str(number)), f"port{number}"
            _run("ip", "-n", node, "link", "add", INTERFACE, "type", "veth", "peer", "name", port)
            _run("ip", "-n", node, "link", "set", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", node, "addr", "add", f"{address(number)}/24", "dev", INTERFACE)
            _run("ip", "-n", node, "link", "set", INTERFACE, "up")
            for where, link in ((node, INTERFACE), (switch, port)) if mbit else ():
                limit = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
                _run("tc", "-n", where, "qdisc", "add", "dev", link, "root", "tbf", *limit)
            names.append(node)
        yield Network(tuple(names), switch)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _remove(name: str) -> None:
    with suppress(subprocess.SubprocessError):
        _run("ip", "netns", "del", name)

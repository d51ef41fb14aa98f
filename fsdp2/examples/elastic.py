"""``train_lm --elastic N``: N replica groups on this machine, of ``--nproc`` ranks each.

    train_lm --elastic 3 ── lighthouse, store
      ├── group 0: train_lm ── rank 0, rank 1     a rank that dies takes its group with it, which is
      ├── group 1: train_lm ── rank 0, rank 1     started again, heals from another one and joins
      └── group 2: train_lm ── rank 0, rank 1

Each group trains on a batch of its own, and `fsdp2.elastic` averages between them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fsdp2 import elastic

from .options import Options
from .reporting import say

GROUP = "FSDP2_EXAMPLE_GROUP"
"""The number of this process's replica group."""

STORE = "FSDP2_EXAMPLE_GROUPS_STORE"
"""The port of the store that groups share, on `HOST`."""

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
HOST = "127.0.0.1"
HEARTBEAT = 2000  # ms without a sign of life, after which a group is counted out
LATE = 60_000  # ms that groups wait for one that is alive, and late: longer than TIMEOUT
TIMEOUT = timedelta(seconds=30)  # of collectives between groups, and of their votes
START = timedelta(minutes=5)  # until all groups are there

Backward = Callable[[int, int], Tensor]
"""Brings the gradients of a step, with the batch of a number; the mean loss of this group."""


def group() -> int | None:
    """The number of this process's replica group; ``None`` for who starts the groups."""
    return int(os.environ[GROUP]) if GROUP in os.environ else None


# --- who starts the groups ------------------------------------------------------------------------


def run(module: str, argv: Sequence[str], count: int) -> int:
    """Run ``python -m module *argv`` for each of `count` groups; 0 if all end with equal weights.

    Each is a torchrun of its own, which starts a group that fails again. A lighthouse that
    ``TORCHFT_LIGHTHOUSE`` names is used.
    """
    os.environ.setdefault("RUST_LOG", "error")  # else torchft tells of each step
    from torchft.coordination import LighthouseServer

    lighthouse, address = None, os.environ.get(LIGHTHOUSE)
    if address is None:
        lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=LATE, heartbeat_timeout_ms=HEARTBEAT
        )
        address = lighthouse.address()
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    common = {**os.environ, STORE: str(store.port), LIGHTHOUSE: address}
    command = [sys.executable, "-m", module, *argv]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    groups: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            groups.append(subprocess.Popen(command, env={**common, GROUP: str(number)}))
        code = max(abs(group.wait()) for group in groups)
    finally:
        for group in groups:
            group.terminate()
        for group in groups:
            group.wait()
        if lighthouse is not None:
            lighthouse.shutdown()
    ended = [store.get(_weights(n)) for n in range(count) if store.check([_weights(n)])]
    alike = len({*ended}) == 1
    what = "the same weights" if alike else "DIFFERENT WEIGHTS"
    print(f"{len(ended)} of {count} groups end with {what}", flush=True)
    return code or (0 if alike else 1)


def _weights(number: int) -> str:
    """The key under which a group that has finished leaves the checksum of its weights."""
    return f"weights of group {number}"


# --- a rank of a group ----------------------------------------------------------------------------


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    backward: Backward,
    held_out: Callable[[], float],
) -> None:
    """Train with the other groups, until all have committed the last step."""
    number = group()
    assert number is not None
    assert options.elastic is not None
    says = f"group {number}:"
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        say(f"train_lm: group {number} is started again")
    groups = TCPStore(HOST, int(os.environ[STORE]), is_master=False)
    manager, shutdown = make_manager(model, optimizer, options, number)
    groups.set(f"group {number} is there", "")
    groups.wait([f"group {n} is there" for n in range(options.elastic)], START)
    finishes = _loop(model, optimizer, options, manager, backward, groups, says)
    shutdown()
    if not finishes:
        return
    loss, checksum = held_out(), _checksum(model)
    say(f"{says} step {manager.current_step()}, held-out loss {loss:.4f}, weights {checksum}")
    if options.rank == 0:
        groups.set(_weights(number), checksum)


def make_manager(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, number: int
) -> tuple[elastic.Manager, Callable[[], None]]:
    """torchft's manager of this rank, and what ends it."""
    import torchft

    logging.getLogger("torchft").setLevel(logging.CRITICAL)  # a lost peer is no error here
    kind = torchft.ProcessGroupNCCL if "nccl" in options.backend else torchft.ProcessGroupGloo
    transport = elastic.ShardTransport(model, optimizer, host=HOST)
    manager = torchft.Manager(
        pg=kind(timeout=TIMEOUT),
        min_replica_size=1,
        use_async_quorum=False,  # a group has what it is sent before its forward
        init_sync=False,  # all groups begin with the same weights, of --seed
        timeout=TIMEOUT,
        checkpoint_transport=transport,
        state_dict=transport.state_dict,
        load_state_dict=transport.load_state_dict,
        replica_id=f"group_{number}",
        rank=options.rank,
        world_size=options.world_size,
        hostname=HOST,
    )
    return manager, lambda: manager.shutdown(wait=False)


def _loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    manager: elastic.Manager,
    backward: Backward,
    groups: TCPStore,
    says: str,
) -> bool:
    """Whether this group has committed the last step."""
    assert options.elastic is not None
    every = 1 if options.steps <= 50 else 10
    steps = elastic.attach(model, manager, optimizer)
    committed = taking_part = 0
    while manager.current_step() < options.steps:
        steps.begin()
        step, count = manager.current_step(), manager.num_participants()
        leads = manager.participating_rank() == 0
        if step != committed:
            say(f"{says} has healed, and goes on behind step {step}")
        if count == 1 and any(groups.check([_weights(n)]) for n in range(options.elastic)):
            return False  # too late: the others have finished, and nobody heals this one
        if count != taking_part and leads:
            say(f"step {step + 1}: {count} of {options.elastic} groups take part")
        committed, taking_part = step, count
        loss = backward(step, elastic.batch_number(manager))
        is_told = (step + 1) % every == 0 or step + 1 == options.steps
        if is_told:
            manager.allreduce(loss).wait()
        if steps.commit():
            committed += 1
            if is_told and leads:
                say(f"step {step + 1}: loss {loss.item():.4f}")
        else:
            say(f"{says} step {step + 1} is dropped, and tried again: {_why(manager)}")
    return True


def _why(manager: elastic.Manager) -> str:
    """The first sentence of what went wrong on this rank, without gloo's place in its source."""
    what = str(manager.errored() or "another rank has voted no").partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", what).partition(". ")[0]


def _checksum(model: nn.Module) -> str:
    """A checksum of the bits of all ranks' shards; the same on all ranks."""
    own = hashlib.sha256()
    for param in model.parameters():
        shard = getattr(param, "_local_tensor", param).detach().cpu().contiguous()
        own.update(shard.view(torch.uint8).numpy().tobytes() if shard.numel() else b"")
    digest = torch.tensor(list(own.digest()), dtype=torch.uint8)
    parts = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, digest)
    return hashlib.sha256(bytes(torch.cat(parts).tolist())).hexdigest()[:16]

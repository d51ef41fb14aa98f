"""Replica groups of two ranks that are killed at random, and restarted, until so many were.

    python groups_with_kills.py KIND QUORUM GROUPS KILLS SEED        for example: adamw async 2 3 0

Each life of a group begins with weights of its own, and heals. Behind every commit each rank writes
down a hash of all that it trains: parameters, optimizer states, averages, learning rates. In the
end, the hashes of a step are compared over the groups that committed it, and its batches counted.
A rank is killed at any time, while its group starts and heals, too, but only where another group is
healthy: without one, nobody has the weights. More than half of the groups must take part in a step:
else two parts of them could train apart, each with a quorum of its own.
"""

import collections
import dataclasses
import datetime
import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from groups import HOST, RANKS, join, manage, sharded, store
from torchft.coordination import LighthouseServer

import fsdp2
from fsdp2 import elastic

TIMEOUT = 10.0  # seconds between groups
LONGER = datetime.timedelta(seconds=60)  # inside of a group, where a rank may wait for other groups
LIMIT = 120.0  # seconds in which something must happen
AFTER = 12  # steps of all groups together behind the last kill
SAVE_EVERY = 10
PAUSE = 12  # steps, at most, from one kill to the next
PRELOADED = ["torch._dynamo", "torch.distributed.tensor", "torchft", "fsdp2.elastic", "fsdp2.optim"]


# ---- a rank


def optimizer_of(kind, model):
    if kind == "flat":
        return fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.01)
    if kind == "muon":
        return fsdp2.optim.Muon(model, lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def hash_of(model, optimizer, ema):
    seen = fsdp2.checkpoint.snapshot(model, optimizer)
    found = hashlib.sha256(str([group["lr"] for group in optimizer.param_groups]).encode())
    tensors = {**seen.model, **{f"ema.{name}": value for name, value in ema.averages().items()}}
    for name, entries in seen.optimizer["state"].items():
        tensors |= {f"{name}.{key}": value for key, value in entries.items()}
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value).detach().contiguous()
            value = local.view(-1).view(torch.uint8).tolist()
        found.update(f"{name}: {value}".encode())
    return found.hexdigest()[:16]


def least(groups):
    """How many groups must take part; of two, one may be gone."""
    return 1 if groups == 2 else groups // 2 + 1


def save(folder, model, optimizer, manager):
    """One group writes, at every tenth step; what it was killed in is no step of the folder."""
    step = manager.current_step()
    if step % SAVE_EVERY == 0 and elastic.is_writer(manager, model):
        extra = {"manager": manager.state_dict()}
        run = Path(folder, "run")
        fsdp2.checkpoint.save(run, model, optimizer, step=step, extra=extra, keep=3)


def work(kind, quorum, groups, group, life, rank, port, lighthouse, folder):
    """One rank of one life of a group."""
    torch.set_num_threads(1)
    join(rank, port, timeout=LONGER)
    model = sharded(1000 * group + life, fsdp2.fully_shard)
    optimizer = optimizer_of(kind, model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    ema = fsdp2.optim.EMA(model, 0.9)
    states = {"schedule": schedule, "ema": ema}
    transport = elastic.ShardTransport(model, optimizer, states=states, host=HOST)
    manager = manage(
        *(group, port, lighthouse, transport, TIMEOUT),
        min_replica_size=least(groups),
        checkpoint_transport=transport,
        use_async_quorum=quorum == "async",
        timeout=datetime.timedelta(seconds=TIMEOUT),
        quorum_timeout=LONGER,
    )
    steps = elastic.attach(model, manager, optimizer)
    batches = elastic.Batches(1000, 2 * RANKS)
    data = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    stop = Path(folder, "stop")
    with open(Path(folder, f"{group}-{life}-{rank}"), "a", buffering=1) as out:
        while not (stop.exists() and manager.current_step() >= int(stop.read_text())):
            steps.begin()
            number = elastic.batch_number(manager)
            loss = model(data[batches[number][rank::RANKS]]).square().mean()
            loss.backward()
            counts = manager.is_participating()
            if steps.commit():
                schedule.step()
                ema.update()
                save(folder, model, optimizer, manager)
                batch = number if counts else "-"
                print(manager.current_step(), hash_of(model, optimizer, ema), batch, file=out)
    manager.shutdown(wait=False)
    os._exit(0)  # gloo and a DeviceMesh may abort an interpreter that has finished


# ---- all groups


@dataclasses.dataclass
class Group:
    number: int
    life: int = -1
    store: object = None
    processes: list = dataclasses.field(default_factory=list)


class Supervisor:
    """Starts groups, kills ranks, starts their groups again."""

    def __init__(self, kind, quorum, groups, folder):
        self.kind, self.quorum, self.folder = kind, quorum, folder
        self.lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=least(groups),
            join_timeout_ms=60_000,  # a healthy group may be held up by one that was killed
            quorum_tick_ms=20,
            heartbeat_timeout_ms=5_000,
        )
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.killed = set()
        self.has_begun = False
        self.groups = [Group(number) for number in range(groups)]
        for group in self.groups:
            self.start(group)

    def start(self, group):
        group.life += 1
        group.store = store()
        group.processes = [
            self.context.Process(
                target=work,
                args=(
                    *(self.kind, self.quorum, len(self.groups), group.number, group.life, rank),
                    *(group.store.port, self.lighthouse.address(), self.folder),
                ),
            )
            for rank in range(RANKS)
        ]
        for process in group.processes:
            process.start()

    def lines(self, group, rank=0):
        path = Path(self.folder, f"{group.number}-{group.life}-{rank}")
        if not path.exists():
            return []
        return [line.split() for line in path.read_text().splitlines(True) if line.endswith("\n")]

    def step_of(self, group):
        lines = self.lines(group)
        return int(lines[-1][0]) if lines else -1

    def wait(self, what, condition):
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end:
                steps = {group.number: self.step_of(group) for group in self.groups}
                sys.exit(f"hung: no {what} in {LIMIT} seconds; steps are {steps}")
            for group in self.groups:
                if any(process.exitcode not in (None, 0) for process in group.processes):
                    print(f"group {group.number} has ended by itself", flush=True)
                    self.restart(group)
            if self.has_begun and not any(map(self.is_healthy, self.groups)):
                sys.exit("all groups have ended by themselves, and nobody has the weights")
            time.sleep(0.02)

    def restart(self, group):
        for process in group.processes:
            process.kill()
            process.join()
        self.start(group)

    def wait_for_all(self, more):
        """Until every group has committed some steps more than the newest that there is now."""
        newest = max(map(self.step_of, self.groups)) + more
        self.wait(
            f"step {newest} of all groups",
            lambda: min(map(self.step_of, self.groups)) >= newest,
        )

    def is_healthy(self, group):
        """Whether it has committed a step since it was started, and nobody has ended."""
        self.has_begun |= self.step_of(group) > 0
        return self.step_of(group) > 0 and all(p.exitcode in (None, 0) for p in group.processes)

    def wait_to_kill(self, group, more):
        """Until others have gone on for some steps without being killed, and one is healthy."""
        others = [each for each in self.groups if each is not group]
        newest = max(map(self.step_of, others)) + more
        self.wait(
            f"step {newest} without group {group.number}",
            lambda: any(self.is_healthy(each) and self.step_of(each) >= newest for each in others),
        )

    def kill(self, group, rank):
        """As kill -9: the rest of the group notices, and ends; what does not is killed, too."""
        group.processes[rank].kill()
        end = time.monotonic() + 2
        while time.monotonic() < end and any(p.exitcode is None for p in group.processes):
            time.sleep(0.02)
        self.killed.add((group.number, group.life))
        self.restart(group)


def check(folder, groups, killed):
    """Raises where groups were apart, and returns what there was.

    The last commit of a group that was killed may be its own alone: nobody else knows of it.
    """
    hashes = collections.defaultdict(lambda: collections.defaultdict(set))
    numbers = collections.defaultdict(set)
    for path in Path(folder).glob("*-*-*"):
        group, life, rank = path.name.split("-")
        lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
        for line in lines[:-1] if (int(group), int(life)) in killed else lines:
            step, digest, number = line.split()
            hashes[int(step), rank][digest].add(group)
            if number != "-":
                numbers[int(step)].add(int(number))
    apart = {at: dict(found) for at, found in hashes.items() if len(found) > 1}
    assert not apart, f"{len(apart)} of {len(hashes)} are apart, first {min(apart.items())}"
    counted = [number for step in sorted(numbers) for number in sorted(numbers[step])]
    twice = [n for n, count in collections.Counter(counted).items() if count > 1]
    assert not twice, f"batches {twice[:5]} were trained on in two steps"
    saved = fsdp2.checkpoint.steps(Path(folder, "run"))
    assert saved
    for step in saved:
        found = fsdp2.checkpoint.read_extra(Path(folder, "run"), step)
        assert found["manager"]["step"] == step
        assert fsdp2.checkpoint.verify(Path(folder, "run"), step) == []
    shared = sum(len(set().union(*found.values())) == groups for found in hashes.values())
    return max(step for step, _ in hashes), shared // RANKS


def main(kind, quorum, groups, kills, seed):
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(kind, quorum, groups, folder)
        for number in range(kills):
            group, rank = choose.choice(supervisor.groups), choose.randrange(RANKS)
            supervisor.wait_to_kill(group, choose.randint(0, PAUSE))
            step = supervisor.step_of(group)
            print(f"kill {number}: rank {rank} of group {group.number} at {step}", flush=True)
            supervisor.kill(group, rank)
        supervisor.wait_for_all(AFTER)
        last = max(map(supervisor.step_of, supervisor.groups)) + AFTER
        Path(folder, "stop.new").write_text(str(last))
        os.rename(Path(folder, "stop.new"), Path(folder, "stop"))
        processes = [process for group in supervisor.groups for process in group.processes]
        supervisor.wait("end", lambda: all(process.exitcode == 0 for process in processes))
        steps, shared = check(folder, groups, supervisor.killed)
        print(f"{kills} kills in {steps} steps, {shared} of them by all groups: alike", flush=True)
        supervisor.lighthouse.shutdown()
        os._exit(0)


if __name__ == "__main__":
    kind, quorum, *numbers = sys.argv[1:]
    main(kind, quorum, *map(int, numbers))

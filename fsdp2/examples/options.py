"""The command line, checked as a whole before anything starts.

Every mistake becomes a `UsageError` whose message is one sentence; `train_lm.main` prints it and
leaves with exit code 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from .model import PRESETS, ModelConfig
from .wire import FORMATS

MAX_LOCAL_RANKS_PER_CPU = 16
MAX_SEED = 2**63 - 1


class UsageError(ValueError):
    """Something the person who started the run got wrong; the message is one sentence."""


@dataclass(frozen=True)
class Training:
    """The training settings of a preset, unless overridden; `lr` is the peak learning rate."""

    seq_len: int
    batch_size: int
    lr: float
    steps: int


_TRAINING: dict[str, Training] = {
    "tiny": Training(seq_len=64, batch_size=8, lr=3e-3, steps=200),
    "small": Training(seq_len=128, batch_size=16, lr=4e-3, steps=300),
    "medium": Training(seq_len=512, batch_size=16, lr=1e-3, steps=1000),
    "llama-1b": Training(seq_len=2048, batch_size=8, lr=3e-4, steps=200),
    "llama-8b": Training(seq_len=2048, batch_size=8, lr=3e-4, steps=200),
}


@dataclass(frozen=True)
class GivenRanks:
    """The ranks a launcher (torchrun, or our own `launch`) gave to this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @staticmethod
    def from_environment() -> GivenRanks | None:
        """None where no launcher set RANK and WORLD_SIZE: then we start the processes ourselves."""
        env = os.environ
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        try:
            rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
            local_rank = int(env.get("LOCAL_RANK", rank))
            local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
        except ValueError as error:
            raise UsageError("RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers") from error
        if not 0 <= rank < world_size:
            raise UsageError(f"RANK={rank} must lie between 0 and WORLD_SIZE={world_size}")
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise UsageError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: use "
                "torchrun, or unset RANK to have the ranks started for you"
            )
        return GivenRanks(rank, world_size, local_rank, local_world_size)


@dataclass(frozen=True)
class Options:
    """A run, complete: no value is left to a default later on."""

    preset: str
    data: Path | None
    world_size: int
    local_world_size: int
    steps: int
    precision: str
    seq_len: int
    batch_size: int  # sequences in one optimizer step, over all ranks
    lr: float
    grad_accum: int
    activation_checkpointing: bool
    reshard_after_forward: bool | None
    replicate: int  # groups of ranks that each hold all shards
    levels: bool  # whether these groups share the masters, and hold only what they compute with
    tp: int  # ranks that share every layer's computation
    cpu_offload: bool
    optimizer: str  # "adamw" or "muon"
    lora: int | None  # the adapters' rank; None trains the weights themselves
    wire: str  # the format that parameters and gradients are sent in
    checkpoint: Path | None
    checkpoint_every: int
    checkpoint_async: bool
    keep: int
    resume: bool
    export: Path | None  # a folder of safetensors files, made at the end
    seed: int
    device: str  # "cpu" or "cuda"
    backend: str  # "gloo", "nccl", or one for each kind of tensor: "cpu:gloo,cuda:nccl"
    threads: int
    elastic: int | None = None  # replica groups, of `world_size` ranks each
    timeout: float = 600.0  # seconds that a collective waits for a rank that is gone
    grace: float = 30.0  # seconds from a signal to the end, in which the run is saved
    preempted_exit_code: int = 143  # of a run that a signal has ended, once it is saved
    trace: Path | None = None  # where rank 0 writes a timeline of two steps
    plan: str | None = None  # the machine that a plan is printed for, in place of training

    @property
    def model(self) -> ModelConfig:
        return PRESETS[self.preset]

    @property
    def data_parallel_size(self) -> int:
        """Into how many slices a micro-batch is cut; the ranks of one --tp group share a slice."""
        return self.world_size // self.tp

    @property
    def shard_size(self) -> int:
        """Over how many ranks a parameter (or its part of a --tp rank) is sharded."""
        return self.data_parallel_size // self.replicate

    @property
    def rank_batch(self) -> int:
        """Sequences in one rank's micro-batch."""
        return self.batch_size // self.grad_accum // self.data_parallel_size


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run. Raises `UsageError`; exits only for ``--help``."""
    args = _parser().parse_args(argv)
    training = _TRAINING[args.preset]
    batch_size = args.batch_size or training.batch_size
    if batch_size % args.grad_accum:
        raise UsageError(
            f"--batch-size {batch_size} does not split into --grad-accum {args.grad_accum} "
            "micro-batches of the same size"
        )
    device = device_named(args.device)
    micro_batch = batch_size // args.grad_accum
    _check_model(args.preset, args.tp, args.lora)
    default = _default_world_size(device, micro_batch, args.replicate, args.tp)
    world_size = world_size_of(args.nproc, ranks, default)
    _check_world_size(world_size, micro_batch, args.replicate, args.tp, args.preset)
    local_world_size = ranks.local_world_size if ranks else world_size
    _check_levels_and_plan(args)
    _check_folders(args)
    _check_elastic(args, world_size)
    return Options(
        preset=args.preset,
        data=args.data,
        world_size=world_size,
        local_world_size=local_world_size,
        steps=args.steps or training.steps,
        precision=args.precision,
        seq_len=args.seq_len or training.seq_len,
        batch_size=batch_size,
        lr=args.lr or training.lr,
        grad_accum=args.grad_accum,
        activation_checkpointing=args.activation_checkpointing,
        reshard_after_forward={"auto": None, "always": True, "never": False}[
            args.reshard_after_forward
        ],
        replicate=args.replicate,
        levels=args.levels,
        tp=args.tp,
        cpu_offload=args.cpu_offload,
        optimizer=args.optimizer,
        lora=args.lora,
        wire=args.wire,
        checkpoint=args.checkpoint,
        checkpoint_every=args.checkpoint_every or 50,
        checkpoint_async=args.checkpoint_async,
        keep=args.keep or 2,
        resume=args.resume,
        export=args.export,
        seed=args.seed,
        device=device,
        backend=backend_for(device, local_world_size, args.cpu_offload),
        threads=args.threads or threads_for(local_world_size * (args.elastic or 1)),
        elastic=args.elastic,
        timeout=args.timeout,
        grace=args.grace or Options.grace,
        preempted_exit_code=args.preempted_exit_code or Options.preempted_exit_code,
        trace=args.trace,
        plan=args.plan,
    )


def _check_levels_and_plan(args: argparse.Namespace) -> None:
    if args.levels and (args.replicate < 2 or args.tp > 1 or args.plan is not None):
        raise UsageError("--levels needs --replicate R of 2 or more, and knows no --tp or --plan")
    if args.plan is not None and (args.tp > 1 or args.lora is not None):
        raise UsageError("--plan knows neither --tp nor --lora: leave them out to plan the rest")


def _check_folders(args: argparse.Namespace) -> None:
    for flag, folder in (("--checkpoint", args.checkpoint), ("--export", args.export)):
        if folder is not None and importlib.util.find_spec("numpy") is None:
            # Plans are exchanged by torch's object collectives, which convert with NumPy.
            raise UsageError(f"{flag} needs NumPy: pip install numpy")
    if args.export is not None and args.export.exists():
        raise UsageError(f"--export {args.export} is there already: name a new folder")
    if args.checkpoint is None and args.resume:
        raise UsageError("--resume needs --checkpoint DIR to say what to resume from")
    flags = ("--checkpoint-every", "--checkpoint-async", "--keep", "--grace")
    for flag in (*flags, "--preempted-exit-code"):
        if args.checkpoint is None and getattr(args, flag[2:].replace("-", "_")):
            raise UsageError(f"{flag} needs --checkpoint DIR to say where to save")


def _check_elastic(args: argparse.Namespace, world_size: int) -> None:
    if args.elastic is None:
        return
    if any(given is not None for given in (args.checkpoint, args.export, args.trace, args.plan)):
        raise UsageError("--elastic knows no --checkpoint, --export, --trace or --plan")
    world_size_of(args.elastic * world_size, None, 1)  # all groups are on this machine
    if importlib.util.find_spec("torchft") is None:
        raise UsageError("--elastic needs torchft: pip install 'fsdp2[elastic]'")


def cpu_count() -> int:
    """CPUs this process may run on, which a container may have made fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Parser(argparse.ArgumentParser):
    """argparse that raises its complaint instead of printing the usage above it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def number(
    kind: type[int] | type[float], low: float, high: float, wanted: str
) -> Callable[[str], float]:
    """A type for argparse: a number from `low` to `high`, or an error naming what is `wanted`."""

    def parse_number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse_number


count = number(int, 1, 2**31 - 1, "a whole number of at least 1")
rate = number(float, 1e-12, 1e3, "a positive number")
seconds = number(float, 1.0, 1e6, "a number of seconds, at least 1")
seed = number(int, 0, MAX_SEED, f"a whole number between 0 and {MAX_SEED}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="train_lm",
        description="Train a byte-level transformer on real text, sharded with fsdp2.fully_shard.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data", type=Path, metavar="PATH", help="a file or folder of text (default: Python's own)"
    )
    add("--preset", choices=list(PRESETS), default="small", help="model size (default: small)")
    add("--nproc", type=count, help="processes to start (default: 2, or one a GPU)")
    add("--steps", type=count, help="optimizer steps in all (default: the preset's)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="compute dtype")
    add("--seq-len", type=count, help="tokens in a sequence")
    add("--batch-size", type=count, help="sequences in one optimizer step, over all ranks")
    add("--lr", type=rate, help="peak learning rate")
    add(
        "--optimizer",
        choices=["adamw", "muon"],
        default="adamw",
        help="what steps the blocks' matrices; AdamW steps the rest (default: adamw)",
    )
    add("--grad-accum", type=count, default=1, help="micro-batches the batch is split into")
    add("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    add(
        "--reshard-after-forward",
        choices=["auto", "always", "never"],
        default="auto",
        help="free gathered parameters after forward (auto: all groups but the root's)",
    )
    _add_parallelism(parser)
    _add_checkpoints(parser)
    add("--seed", type=seed, default=0, help="fixes weights and data order")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--threads", type=count, help="CPU threads per rank (default: CPUs / ranks)")
    add(
        "--timeout",
        type=seconds,
        default=Options.timeout,
        metavar="SECONDS",
        help="how long a collective waits for a rank that is gone (default: 600)",
    )
    add(
        "--plan",
        nargs="?",
        const="h100",
        metavar="HARDWARE",
        help="print a step's time and memory on a machine (default: h100; or a file), and exit",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a timeline: steps 3 and 4 of rank 0, or --plan's",
    )
    return parser


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="save the run here")
    add("--checkpoint-every", type=count, metavar="N", help="steps between checkpoints (50)")
    add("--checkpoint-async", action="store_true", help="train on while a checkpoint is written")
    add("--keep", type=count, metavar="N", help="how many checkpoints stay, the newest (2)")
    add("--resume", action="store_true", help="continue from the latest checkpoint in DIR, if any")
    add(
        "--preempted-exit-code",
        type=number(int, 3, 255, "an exit code from 3 to 255"),
        metavar="N",
        help="of a run that SIGTERM or SIGUSR1 has ended, when it is saved (143)",
    )
    add(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        help="from a signal to SIGKILL, where no launcher started the ranks (30)",
    )
    add("--export", type=Path, metavar="OUT", help="at the end, weights as safetensors files here")


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--replicate",
        type=count,
        default=1,
        metavar="R",
        help="HSDP: R groups of ranks, each holding all shards (default: 1)",
    )
    add(
        "--levels",
        action="store_true",
        help="with --replicate: shard masters and optimizer states over all ranks",
    )
    add(
        "--elastic",
        type=count,
        metavar="N",
        help="N replica groups, of --nproc ranks and a batch each, which may die and come back",
    )
    add(
        "--tp",
        type=count,
        default=1,
        metavar="T",
        help="tensor parallelism: T neighbouring ranks share every layer (default: 1)",
    )
    add(
        "--cpu-offload",
        action="store_true",
        help="keep shards, gradients and optimizer states in host memory",
    )
    add(
        "--wire",
        choices=list(FORMATS),
        default="exact",
        help="what ranks send: numbers as they are (exact), or fewer bytes",
    )
    add(
        "--lora",
        type=count,
        metavar="RANK",
        help="freeze embedding and linear layers; train low-rank adapters on the blocks' linear "
        "layers, the norms and the head",
    )


def device_named(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU that torch can use")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def world_size_of(nproc: int | None, ranks: GivenRanks | None, default: int) -> int:
    """The launcher's number of ranks, or the number to start: ``--nproc`` where it was given."""
    if ranks is not None:
        if nproc is not None and nproc != ranks.world_size:
            raise UsageError(
                f"--nproc {nproc} contradicts the {ranks.world_size} ranks that the launcher gave; "
                "leave --nproc out"
            )
        return ranks.world_size
    world_size = nproc or default
    limit = MAX_LOCAL_RANKS_PER_CPU * cpu_count()
    if world_size > limit:
        raise UsageError(
            f"{world_size} ranks are too many for this machine: with {cpu_count()} CPUs it can "
            f"start at most {limit} ranks"
        )
    return world_size


def _default_world_size(device: str, micro_batch: int, replicate: int, tp: int) -> int:
    """One rank a GPU where they suffice, and as many of them as the micro-batch divides over."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    # Two shards by default even on one GPU (over gloo): a single one would shard nothing.
    wanted = gpus // (replicate * tp) if gpus >= max(2, replicate * tp) else 2
    shards = [n for n in range(1, wanted + 1) if micro_batch % (n * replicate) == 0]
    return max(shards, default=1) * replicate * tp


def _check_model(preset: str, tp: int, lora: int | None) -> None:
    """Whether each --tp rank gets a whole share of every layer, and adapters are of low rank."""
    model = PRESETS[preset]
    shared = {
        "key/value heads": model.num_kv_heads,
        "hidden channels": model.hidden_dim,
        "rows of the vocabulary": model.vocab_size,
    }
    for what, size in shared.items():
        if size % tp:
            raise UsageError(f"--tp {tp} does not divide the {size} {what} of preset {preset}")
    if lora is not None and lora >= model.kv_dim:
        raise UsageError(
            f"--lora {lora} is no low rank: the smallest linear layer of preset {preset} has "
            f"{model.kv_dim} rows"
        )


def _check_world_size(
    world_size: int, micro_batch: int, replicate: int, tp: int, preset: str
) -> None:
    if world_size % (replicate * tp):
        flags = [f"--{k} {n}" for k, n in (("replicate", replicate), ("tp", tp)) if n > 1]
        raise UsageError(f"{world_size} ranks do not divide evenly by {' x '.join(flags)}")
    slices = world_size // tp
    takers = f"{slices} groups of {tp} ranks (--tp)" if tp > 1 else f"{slices} ranks"
    if slices > micro_batch:
        raise UsageError(
            f"{takers} are more than the {micro_batch} sequences of a micro-batch "
            "(--batch-size / --grad-accum): some ranks would have nothing to do"
        )
    if micro_batch % slices:
        raise UsageError(
            f"{micro_batch} sequences in a micro-batch (--batch-size / --grad-accum) do not "
            f"divide evenly over {takers}"
        )
    holders = world_size // replicate
    if holders > PRESETS[preset].largest_dim:
        raise UsageError(
            f"{holders} ranks are more than the largest dim of preset {preset}, "
            f"{PRESETS[preset].largest_dim}: some ranks would hold nothing but padding"
        )


def backend_for(device: str, local_world_size: int, cpu_offload: bool) -> str:
    """NCCL refuses two ranks on one GPU; gloo takes CUDA tensors too, if slowly."""
    if device == "cpu" or torch.cuda.device_count() < local_world_size:
        return "gloo"
    # Offloaded gradients are on the CPU, and their norm is summed over the ranks there.
    return "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"


def threads_for(local_world_size: int) -> int:
    return max(1, cpu_count() // local_world_size)

"""The options of `train_lm`, checked as a whole before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp2 import checkpoint
from fsdp2.planning.presets import Shape
from fsdp2.wrap import WireFormat

from .flags import (
    Common,
    GivenRanks,
    UsageError,
    check,
    count,
    flag,
    number,
    parsed,
    rate,
    seconds,
    world_size_of,
)
from .model import PRESETS

PREEMPTED = checkpoint.Preemption.exit_code


class Training(NamedTuple):
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


FORMATS: dict[str, WireFormat] = {
    "exact": {},
    "fp32-sums": {"reduce": "fp32"},
    "bf16-sums": {"reduce": "bf16"},
    "int8-sums": {"reduce": "int8"},
    "int8-weights": {"gather": "int8", "reduce": "bf16"},
    "int8": {"gather": "int8", "reduce": "int8"},
    "int8-differences": {"gather": "int8", "differences": True, "reduce": "int8"},
    "int4-weights": {"gather": "int4", "reduce": "int8"},
    "int4-differences": {"gather": "int4", "differences": True, "reduce": "int8"},
    "int4": {
        "gather": "int4",
        "differences": True,
        "reduce": "int4",
        "feedback": True,
        "rotate": True,
    },
    "int4-naive": {"gather": "int4", "reduce": "int4"},
}
"""Formats that ``--wire`` takes, as arguments of `FSDPModule.set_wire_format`.

The guide "Train over a slow network" says what each sends, and what it costs in accuracy.
"""


@dataclass(frozen=True)
class Options(Common):
    """A run, complete: `parse` leaves no value to a default later on."""

    preset: str = flag("model size (small)", choices=list(PRESETS), default="small")
    data: Path | None = flag("a file or folder of text (Python's own)", Path, metavar="PATH")
    steps: int = flag("optimizer steps in all (the preset's)", count)
    precision: str = flag("compute dtype (fp32)", choices=["fp32", "bf16"], default="fp32")
    seq_len: int = flag("tokens in a sequence (the preset's)", count)
    batch_size: int = flag("sequences per optimizer step, over all ranks (the preset's)", count)
    lr: float = flag("peak learning rate (the preset's)", rate)
    optimizer: str = flag(
        "what steps the blocks' matrices; AdamW steps the rest (adamw)",
        choices=["adamw", "muon"],
        default="adamw",
    )
    grad_accum: int = flag("micro-batches per optimizer step", count, default=1)
    activation_checkpointing: bool = flag("recompute blocks in backward")
    reshard_after_forward: str = flag(
        "free gathered parameters after forward (auto: all groups but the root's)",
        choices=["auto", "always", "never"],
        default="auto",
    )
    replicate: int = flag("HSDP: R groups of ranks that hold all shards", count, 1, metavar="R")
    levels: bool = flag("with --replicate: optimizer states are sharded over all ranks")
    elastic: int | None = flag(
        "N replica groups, of --nproc ranks and a batch each, which may die and come back",
        count,
        metavar="N",
    )
    tp: int = flag("tensor parallelism: T ranks share every layer", count, 1, metavar="T")
    cpu_offload: bool = flag("keep shards, gradients and optimizer states in host memory")
    wire: str = flag("what ranks send (exact)", choices=list(FORMATS), default="exact")
    lora: int | None = flag(
        "freeze embedding and linear layers; train low-rank adapters on the blocks' linear "
        "layers, the norms and the head",
        count,
        metavar="RANK",
    )
    checkpoint: Path | None = flag("save the run here", Path, metavar="DIR")
    checkpoint_every: int = flag("steps between checkpoints (50)", count, metavar="N")
    checkpoint_async: bool = flag("train on while a checkpoint is written")
    keep: int = flag("how many checkpoints stay, the newest (2)", count, metavar="N")
    resume: bool = flag("continue from the latest checkpoint in DIR, if any")
    preempted_exit_code: int = flag(
        f"of a run that SIGTERM or SIGUSR1 has ended, when it is saved ({PREEMPTED})",
        number(int, 3, 255, "an exit code from 3 to 255"),
        metavar="N",
    )
    export: Path | None = flag("at the end, weights as safetensors files here", Path, metavar="OUT")
    timeout: float = flag("how long a collective waits for a rank that is gone", seconds, 600.0)
    plan: str | None = flag(
        "print a step's time and memory on a machine (h100; or a file), and exit",
        str,
        nargs="?",
        const="h100",
        metavar="HARDWARE",
    )
    trace: Path | None = flag(
        "a timeline: steps 3 and 4 of rank 0, or --plan's", Path, metavar="FILE"
    )

    @property
    def model(self) -> Shape:
        return PRESETS[self.preset]

    @property
    def data_parallel_size(self) -> int:
        """Into how many slices a micro-batch is cut; the ranks of one --tp group share a slice."""
        return self.world_size // self.tp

    @property
    def data_parallel_rank(self) -> int:
        """Ranks of a --tp group are neighbors: `tp` is the mesh's last dim."""
        return self.rank // self.tp

    @property
    def shard_size(self) -> int:
        """Over how many ranks a parameter (or its part of a --tp rank) is sharded."""
        return self.data_parallel_size // self.replicate

    @property
    def micro_batch(self) -> int:
        """Sequences in one micro-batch of all ranks."""
        return self.batch_size // self.grad_accum

    @property
    def rank_batch(self) -> int:
        """Sequences in one rank's micro-batch."""
        return self.micro_batch // self.data_parallel_size

    @property
    def reshards(self) -> bool | None:
        return {"auto": None, "always": True, "never": False}[self.reshard_after_forward]

    @property
    def backend(self) -> str:
        """Offloaded gradients are on the CPU, and their norm is summed over the ranks there."""
        both = super().backend == "nccl" and self.cpu_offload
        return "cpu:gloo,cuda:nccl" if both else super().backend

    @property
    def groups(self) -> int:
        return self.elastic or 1


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run. Raises `UsageError`; exits only for ``--help``."""
    about = "Train a byte-level transformer on real text, sharded with fsdp2.fully_shard."
    given = parsed(Options, "train_lm", about, argv, ranks, _default_ranks)
    needs_folder = ("checkpoint_every", "checkpoint_async", "keep", "preempted_exit_code")
    for name in needs_folder if given.checkpoint is None else ():
        flag_name = name.replace("_", "-")
        check((getattr(given, name), f"--{flag_name} needs --checkpoint DIR to say where to save"))
    code = given.preempted_exit_code or PREEMPTED
    options = replace(
        _with_preset(given),
        checkpoint_every=given.checkpoint_every or 50,
        keep=given.keep or 2,
        preempted=code if given.checkpoint else None,
        restarts=100 if given.elastic else 0,
    )
    _check_shapes(options)
    _check_combinations(options)
    return options


def _with_preset(given: Options) -> Options:
    training = _TRAINING[given.preset]._asdict()
    return replace(given, **{name: getattr(given, name) or training[name] for name in training})


def _default_ranks(given: Options) -> int:
    """One rank per GPU where they suffice, and as many as the micro-batch divides over."""
    options = _with_preset(given)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    copies = options.replicate * options.tp
    # Two shards by default even on one GPU (over gloo): a single one would shard nothing.
    wanted = gpus // copies if gpus >= max(2, copies) else 2
    shards = [n for n in range(1, wanted + 1) if options.micro_batch % (n * options.replicate) == 0]
    return max(shards, default=1) * copies


def _check_shapes(options: Options) -> None:
    """Whether ranks divide the batch, the layers and the parameters."""
    model, world_size, tp = options.model, options.world_size, options.tp
    slices, micro_batch = options.data_parallel_size, options.micro_batch
    kv_dim = model.dim // model.heads * model.kv_heads
    largest = max(model.vocab, model.ffn, model.dim)
    flags = [f"--{k} {n}" for k, n in (("replicate", options.replicate), ("tp", tp)) if n > 1]
    takers = f"{slices} groups of {tp} ranks (--tp)" if tp > 1 else f"{slices} ranks"
    shared = {
        "key/value heads": model.kv_heads,
        "hidden channels": model.ffn,
        "rows of the vocabulary": model.vocab,
    }
    check(
        (
            options.batch_size % options.grad_accum,
            f"--batch-size {options.batch_size} does not split into --grad-accum "
            f"{options.grad_accum} micro-batches of the same size",
        ),
        *(
            (size % tp, f"--tp {tp} does not divide the {size} {what} of preset {options.preset}")
            for what, size in shared.items()
        ),
        (
            options.lora and options.lora >= kv_dim,
            f"--lora {options.lora} is no low rank: the smallest linear layer of preset "
            f"{options.preset} has {kv_dim} rows",
        ),
        (
            world_size % (options.replicate * tp),
            f"{world_size} ranks do not divide evenly by {' x '.join(flags)}",
        ),
        (
            slices > micro_batch,
            f"{takers} are more than the {micro_batch} sequences of a micro-batch "
            "(--batch-size / --grad-accum): some ranks would have nothing to do",
        ),
        (
            slices and micro_batch % slices,
            f"{micro_batch} sequences in a micro-batch (--batch-size / --grad-accum) do not "
            f"divide evenly over {takers}",
        ),
        (
            world_size // options.replicate > largest,
            f"{world_size // options.replicate} ranks are more than the largest dim of preset "
            f"{options.preset}, {largest}: some ranks would hold nothing but padding",
        ),
    )


def _check_combinations(options: Options) -> None:
    """Whether flags fit each other, and what they need is there."""
    for name, path in (("--checkpoint", options.checkpoint), ("--export", options.export)):
        # Plans are exchanged by torch's object collectives, which convert with NumPy.
        lacks = path is not None and importlib.util.find_spec("numpy") is None
        check((lacks, f"{name} needs NumPy: pip install numpy"))
    elastic = options.elastic is not None
    alone = (options.checkpoint, options.export, options.trace, options.plan)
    check(
        (
            options.levels and (options.replicate < 2 or options.tp > 1 or options.plan),
            "--levels needs --replicate R of 2 or more, and knows no --tp or --plan",
        ),
        (
            options.plan and (options.tp > 1 or options.lora),
            "--plan knows neither --tp nor --lora: leave them out to plan the rest",
        ),
        (
            options.export and options.export.exists(),
            f"--export {options.export} is there already: name a new folder",
        ),
        (
            options.resume and options.checkpoint is None,
            "--resume needs --checkpoint DIR to say what to resume from",
        ),
        (
            elastic and any(given is not None for given in alone),
            "--elastic knows no --checkpoint, --export, --trace or --plan",
        ),
    )
    if options.elastic is not None:
        world_size_of(options.elastic * options.world_size, None, 1)  # all are on this machine
        lacks = importlib.util.find_spec("torchft") is None
        check((lacks, "--elastic needs torchft: pip install torchft"))


__all__ = ["GivenRanks", "Options", "UsageError", "parse", "world_size_of"]

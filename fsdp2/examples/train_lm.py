"""Train a small language model, sharded with ``fsdp2.fully_shard``.

    python -m fsdp2.examples.train_lm                       # two processes on this machine's CPUs
    torchrun --nproc-per-node 8 -m fsdp2.examples.train_lm --preset llama-1b --precision bf16
    torchrun --nproc-per-node 8 -m fsdp2.examples.train_lm --replicate 2 --tp 2

The printed losses depend on the options that name the model, the data and the optimizer, not on the
number of ranks or on the mesh: every rank starts from the same full weights, and takes its
slice of one global batch, which is a pure function of (seed, step).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    Levels,
    MixedPrecisionPolicy,
    OffloadPolicy,
    checkpoint,
    fully_shard,
    optim,
    plan,
    report,
    trace,
    xla,
)
from fsdp2.planning import Plan
from fsdp2.planning.presets import Block, Model

from . import checkpointing, data, elastic, launch, lora, parallel, reporting
from .model import parts, reset_parameters, token_losses
from .options import FORMATS, GivenRanks, Options, UsageError, parse
from .reporting import amount, say

MODULE = "fsdp2.examples.train_lm"
HELD_OUT_SEQUENCES = 128
MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 100
TRACED = (2, 3)  # steps of which --trace writes a timeline: the first two make buffers


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a worker failed, 2 wrong usage, 128 + n ended by signal n.

    ``--preempted-exit-code`` where a signal ended it, and all was saved.
    """
    return launch.main(MODULE, argv, prepare, train)


def run_rank(argv: Sequence[str]) -> int:
    """Be the rank that the environment says, in this process and its group; its exit code."""
    ranks = GivenRanks.from_environment()
    assert ranks is not None, "RANK and WORLD_SIZE are not set"
    return launch.run_rank("train_lm", argv, ranks, prepare, train)


def prepare(argv: Sequence[str], ranks: GivenRanks | None) -> Options | int:
    """Check all that can be wrong before a process is started: options, text, checkpoint."""
    options = parse(argv, ranks)
    if options.plan is not None:
        planned = plan_step(options)
        print(planned, flush=True)
        if options.trace is not None:
            planned.trace(options.trace)
        return 0
    _found(options)
    if ranks is None and options.elastic is not None and elastic.group() is None:
        return elastic.run(MODULE, argv, options.elastic)
    return options


_corpus_of = functools.cache(data.load_corpus)


def _found(options: Options) -> tuple[data.Corpus, int | None]:
    """The text, and the step to resume."""
    corpus = _corpus_of(options.data, options.seq_len + 1)
    alike = checkpointing.facts_of(options, corpus.fingerprint)
    return corpus, checkpointing.find(options.checkpoint, options.resume, alike)


@dataclass(frozen=True)
class Run:
    """The objects that every part of the loop uses."""

    options: Options
    device: torch.device
    corpus: data.Corpus
    model: FSDPModule
    optimizer: torch.optim.Optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters, frozen or not."""
        return list(self.model.parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.params if param.requires_grad]


def train(options: Options) -> int:
    """A rank's work; its exit code."""
    corpus, step = _found(options)
    with launch.process_group(options, options.timeout) as device:
        model = build_model(options, device, parallel.make_mesh(options))
        optimizer = make_optimizer(model.named_parameters(), options)
        return _train(Run(options, device, corpus, model, optimizer), step)


def _train(run: Run, step: int | None) -> int:
    """This rank's exit code; `step` is the one to resume."""
    options = run.options
    if options.elastic is not None:
        _train_elastic(run)
        return 0
    _print_start(run)
    start, resumed, loaded = 0, "", None
    if options.checkpoint is not None and options.resume:
        loaded = checkpointing.load(options.checkpoint, step, run.model, run.optimizer)
    if loaded is None:
        first_loss = held_out_loss(run)
    else:
        start, first_loss = loaded.step, loaded.extra["first_held_out_loss"]
        resumed = f"resumed from {options.checkpoint} at step {start}; "
    say(f"{resumed}held-out loss before training: {first_loss:.4f} nats")
    with checkpointing.Saves(options) as saves:
        tokens_per_second = _loop(run, saves, start, first_loss)
        saves.finish()
    if saves.preempted:
        say(f"ended by a signal; saved in {options.checkpoint}: --resume goes on")
        assert options.preempted is not None
        return options.preempted
    _print_end(run, first_loss, tokens_per_second)
    if options.export is not None:
        made = checkpoint.export(options.export, run.model)
        say(f"exported to {made.folder}: {len(made.files)} file(s), {amount(made.nbytes)}")
    return 0


def _train_elastic(run: Run) -> None:
    """With other replica groups, each on a batch of its own."""
    if elastic.group() == 0:
        _print_start(run)

    def step(number: int, batch: int) -> Tensor:
        set_rate(run, number)
        total = backward(run, batch)
        dist.all_reduce(total)
        return total / run.options.world_size

    held_out = functools.partial(held_out_loss, run)
    elastic.train(run.model, run.optimizer, run.options, step, held_out)


MUON_RATE = 3.0  # AdamW's early steps are larger than the norm that Muon's are adjusted to

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], options: Options
) -> torch.optim.Optimizer:
    """The optimizer of what is trained; Muon's rate is `MUON_RATE` times AdamW's."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    if options.optimizer == "adamw":
        return torch.optim.AdamW([p for _, p in trained], lr=options.lr, **ADAMW)
    return optim.Muon(
        trained,
        lr=options.lr * MUON_RATE,
        adjust_lr_fn="match_rms_adamw",
        elementwise=lambda name, _: name.startswith(("embed.", "head.")),
        elementwise_options={**ADAMW, "lr": options.lr},
    )


def unsharded_model(options: Options) -> Model:
    """The model on the default device, with any values."""
    model = Model(options.model)
    if options.activation_checkpointing:
        for block in model.blocks:
            xla.checkpoint_module(block)
    return model


def build_model(options: Options, device: torch.device, mesh: DeviceMesh) -> FSDPModule:
    """The sharded model. Filled and sharded part by part: no rank ever holds the whole of it.

    Each rank fills a part with the same full weights; `fully_shard` keeps the rank's shard. Steps
    that change the parameters themselves come before it: adapters first, then tensor parallelism.
    """
    with torch.device("meta"):
        model = unsharded_model(options)
    own = parallel.data_parallel_mesh(mesh, options.levels)
    for name, part in parts(model):
        part.to_empty(device=device)
        reset_parameters(part, options.model, options.seed, prefix=name)
        if options.lora is not None:
            lora.adapt(part, options.lora, options.seed, name)
        if options.tp > 1:
            parallel.tensor_parallel(part, mesh["tp"])
        if isinstance(part, Block):
            _shard(part, own, options, device)
    return _shard_root(model, own, options, device)


def _shard_root(
    model: nn.Module, mesh: DeviceMesh | Levels, options: Options, device: torch.device
) -> FSDPModule:
    """Shard what is in no block, and set what holds for all units."""
    _shard(model, mesh, options, device)
    sharded = cast(FSDPModule, model)
    if FORMATS[options.wire]:
        sharded.set_wire_format(**FORMATS[options.wire])
    if options.levels:
        sharded.set_tuning(keep_rows=True)  # also where a group is one rank
    return sharded


def _shard(
    module: nn.Module, mesh: DeviceMesh | Levels, options: Options, device: torch.device
) -> None:
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if options.cpu_offload:
        # Pages are pinned for copies to and from a GPU; without one there is nothing to pin for.
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=options.reshards,
        mp_policy=policy,
        offload_policy=offload,
    )


def plan_step(options: Options) -> Plan:
    """The plan of a step on the machine that ``--plan`` names; nothing is made or started."""
    assert options.plan is not None
    on = torch.device("meta")
    with on:
        model = unsharded_model(options)
    names = [name for name, _ in model.named_parameters()]

    def make_batch() -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(options.rank_batch, options.seq_len, dtype=torch.int64)
        return tokens, tokens.clone()

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in cast(Model, model).blocks:
            _shard(block, mesh, options, on)
        _shard_root(model, mesh, options, on)

    ranks = (options.replicate, options.shard_size)
    try:
        return plan(
            lambda: unsharded_model(options),
            make_batch,
            shard=shard,
            loss=lambda model, batch: token_losses(model(batch[0]), batch[1]).mean(),
            optimizer=lambda params: make_optimizer(zip(names, params, strict=True), options),
            mesh=ranks if options.replicate > 1 else ranks[1],
            hardware=options.plan,
            accumulate=options.grad_accum,
            clip=MAX_GRAD_NORM,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def learning_rate(step: int, steps: int, peak: float) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warmup, then a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def set_rate(run: Run, step: int) -> None:
    """Let the optimizer take step `step`."""
    rate = learning_rate(step, run.options.steps, run.options.lr)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * MUON_RATE if "ns_steps" in group else rate


def train_step(run: Run, step: int) -> Tensor:
    """One optimizer step; this rank's mean loss, fp64 [] on the device, not yet waited for."""
    set_rate(run, step)
    run.optimizer.zero_grad(set_to_none=True)
    total = backward(run, step)
    run.optimizer.step()
    return total


def backward(run: Run, number: int) -> Tensor:
    """The clipped gradients of a batch; this rank's mean loss, as `train_step` returns it."""
    options = run.options
    batch = data.global_batch(
        run.corpus.train, options.seed, number, options.batch_size, options.seq_len
    )
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for micro in range(options.grad_accum):
        last = micro == options.grad_accum - 1
        # Gradients stay whole on each rank until the last micro-batch: one reduction a step.
        run.model.set_requires_gradient_sync(last)
        run.model.set_is_last_backward(last)
        mine = data.rank_slice(
            options.batch_size,
            options.grad_accum,
            micro,
            options.data_parallel_rank,
            options.data_parallel_size,
        )
        tokens, targets = data.tokens_and_targets(batch[mine], run.device)
        losses = token_losses(run.model(tokens), targets)
        (losses.mean() / options.grad_accum).backward()
        # In fp64, so that what is printed does not depend on how the batch was cut up.
        total += losses.detach().double().mean() / options.grad_accum
    nn.utils.clip_grad_norm_(run.trained, MAX_GRAD_NORM)
    return total


def _loop(run: Run, saves: checkpointing.Saves, start: int, first_loss: float) -> float:
    """Train from step `start` to the end; returns tokens per second (not counting checkpoints)."""
    options = run.options
    every = 1 if options.steps <= 50 else 10
    tokens_a_step = options.batch_size * options.seq_len
    training_seconds = 0.0
    since, since_step = time.perf_counter(), start
    with contextlib.ExitStack() as tracing:
        for step in range(start, options.steps):
            if options.trace is not None and step - start == TRACED[0]:
                tracing.enter_context(trace(options.trace))
            loss = train_step(run, step)
            if step - start == TRACED[-1]:
                tracing.close()
            done = step + 1
            is_saved = saves.is_due(done)
            if not (is_saved or done % every == 0 or done == options.steps):
                continue
            mean_loss = _sum_over_ranks(loss, options.tp) / options.data_parallel_size
            seconds = time.perf_counter() - since
            training_seconds += seconds
            rate = (done - since_step) * tokens_a_step / seconds
            peak = reporting.peak_memory(run.device)
            say(reporting.step_line(done, options.steps, mean_loss, rate, peak))
            if not math.isfinite(mean_loss):
                raise FloatingPointError(
                    f"the loss of step {done} is {mean_loss}: lower --lr {options.lr}"
                )
            if is_saved:
                alike = checkpointing.facts_of(options, run.corpus.fingerprint)
                extra = {"alike": alike, "first_held_out_loss": first_loss}
                saves.save(run.model, run.optimizer, done, extra)
            if saves.preempted:
                break
            since, since_step = time.perf_counter(), done
    return (options.steps - start) * tokens_a_step / training_seconds if training_seconds else 0.0


def _sum_over_ranks(value: Tensor, tp: int) -> float:
    """The sum over data-parallel ranks; each one's `tp` ranks have the same value."""
    dist.all_reduce(value)
    return value.item() / tp


@torch.no_grad()
def held_out_loss(run: Run) -> float:
    """Mean loss in nats over the same held-out slices at every call, shared out over the ranks."""
    options = run.options
    sequences = data.held_out_slices(run.corpus.held_out, options.seq_len, HELD_OUT_SEQUENCES)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    forward_size = options.rank_batch * options.data_parallel_size
    # Every rank runs the same number of forwards, as each gathers parameters from all. Where the
    # last slices do not go round, the ranks left over measure the first again and drop the result.
    for begin in range(0, len(sequences), forward_size):
        first = begin + options.data_parallel_rank * options.rank_batch
        mine = sequences[first : first + options.rank_batch]
        tokens, targets = data.tokens_and_targets(mine if len(mine) else sequences[:1], run.device)
        losses = token_losses(run.model(tokens), targets)
        total += losses.double().sum() if len(mine) else 0.0
    return _sum_over_ranks(total, options.tp) / (len(sequences) * options.seq_len)


def _print_start(run: Run) -> None:
    options, corpus = run.options, run.corpus
    trained = f" ({sum(p.numel() for p in run.trained):,} trained)" if options.lora else ""
    mesh = ""
    if options.replicate * options.tp > 1:
        outer = "levels" if options.levels else "replicate"
        mesh = f" ({outer} {options.replicate} x shard {options.shard_size} x tp {options.tp})"
    offloaded = ", shards on the CPU" if options.cpu_offload else ""
    wire = "" if options.wire == "exact" else f", sent as {options.wire}"
    say(
        f"{options.preset}: {sum(p.numel() for p in run.params):,} parameters{trained}, "
        f"{options.precision}, {options.world_size} rank(s){mesh} on {options.device}{offloaded} "
        f"over {options.backend}{wire}, threads per rank: {options.threads}\n"
        f"{corpus.source}: {corpus.num_files:,} files, {corpus.train.numel():,} bytes to train on, "
        f"{corpus.held_out.numel():,} held out\n"
        f"{options.steps} steps of {options.batch_size} x {options.seq_len} tokens in "
        f"{options.grad_accum} micro-batch(es), seed {options.seed}\n"
        f"Groups, each gathered and freed as one\n{report(run.model)}"
    )


def _print_end(run: Run, first_loss: float, tokens_per_second: float) -> None:
    """Measure what the run has come to, on all ranks."""
    final_loss = held_out_loss(run)
    mine, unsharded = reporting.state_bytes(run.params, run.optimizer)
    rows = {
        "held-out loss, first": f"{first_loss:.4f} nats",
        "held-out loss, final": f"{final_loss:.4f} nats",
        "held-out loss, uniform guess": f"{math.log(run.options.model.vocab):.4f} nats",
        "training speed": f"{tokens_per_second:,.0f} tokens/s",
        "parameters, gradients, optimizer: per rank": f"{amount(mine)} ({mine / unsharded:.1%})",
        "parameters, gradients, optimizer: unsharded": amount(unsharded),
        "peak memory of rank 0": amount(reporting.peak_memory(run.device)),
    }
    say("\n".join(["\nSummary", *(f"{name:<43}  {value:>15}" for name, value in rows.items()), ""]))


if __name__ == "__main__":
    sys.exit(main())

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
import datetime
import functools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

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
    Plan,
    checkpoint,
    fully_shard,
    optim,
    plan,
    trace,
)

from . import checkpointing, data, elastic, launch, lora, parallel, reporting
from .checkpointing import RunState
from .model import Block, Transformer, reset_parameters, token_losses
from .options import GivenRanks, Options, UsageError, parse
from .wire import FORMATS

MODULE = "fsdp2.examples.train_lm"
HELD_OUT_SEQUENCES = 128
MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 100
SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 160
SAMPLE_TEMPERATURE = 0.7
TRACED = (2, 3)  # steps of which --trace writes a timeline: the first two make buffers


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 wrong usage, 128 + n ended by signal n, else a worker's failure.

    ``--preempted-exit-code`` where a signal ended it, and all was saved.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        ranks = GivenRanks.from_environment()
    except UsageError as error:
        return _complain(error)
    if ranks is not None:
        launch.run_as_worker(lambda: run_rank(argv))
    try:
        options = parse(argv, None)
        if options.plan is not None:
            planned = plan_step(options)
            print(planned, flush=True)
            if options.optimizer == "muon":
                print(MUON_PLANNED, flush=True)
            if options.trace is not None:
                planned.trace(options.trace)
            return 0
        _prepare(options)
    except UsageError as error:
        return _complain(error)
    name = "train_lm"
    if options.elastic is not None:
        if elastic.group() is None:
            return elastic.run(MODULE, argv, options)
        name = f"train_lm: group {elastic.group()}"
    ending = launch.Ending()
    if options.checkpoint is not None:
        ending = launch.Ending(options.grace, options.preempted_exit_code)
    return launch.run_workers(MODULE, argv, options.world_size, options.threads, name, ending)


def run_rank(argv: Sequence[str]) -> int:
    """Be the rank that the environment says, in this process; its exit code.

    A process group that is there already is used.
    """
    ranks = GivenRanks.from_environment()
    assert ranks is not None, "RANK and WORLD_SIZE are not set"
    try:
        options = parse(argv, ranks)
        inputs = _prepare(options)
    except UsageError as error:
        if ranks.rank == 0:
            return _complain(error)
        launch.let_rank_0_speak()
        return 2
    return _train(options, ranks, *inputs)


def _complain(error: UsageError) -> int:
    sentence = str(error)
    print(
        f"train_lm: {sentence}{'' if sentence.endswith('.') else '.'}", file=sys.stderr, flush=True
    )
    return 2


def _prepare(options: Options) -> tuple[data.Corpus, RunState | None]:
    """Read everything that can be wrong before a process is started: the text, the checkpoint."""
    corpus = data.load_corpus(options.data, min_bytes=options.seq_len + 1)
    return corpus, checkpointing.find(options, corpus.fingerprint)


@dataclass(frozen=True)
class Run:
    """The objects that every part of the loop uses. `params` are the sharded parameters, frozen or
    not.
    """

    options: Options
    rank: int
    dp_rank: int
    device: torch.device
    corpus: data.Corpus
    model: nn.Module
    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.params if param.requires_grad]

    @property
    def fsdp(self) -> FSDPModule:
        return cast(FSDPModule, self.model)


def _train(options: Options, ranks: GivenRanks, corpus: data.Corpus, found: RunState | None) -> int:
    """This rank's exit code."""
    run = _set_up(options, ranks, corpus)
    if options.elastic is not None:
        _train_elastic(run)
        return 0
    if options.resume:
        found = checkpointing.agreed(found)
    if ranks.rank == 0:
        _print_start(run)
    start = 0
    if found is None:
        first_loss = held_out_loss(run)
    else:
        assert options.checkpoint is not None
        checkpointing.load(options.checkpoint, found, run.model, run.optimizer)
        start, first_loss = found.step, found.first_held_out_loss
    if ranks.rank == 0:
        resumed = f"resumed from {options.checkpoint} at step {start}; " if found else ""
        print(f"{resumed}held-out loss before training: {first_loss:.4f} nats", flush=True)
    with checkpointing.Saves(options, ranks.rank) as saves:
        tokens_per_second = _loop(run, saves, start, first_loss)
        saves.finish()
    if saves.preempted:
        if ranks.rank == 0:
            print(f"ended by a signal; saved in {options.checkpoint}: --resume goes on", flush=True)
        _leave()
        return options.preempted_exit_code
    final_loss = held_out_loss(run)
    sizes = reporting.state_bytes(run.params, run.optimizer)
    sample = sample_text(run)
    if ranks.rank == 0:
        _print_end(run, first_loss, final_loss, tokens_per_second, sizes, sample)
    if options.export is not None:
        made = checkpoint.export(options.export, run.model)
        if ranks.rank == 0:
            size = reporting.format_bytes(made.nbytes)
            print(f"exported to {made.folder}: {len(made.files)} file(s), {size}", flush=True)
    _leave()
    return 0


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _train_elastic(run: Run) -> None:
    """With other replica groups, each on a batch of its own."""
    if run.rank == 0 and elastic.group() == 0:
        _print_start(run)

    def step(number: int, batch: int) -> Tensor:
        set_rate(run, number)
        total = backward(run, batch)
        dist.all_reduce(total)
        return total / run.options.world_size

    held_out = functools.partial(held_out_loss, run)
    elastic.train(run.model, run.optimizer, run.options, run.rank, step, held_out)


def _set_up(options: Options, ranks: GivenRanks, corpus: data.Corpus) -> Run:
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=options.timeout)
    launch.init_process_group(ranks, options.backend, device, timeout)
    model = build_model(options, device, parallel.make_mesh(options))
    params = list(model.parameters())
    optimizer = make_optimizer(model, options)
    dp_rank = parallel.data_parallel_rank(options, ranks.rank)
    return Run(options, ranks.rank, dp_rank, device, corpus, model, params, optimizer)


MUON_RATE = 3.0  # AdamW's early steps are larger than the norm that Muon's are adjusted to

MUON_PLANNED = (
    "Muon is planned over this rank's rows: its states, 4 bytes per element of a matrix and 8 of "
    "the rest, are as they will be; what is whole during its step, and its time, are not planned."
)

ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained."""
    return make_optimizer_of(model.named_parameters(), options)


def make_optimizer_of(
    named: Iterable[tuple[str, nn.Parameter]], options: Options
) -> torch.optim.Optimizer:
    """As `make_optimizer`, of parameters by name.

    The learning rate is AdamW's; of Muon's matrices it is `MUON_RATE` times that.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    if options.optimizer == "adamw":
        return make_adamw((param for _, param in trained), options.lr)
    return optim.Muon(
        trained,
        lr=options.lr * MUON_RATE,
        adjust_lr_fn="match_rms_adamw",
        elementwise=lambda name, _: name.startswith(("embed.", "head.")),
        elementwise_options={**ADAMW, "lr": options.lr},
    )


def make_adamw(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW of what is trained."""
    trained = [param for param in params if param.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, **ADAMW)  # type: ignore[arg-type]  # of several types


def build_model(options: Options, device: torch.device, mesh: DeviceMesh) -> Transformer:
    """The sharded model. Filled and sharded part by part: no rank ever holds the whole of it.

    Each rank fills a part with the same full weights; `fully_shard` keeps the rank's shard. Steps
    that change the parameters themselves come before it: adapters first, then tensor parallelism.
    """
    with torch.device("meta"):
        model = Transformer(options.model, options.activation_checkpointing)
    own = parallel.data_parallel_mesh(mesh, options.levels)
    for name, part in model.parts():
        part.to_empty(device=device)
        reset_parameters(part, options.model, options.seed, prefix=name)
        if options.lora is not None:
            lora.adapt(part, options.lora, options.seed, name)
        if options.tp > 1:
            parallel.tensor_parallel(part, mesh["tp"])
        if isinstance(part, Block):
            _shard(part, own, options, device)
    _shard(model, own, options, device)
    _send_in(model, options.wire)
    if options.levels:
        cast(FSDPModule, model).set_keep_rows(True)  # also where a group is one rank
    return model


def _send_in(model: nn.Module, wire: str) -> None:
    if FORMATS[wire]:
        cast(FSDPModule, model).set_wire_format(**FORMATS[wire])


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
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=policy,
        offload_policy=offload,
    )


def plan_step(options: Options) -> Plan:
    """The plan of a step on the machine that ``--plan`` names; nothing is made or started."""
    assert options.plan is not None
    on = torch.device("meta")
    with on:
        model = Transformer(options.model, options.activation_checkpointing)
    names = [name for name, _ in model.named_parameters()]

    def make_batch() -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(options.rank_batch, options.seq_len, dtype=torch.int64)
        return tokens, tokens.clone()

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in cast(Transformer, model).blocks:
            _shard(block, mesh, options, on)
        _shard(model, mesh, options, on)
        _send_in(model, options.wire)

    ranks = (options.replicate, options.shard_size)
    try:
        return plan(
            lambda: Transformer(options.model, options.activation_checkpointing),
            make_batch,
            shard=shard,
            loss=lambda model, batch: token_losses(model(batch[0]), batch[1]).mean(),
            optimizer=lambda params: make_optimizer_of(zip(names, params, strict=True), options),
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
        run.fsdp.set_requires_gradient_sync(last)
        run.fsdp.set_is_last_backward(last)
        mine = data.rank_slice(
            options.batch_size, options.grad_accum, micro, run.dp_rank, options.data_parallel_size
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
    shown = reporting.ProgressReporter(options.steps, start, show=run.rank == 0)
    with contextlib.ExitStack() as tracing, shown as progress:
        for step in range(start, options.steps):
            if step - start == TRACED[0]:
                tracing.enter_context(_trace(options))
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
            progress.report(reporting.StepReport(done, options.steps, mean_loss, rate, peak))
            if not math.isfinite(mean_loss):
                raise FloatingPointError(
                    f"the loss of step {done} is {mean_loss}: lower --lr {options.lr}"
                )
            if is_saved:
                state = RunState.of(options, run.corpus.fingerprint, done, first_loss)
                saves.save(run.model, run.optimizer, state)
            if saves.preempted:
                break
            since, since_step = time.perf_counter(), done
    return (options.steps - start) * tokens_a_step / training_seconds if training_seconds else 0.0


def _trace(options: Options) -> contextlib.AbstractContextManager[object]:
    """A timeline of what runs inside, if one is asked for; rank 0 writes it."""
    return contextlib.nullcontext() if options.trace is None else trace(options.trace)


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
        first = begin + run.dp_rank * options.rank_batch
        mine = sequences[first : first + options.rank_batch]
        tokens, targets = data.tokens_and_targets(mine if len(mine) else sequences[:1], run.device)
        losses = token_losses(run.model(tokens), targets)
        total += losses.double().sum() if len(mine) else 0.0
    return _sum_over_ranks(total, options.tp) / (len(sequences) * options.seq_len)


@torch.no_grad()
def sample_text(run: Run) -> bytes:
    """Text the model writes after a fixed prompt: the same on every rank, forward by forward."""
    generator = torch.Generator().manual_seed(run.options.seed)
    text = list(SAMPLE_PROMPT)
    for _ in range(SAMPLE_BYTES):
        context = torch.tensor([text[-run.options.seq_len :]], device=run.device)
        logits = run.model(context)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / SAMPLE_TEMPERATURE, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)


def _print_start(run: Run) -> None:
    options, corpus = run.options, run.corpus
    trained = f" ({sum(p.numel() for p in run.trained):,} trained)" if options.lora else ""
    mesh = ""
    if options.replicate * options.tp > 1:
        outer = "levels" if options.levels else "replicate"
        mesh = f" ({outer} {options.replicate} x shard {options.shard_size} x tp {options.tp})"
    offloaded = ", shards on the CPU" if options.cpu_offload else ""
    wire = "" if options.wire == "exact" else f", sent as {options.wire}"
    print(
        f"{options.preset}: {sum(p.numel() for p in run.params):,} parameters{trained}, "
        f"{options.precision}, {options.world_size} rank(s){mesh} on {options.device}{offloaded} "
        f"over {options.backend}{wire}, threads per rank: {options.threads}\n"
        f"{corpus.source}: {corpus.num_files:,} files, {corpus.train.numel():,} bytes to train on, "
        f"{corpus.held_out.numel():,} held out\n"
        f"{options.steps} steps of {options.batch_size} x {options.seq_len} tokens in "
        f"{options.grad_accum} micro-batch(es), seed {options.seed}"
    )
    reporting.print_groups(run.model)


def _print_end(
    run: Run,
    first_loss: float,
    final_loss: float,
    tokens_per_second: float,
    sizes: reporting.StateBytes,
    sample: bytes,
) -> None:
    rank, unsharded = map(reporting.format_bytes, (sizes.rank, sizes.unsharded))
    share = sizes.rank / sizes.unsharded
    rows = [
        ("held-out loss, first", f"{first_loss:.4f} nats"),
        ("held-out loss, final", f"{final_loss:.4f} nats"),
        ("held-out loss, uniform guess", f"{math.log(run.options.model.vocab_size):.4f} nats"),
        ("training speed", f"{tokens_per_second:,.0f} tokens/s"),
        ("parameters, gradients, optimizer: per rank", f"{rank} ({share:.1%})"),
        ("parameters, gradients, optimizer: unsharded", unsharded),
        ("peak memory of rank 0", reporting.format_bytes(reporting.peak_memory(run.device))),
    ]
    reporting.print_table("Summary", ("", "value"), rows)
    print(f"Sample:\n{reporting.printable(sample)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

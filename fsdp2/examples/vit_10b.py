"""A vision transformer of ten billion parameters, sharded while it is made with ``fsdp2.deferred``.

    python -m fsdp2.examples.vit_10b --plan                     # the memory of each of 128 ranks
    python -m fsdp2.examples.vit_10b --size 0.5b --nproc 2      # for real, on this machine's CPUs
    torchrun --nnodes 16 --nproc-per-node 8 … -m fsdp2.examples.vit_10b --precision bf16

Shapes: B images, S pixels per side, P = S / 14 patches per side, D = ``width``, K = ``classes``.

    images [B, 3, S, S] --patches--> [B, P * P, D] --depth x Block--> [B, P * P, D]
                                                   --norm, mean, head--> logits [B, K]

No process ever holds the whole model. A block is made, filled, sharded and freed before the next
one is made, and a block is the unit that training gathers. Images are random numbers, a pure
function of (seed, step), so printed losses do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, deferred

from . import launch, reporting
from .options import GivenRanks, UsageError, cpu_count

MODULE = "fsdp2.examples.vit_10b"
GIB = 2**30
FP32_BYTES = 4
ADAMW_STATES = 2  # running means of the gradient and of its square, as large as the parameter each
BLOCKS_AT_A_TIME = 2  # one computes, the next is gathered behind it
SMALL_PADDING, SMALL_PADDING_BYTES = 0.03, 2**20  # up to either, `fully_shard` stays on dim 0


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ViTConfig:
    """Numbers that fix every parameter's shape. `heads` must divide `width`, `patch` `image`."""

    width: int
    depth: int
    heads: int
    image: int = 224
    patch: int = 14
    classes: int = 1000

    @property
    def patches(self) -> int:
        """Patches of an image; there is no class token."""
        return (self.image // self.patch) ** 2


SIZES: dict[str, ViTConfig] = {
    "tiny": ViTConfig(width=64, depth=4, heads=4, image=28, classes=10),
    "0.5b": ViTConfig(width=1536, depth=18, heads=16),
    "1b": ViTConfig(width=2048, depth=20, heads=16),
    "10b": ViTConfig(width=5120, depth=32, heads=32),
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): what is made, sharded and gathered as one."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._layers(x)
        # Recomputed in backward: a block keeps its input alone. There is no dropout to repeat.
        return checkpoint(self._layers, x, use_reentrant=False, preserve_rng_state=False)

    def _layers(self, x: Tensor) -> Tensor:
        # [B, T, 3 * D] -> q, k and v, each [B, heads, T, D / heads]
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class VisionTransformer(nn.Module):
    """images [B, 3, S, S] -> logits [B, K]. Layers start as their classes fill them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.places = nn.Parameter(torch.empty(config.patches, config.width))
        nn.init.trunc_normal_(self.places, std=0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


# --- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitPlan:
    """Bytes that one rank holds of one unit; the optimizer's are AdamW's.

    `whole` is fp32, as a unit is made; `gathered` is in the dtype of compute, padding included.
    """

    name: str
    numel: int
    shards: int
    gathered: int

    @property
    def whole(self) -> int:
        return self.numel * FP32_BYTES

    @property
    def gradients(self) -> int:
        return self.shards

    @property
    def optimizer(self) -> int:
        return ADAMW_STATES * self.shards

    @property
    def state(self) -> int:
        """All that stays between steps."""
        return self.shards + self.gradients + self.optimizer


@dataclass(frozen=True)
class Plan:
    """The blocks' units, and the root's last: patches, places, norm and head."""

    world_size: int
    units: tuple[UnitPlan, ...]

    def total(self, field: str) -> int:
        return sum(getattr(unit, field) for unit in self.units)

    @property
    def largest(self) -> UnitPlan:
        return max(self.units[:-1], key=lambda unit: unit.whole)

    @property
    def construction(self) -> int:
        """The most bytes while the model is made: all shards, one whole block, the root's own."""
        return self.total("shards") + self.largest.whole + self.units[-1].whole

    @property
    def gathered(self) -> int:
        """The most gathered bytes of a step."""
        return BLOCKS_AT_A_TIME * self.largest.gathered + self.units[-1].gathered


def make_plan(config: ViTConfig, world_size: int, compute_bytes: int = FP32_BYTES) -> Plan:
    """The memory of each of `world_size` ranks; a gathered element has `compute_bytes` bytes.

    The model is made on the meta device: it has shapes and no memory. No process group is needed.
    """
    with torch.device("meta"):
        model = VisionTransformer(config)

    def unit(name: str, params: Iterator[nn.Parameter] | list[nn.Parameter]) -> UnitPlan:
        shapes = [tuple(param.shape) for param in params]
        shard = sum(shard_numel(shape, world_size) for shape in shapes)
        numel = sum(map(math.prod, shapes))
        return UnitPlan(name, numel, shard * FP32_BYTES, shard * world_size * compute_bytes)

    units = [unit(f"blocks.{i}", block.parameters()) for i, block in enumerate(model.blocks)]
    own = [param for name, param in model.named_parameters() if not name.startswith("blocks.")]
    return Plan(world_size, (*units, unit("(root)", own)))


def shard_numel(shape: Sequence[int], world_size: int) -> int:
    """Elements of a rank's equal piece of a parameter, on the dim that `fully_shard` shards.

    That is dim 0, unless it pads over 3 % and over 1 MiB: then the one that pads least. Groups also
    align their parameters, by less than 1 KiB per unit, which is not counted.
    """
    numel = math.prod(shape)
    pieces = [math.ceil(size / world_size) * (numel // size) for size in shape]
    padding = pieces[0] * world_size - numel
    if padding <= SMALL_PADDING * numel or padding * FP32_BYTES <= SMALL_PADDING_BYTES:
        return pieces[0]
    return min(pieces)


def print_plan(plan: Plan, title: str) -> None:
    """A row for all blocks, which are alike, one for the root, and their sum; then the peaks."""
    block, root = plan.units[0], plan.units[-1]
    count = len(plan.units) - 1

    def row(name: str, units: Sequence[UnitPlan]) -> tuple[str, ...]:
        fields = ("shards", "gradients", "optimizer", "state", "gathered")
        sums = (sum(getattr(unit, field) for unit in units) for field in fields)
        return (name, f"{sum(unit.numel for unit in units):,}", *map(_gib, sums))

    header = ("unit, GiB per rank", "parameters", "shards", "gradients", "AdamW", "all", "gathered")
    rows = [
        row("each block", [block]),
        row(f"{count} blocks", plan.units[:-1]),
        row("(root)", [root]),
        row("model", plan.units),
    ]
    reporting.print_table(title, header, rows)
    whole = plan.total("whole")
    print(
        f"One process would hold {_gib(whole * (2 + ADAMW_STATES))} GiB; each of "
        f"{plan.world_size} ranks holds {_gib(plan.total('state'))}.\n"
        f"During construction, at most {_gib(plan.construction)} GiB: shards "
        f"{_gib(plan.total('shards'))}, one block {_gib(plan.largest.whole)}, parameters of "
        f"the root {_gib(root.whole)}.\n"
        f"In a step, at most {_gib(plan.gathered)} GiB more is gathered: {BLOCKS_AT_A_TIME} blocks "
        f"and the root.\nActivations and unreduced gradients take additional memory.",
        flush=True,
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.4f}"


# --- the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """A run, complete. `batch_size` images per step, over all ranks."""

    size: str
    image: int | None  # pixels a side; None: the size's own
    plan: bool
    world_size: int
    local_world_size: int
    steps: int
    batch_size: int
    precision: str
    lr: float
    seed: int
    device: str
    threads: int

    @property
    def model(self) -> ViTConfig:
        config = SIZES[self.size]
        return config if self.image is None else replace(config, image=self.image)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options; for a wrong one argparse prints a sentence and leaves with code 2."""
    parser = argparse.ArgumentParser(
        prog="vit_10b", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="10b", help="parameters (default: 10b)")
    add("--image", type=_count, metavar="PIXELS", help="a side of an image (default: the size's)")
    add("--plan", action="store_true", help="print what each rank would hold, and leave")
    add("--world-size", type=_count, help="ranks of --plan (default: 128)")
    add("--nproc", type=_count, help="processes to start (default: 2)")
    add("--steps", type=_count, default=2, help="optimizer steps (default: 2)")
    add("--batch-size", type=_count, help="images per step, over all ranks (default: 4 or more)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="dtype of compute")
    add("--lr", type=float, default=1e-4, help="learning rate (default: 1e-4)")
    add("--seed", type=int, default=0, help="fixes weights and images")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--threads", type=_count, help="CPU threads per rank (default: CPUs / ranks)")
    args = parser.parse_args(argv)
    if args.world_size is not None and not args.plan:
        parser.error("--world-size belongs to --plan; --nproc says how many processes to start")
    patch = SIZES[args.size].patch
    if args.image is not None and args.image % patch:
        parser.error(f"--image {args.image} is no multiple of a patch's {patch} pixels")
    if ranks is not None and args.nproc not in (None, ranks.world_size):
        parser.error(f"--nproc {args.nproc} contradicts the launcher's {ranks.world_size} ranks")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU that torch can use")
    given = ranks.world_size if ranks else args.nproc or 2
    world_size = (args.world_size or 128) if args.plan else given
    batch_size = args.batch_size or math.ceil(4 / world_size) * world_size
    if batch_size % world_size:
        parser.error(f"--batch-size {batch_size} does not divide over {world_size} ranks")
    local = ranks.local_world_size if ranks else world_size
    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else args.device
    return Options(
        size=args.size,
        image=args.image,
        plan=args.plan,
        world_size=world_size,
        local_world_size=local,
        steps=args.steps,
        batch_size=batch_size,
        precision=args.precision,
        lr=args.lr,
        seed=args.seed,
        device="cpu" if device == "auto" else device,
        threads=args.threads or max(1, cpu_count() // local),
    )


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 wrong usage, 128 + n ended by signal n, else a worker's failure."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        ranks = GivenRanks.from_environment()
    except UsageError as error:
        print(f"vit_10b: {error}.", file=sys.stderr)
        return 2
    options = parse(argv, ranks)
    if options.plan:
        if ranks is None or ranks.rank == 0:
            plan = _plan_of(options)
            print_plan(plan, f"{options.size}, {options.precision}, {options.world_size} ranks")
        return 0
    if ranks is not None:
        launch.run_as_worker(lambda: _train(options, ranks))
    return launch.run_workers(MODULE, argv, options.world_size, options.threads, name="vit_10b")


def _plan_of(options: Options) -> Plan:
    return make_plan(options.model, options.world_size, options.compute_dtype.itemsize)


# --- a worker ------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, until they are gone.

    Exact where a process's resident memory is not: that has what torch itself, allocators and the
    process group hold as well. `peak` is the most that was alive at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._ends: dict[int, int] = {}  # of each storage's memory, by its beginning

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor:
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        # A shard is a storage over a part of its group's: the same memory.
        if not size or any(first <= begin < end for first, end in self._ends.items()):
            return
        self._ends[begin] = begin + size
        weakref.finalize(storage, self._gone, begin)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, begin: int) -> None:
        self.live -= self._ends.pop(begin) - begin


@dataclass(frozen=True)
class Made:
    """The cost of construction on this rank, in bytes and seconds."""

    shards: int
    live_peak: int
    grown: int  # by which the peak of `reporting.peak_memory` rose
    seconds: float


def build_model(options: Options, device: torch.device) -> tuple[VisionTransformer, Made]:
    """The sharded model, made block by block, with the weights of one that is made whole."""
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(options.seed)
    before, begin = reporting.peak_memory(device), time.perf_counter()
    with LiveBytes() as count, device, deferred(None, {Block}, mp_policy=policy):
        model = VisionTransformer(options.model)
    seconds = time.perf_counter() - begin
    shards = sum(_local(param).nbytes for param in model.parameters())
    return model, Made(shards, count.peak, reporting.peak_memory(device) - before, seconds)


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def images_and_labels(
    config: ViTConfig, seed: int, step: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The whole batch of one step: fp32 [B, 3, S, S] and int64 [B], the same on every machine."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    images = torch.randn(batch_size, 3, config.image, config.image, generator=generator)
    return images, torch.randint(config.classes, (batch_size,), generator=generator)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> Tensor:
    """One optimizer step; this rank's mean loss, fp64 [] on the device."""
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(images).float(), labels)
    loss.backward()
    optimizer.step()
    return loss.detach().double()


def _train(options: Options, ranks: GivenRanks) -> int:
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with _process_group(options, ranks, device):
        show = ranks.rank == 0
        model, made = build_model(options, device)
        _print_construction(options, made, device, show)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
        share = options.batch_size // ranks.world_size
        mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
        for step in range(options.steps):
            begin = time.perf_counter()
            batch = images_and_labels(options.model, options.seed, step, options.batch_size)
            images, labels = (part[mine].to(device) for part in batch)
            loss = train_step(model, optimizer, images, labels)
            dist.all_reduce(loss)
            mean = loss.item() / ranks.world_size
            seconds = time.perf_counter() - begin
            if show:
                print(
                    f"step {step + 1}/{options.steps}  loss {mean:.4f}  {seconds:.2f} s", flush=True
                )
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss of step {step + 1} is {mean}: lower --lr")
        _print_end(options, model, optimizer, device, show)
    return 0


@contextmanager
def _process_group(options: Options, ranks: GivenRanks, device: torch.device) -> Iterator[None]:
    # NCCL refuses two ranks on one GPU.
    shared = device.type == "cuda" and torch.cuda.device_count() < options.local_world_size
    backend = "gloo" if device.type == "cpu" or shared else "nccl"
    launch.init_process_group(ranks, backend, device)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _of_all_ranks(values: Sequence[int], device: torch.device) -> list[list[int]]:
    mine = torch.tensor(values, device=device)
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)
    return [cast(list[int], row.tolist()) for row in each]


def _print_construction(options: Options, made: Made, device: torch.device, show: bool) -> None:
    plan = _plan_of(options)
    rows = _of_all_ranks([made.shards, made.live_peak, made.grown], device)
    if not show:
        return
    print(
        f"{options.size}: {plan.total('numel'):,} parameters, {options.precision}, "
        f"{options.world_size} rank(s) on {device.type}, threads per rank: {options.threads}; "
        f"made in {made.seconds:.1f} s, whole {reporting.format_bytes(plan.total('whole'))}"
    )
    form = reporting.format_bytes
    block, root = plan.largest.whole, plan.units[-1].whole
    where = "allocated" if device.type == "cuda" else "resident"
    reporting.print_table(
        "While the model was made",
        (
            "",
            "shards",
            "one block",
            "root's own",
            "sum",
            "peak, live tensors",
            f"{where}, grown by",
        ),
        [
            (
                f"rank {rank}",
                *map(form, (shards, block, root, shards + block + root, peak)),
                form(up),
            )
            for rank, (shards, peak, up) in enumerate(rows)
        ],
    )


def _print_end(
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    show: bool,
) -> None:
    plan, form = _plan_of(options), reporting.format_bytes
    held = reporting.state_bytes(model.parameters(), optimizer).rank
    rows = _of_all_ranks([held, reporting.peak_memory(device)], device)
    if show:
        planned = form(plan.total("state"))
        reporting.print_table(
            f"Parameters, gradients, optimizer; at most {form(plan.gathered)} gathered besides",
            ("", "planned", "held", "peak of the process"),
            [(f"rank {r}", planned, form(held), form(peak)) for r, (held, peak) in enumerate(rows)],
        )


if __name__ == "__main__":
    sys.exit(main())

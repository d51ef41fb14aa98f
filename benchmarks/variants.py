"""One model, sharded (or not) by each of the runtimes under comparison."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import megatron, workers
from fsdp2 import fsdp1
from fsdp2.core.device.backends import traits_of
from fsdp2.module import FSDPModule
from fsdp2.testing.blocks import BlockStack
from fsdp2.testing.null_group import NullGroup, Observer, c10d_cost, init_null_group, null_mesh
from fsdp2.testing.stand_in import device as stand_in

# fsdp2 with set_prefetch_window of so many units
WINDOWS = {"window1": 1, "window2": 2, "window3": 3}

# "none": no sharding, the floor that every runtime adds to. "torch": torch's FSDP2. "fsdp2": every
# parameter that can travels coalesced, as over legacy NCCL. "packed": all travel packed, as over
# gloo and nccl2. "kept": fsdp2 with set_keep_gradient_storage(True). "fsdp1": torch's FSDP1.
# "wrapped": fsdp2 by FSDP1's wrapper.
VARIANTS = (
    *("none", "torch", "fsdp2", "packed", "kept"),
    *("fsdp1", "wrapped", "ddp", "megatron", *WINDOWS),
)
OURS = ("fsdp2", "packed", "kept", *WINDOWS)
ALL_PACKED = 1 << 62  # bytes: no parameter is too large to be packed
IN_COMPUTE_DTYPE = ("none", "ddp", "megatron")  # the model itself, not only what it gathers

# "mixed": parameters gathered and used in bf16, gradients reduced in fp32
PRECISIONS = ("fp32", "mixed")

STEADY = 3  # steps until buffers are made and the order of units is known

DEVICES = ("cpu", "cuda", stand_in.NAME)
RANK_TIMEOUT = datetime.timedelta(minutes=2)  # of a collective, should another rank have died


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward, backward and `zero_grad` of a model and its input, which needs a gradient."""

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return step


def prepare_process(device_type: str, world_size: int, *, c10d: bool = False) -> torch.device:
    """Set this process up to be rank 0 of `world_size`, with null collectives."""
    device = _prepare_device(device_type, 0)
    init_null_group(world_size, observer=c10d_cost() if c10d else None, device_type=device_type)
    return device


def prepare_rank(spec: dict[str, Any], ranks: int) -> torch.device:
    """Set this process up to be a real rank; a GPU each, over NCCL.

    Args:
        spec: has "device", and what `workers.join_ranks` needs.
        ranks: how many there are.
    """
    device = _prepare_device(spec["device"], spec["rank"])
    workers.join_ranks(spec, ranks, RANK_TIMEOUT, backend_of(device.type))
    return device


def backend_of(device_type: str) -> str:
    """The backend that real ranks on such a device communicate with; made known to torch."""
    if device_type == stand_in.NAME:
        from fsdp2.testing.stand_in import group

        group.register()
        return group.COALESCING
    return "nccl" if device_type == "cuda" else "gloo"


def nccl_backends() -> tuple[str, ...]:
    """What "nccl" may stand for in this torch, by ``TORCH_DIST_USE_NCCL2``.

    By class: torch 2.15 makes the name "nccl2" known when somebody asks for it, and not before.
    """
    return ("nccl2", "legacy") if hasattr(dist, "ProcessGroupNCCL2") else ("nccl",)


def coalesces(device: torch.device) -> bool:
    """Whether groups travel coalesced over this process's default group."""
    assert dist.group.WORLD is not None
    return traits_of(dist.group.WORLD, device).coalesces


def _prepare_device(device_type: str, index: int) -> torch.device:
    torch.manual_seed(0)
    # Gathered memory holds anything, and arithmetic on denormal numbers is slow on a CPU.
    torch.set_flush_denormal(True)
    if device_type == stand_in.NAME:
        device = stand_in.load()
    elif device_type == "cuda":
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
    return device


def place(
    model: nn.Module,
    variant: str,
    precision: str,
    world_size: int,
    device: torch.device,
    **arguments: Any,
) -> nn.Module:
    """Shard each block of a model on the meta device, then its root, and fill it on `device`.

    Without sharding (and for DDP, which has no mixed precision of this kind, and megatron-fsdp,
    which takes the model's dtype for computation) the model itself is in the compute dtype.
    ``arguments`` are passed on to `fully_shard`.
    """
    shard(model, variant, precision, world_size, device, **arguments)
    return materialise(model, variant, precision, world_size, device)


def shard(
    model: nn.Module,
    variant: str,
    precision: str,
    world_size: int,
    device: torch.device,
    **arguments: Any,
) -> None:
    """The first half of `place`: what can be done to a model that has no memory yet."""
    mixed = precision == "mixed"
    if variant == "torch" or variant in OURS:
        fully_shard, policy = fsdp2_api(variant)
        mesh = null_mesh if is_null() else init_mesh
        options: dict[str, Any] = {"mesh": mesh(world_size, device.type), **arguments}
        if mixed:
            options["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if isinstance(model, FSDPModule) and isinstance(model, BlockStack):
            # Its small parameters stand for large ones.
            model.set_packing_threshold(ALL_PACKED if variant == "packed" else 0)
        if variant == "kept":
            model.set_keep_gradient_storage(True)
        if variant in WINDOWS:
            model.set_prefetch_window(WINDOWS[variant])
    elif variant in IN_COMPUTE_DTYPE:
        model.to(input_dtype(variant, precision))
    elif variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: choose among {', '.join(VARIANTS)}")


def materialise(
    model: nn.Module, variant: str, precision: str, world_size: int, device: torch.device
) -> nn.Module:
    """The second half of `place`: memory, values, and the runtimes that have to see those."""
    model.to_empty(device=device)
    model.reset_parameters()
    if variant == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if variant in ("fsdp1", "wrapped"):
        return _fsdp1(model, variant, precision == "mixed", device)
    if variant == "megatron":
        return megatron.wrap(model, precision == "mixed", world_size, device)
    return model


def steady_step(
    model: nn.Module, variant: str, precision: str, world_size: int
) -> tuple[nn.Module, Callable[[], None]]:
    """A model of blocks, placed on the CPU, and its step, which has been run until it is steady."""
    model = place(model, variant, precision, world_size, torch.device("cpu"))
    dtype = input_dtype(variant, precision)
    x = torch.randn(4, model.width, dtype=dtype, requires_grad=True)
    step = step_of(model, x)
    for _ in range(STEADY):
        step()
    return model, step


def is_null() -> bool:
    """Whether collectives of this process move nothing."""
    return isinstance(dist.group.WORLD, NullGroup)


def init_mesh(world_size: int, device_type: str) -> DeviceMesh:
    """Of all real ranks."""
    return init_device_mesh(device_type, (world_size,))


def observe(model: nn.Module, observer: Observer | None) -> None:
    """Let ``observer`` see the collectives of a placed model from now on; ``None``: nobody.

    fsdp2 keeps the methods that it found in its process group, so that it has to look again.
    """
    # Not at the top: other variants are without fsdp2.
    from fsdp2.core.modules.registry import records_below
    from fsdp2.core.schedule.group import ROUTE

    world = dist.group.WORLD
    assert isinstance(world, NullGroup)
    world.observe(observer)
    groups = [group for record in records_below(model) for group in record.unit.own_groups]
    found = {id(group.collectives): group.collectives for group in groups}
    for collectives in found.values():
        collectives.__init__(collectives.group, collectives.device, collectives._asynchronous)
    for group in groups:  # bind gathers and reductions to the methods found now
        group.stale = ROUTE
        if group.bound is not None:
            group.bind_reductions()


def input_dtype(variant: str, precision: str) -> torch.dtype:
    """The dtype of a model's floating-point inputs: sharding runtimes cast them themselves."""
    in_bf16 = precision == "mixed" and variant in IN_COMPUTE_DTYPE
    return torch.bfloat16 if in_bf16 else torch.float32


def fsdp2_api(variant: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`fully_shard` and `MixedPrecisionPolicy` of torch, or else of fsdp2; imports them."""
    if variant == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from fsdp2 import MixedPrecisionPolicy, fully_shard
    return fully_shard, MixedPrecisionPolicy


def _fsdp1(model: nn.Module, variant: str, mixed: bool, device: torch.device) -> nn.Module:
    """FSDP1, wrapping the same modules: torch's, or fsdp2's. torch's has to see the whole model."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    api: Any = torch.distributed.fsdp if variant == "fsdp1" else fsdp1
    policy = api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped: nn.Module = api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=policy if mixed else None,
        use_orig_params=True,
        device_id=device,
    )
    if variant == "wrapped":
        wrapped.set_packing_threshold(0)  # as for the others of ours
    return wrapped

"""One model, sharded (or not) by each of the runtimes under comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import harness
from fsdp2 import graph_mode
from fsdp2.testing.null_group import NullGroup, fill_gathered, init_null_group, null_mesh
from fsdp2.testing.stand_in import device as stand_in
from fsdp2.testing.stand_in import group

WINDOWS = {"window1": 1, "window2": 2, "window3": 3}
"""fsdp2 that prefetches so many units."""
OURS = ("fsdp2", "packed", "graph", *WINDOWS)
VARIANTS = ("none", "torch", *OURS, "fsdp1")
"""none: not sharded, the floor that every runtime adds to. torch, fsdp1: torch's FSDP2 and FSDP1.
fsdp2: each parameter that can be sent coalesced is, as over legacy NCCL. packed: all parameters of
a unit are sent in one buffer, as over gloo and nccl2. graph: fsdp2's graph mode; compiled, it is
one graph of the whole model."""
ALL_PACKED = 1 << 62  # bytes: no parameter is too large to be packed
PRECISIONS = ("fp32", "mixed")
"""mixed: parameters gathered and used in bf16, gradients reduced in fp32."""
DEVICES = ("cpu", "cuda", stand_in.NAME)


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward, backward and `zero_grad` of a model and its input, which needs a gradient."""

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return step


class Filling:
    """Lets gathers copy rank 0's rows to all ranks' places while it is ``on``."""

    on = False

    def __call__(self, *collective: Any) -> None:
        if self.on:
            fill_gathered(*collective)


def prepare_process(
    device_type: str, world_size: int, observer: Filling | None = None
) -> torch.device:
    """Set this process up to be rank 0 of ``world_size``, with null collectives."""
    device = _device(device_type, 0)
    init_null_group(world_size, observer=observer, device_type=device_type)
    return device


def prepare_rank(spec: dict[str, Any], ranks: int) -> torch.device:
    """Set this process up to be a real rank, over NCCL with a GPU each, or over gloo."""
    device = _device(spec["device"], spec["rank"])
    harness.join_ranks(spec, ranks, backend_of(device.type))
    return device


def backend_of(device_type: str) -> str:
    """The backend by which real ranks on such a device communicate; made known to torch."""
    if device_type == stand_in.NAME:
        group.register()
        return group.COALESCING
    return "nccl" if device_type == "cuda" else "gloo"


def _device(device_type: str, index: int) -> torch.device:
    torch.manual_seed(0)
    # Gathered memory holds anything, and arithmetic on denormal numbers is slow on a CPU.
    torch.set_flush_denormal(True)
    if device_type == stand_in.NAME:
        return stand_in.load()
    if device_type == "cuda":
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    torch.set_num_threads(1)
    return torch.device("cpu")


def place(
    model: nn.Module,
    variant: str,
    precision: str,
    world_size: int,
    device: torch.device,
    **arguments: Any,
) -> nn.Module:
    """Shard each block of a model on the meta device, then its root, and fill it on ``device``.

    Without sharding the model itself is in the compute dtype. ``arguments`` are passed on to
    `fully_shard`.
    """
    shard(model, variant, precision, world_size, device, **arguments)
    return materialise(model, variant, precision, device)


def shard(
    model: nn.Module,
    variant: str,
    precision: str,
    world_size: int,
    device: torch.device,
    **arguments: Any,
) -> None:
    """The first half of `place`: what can be done to a model that has no memory yet."""
    if variant == "none":
        model.to(input_dtype(variant, precision))
    elif variant == "torch" or variant in OURS:
        fully_shard, policy = fsdp2_api(variant)
        if isinstance(dist.group.WORLD, NullGroup):
            mesh = null_mesh(world_size, device.type)
        else:
            mesh = init_device_mesh(device.type, (world_size,))
        options: dict[str, Any] = {"mesh": mesh, **arguments}
        if precision == "mixed":
            options["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, **options)
        root: Any = fully_shard(model, **options)
        if variant == "packed":
            root.set_tuning(pack_below=ALL_PACKED)
        elif variant in OURS and hasattr(model, "width"):  # its small parameters stand for large
            root.set_tuning(pack_below=0)
        if variant in WINDOWS:
            root.set_tuning(prefetch_window=WINDOWS[variant])
        if variant == "graph":
            graph_mode(root)
    elif variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: choose among {', '.join(VARIANTS)}")


def materialise(model: nn.Module, variant: str, precision: str, device: torch.device) -> nn.Module:
    """The second half of `place`: memory, values, and FSDP1, which has to see those."""
    model.to_empty(device=device)
    model.reset_parameters()  # type: ignore[operator]  # a method
    if variant != "fsdp1":
        return model
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mixed = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=mixed if precision == "mixed" else None,
        use_orig_params=True,
        device_id=device,
    )


def input_dtype(variant: str, precision: str) -> torch.dtype:
    """The dtype of a model's floating-point inputs: sharding runtimes cast them themselves."""
    return torch.bfloat16 if (variant, precision) == ("none", "mixed") else torch.float32


def fsdp2_api(variant: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`fully_shard` and `MixedPrecisionPolicy` of torch, or else of fsdp2; imports them."""
    if variant == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from fsdp2 import MixedPrecisionPolicy, fully_shard
    return fully_shard, MixedPrecisionPolicy

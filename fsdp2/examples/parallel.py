"""The mesh of ranks, and how tensor parallelism cuts each layer.

    ranks 0..7, --replicate 2 --tp 2:      replicate 0          replicate 1
                                       shard 0   shard 1     shard 0   shard 1
                                   tp   0 1       2 3         4 5       6 7

Ranks along `tp` see the same data, compute one layer together and exchange activations; they are
neighbors, so that the exchange stays inside a machine. Ranks along `shard` and `replicate` see
different data: parameters are sharded along `shard`, gradients are averaged over both.

    column-parallel                          row-parallel
    wq wk wv gate up   [B, T, D] -> [B, T, */T]   wo down   [B, T, */T] -> sum over tp -> [B, T, D]
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from fsdp2 import Levels

from .lora import LoRALinear
from .options import Options

_ROWWISE = ("wo", "down")


def make_mesh(options: Options) -> DeviceMesh:
    """All ranks, as (replicate, shard, tp); of the first and the last only those that are used."""
    dims = {"replicate": options.replicate, "shard": options.shard_size, "tp": options.tp}
    used = {name: size for name, size in dims.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(options.device, tuple(used.values()), mesh_dim_names=tuple(used))
    if options.tp > 1:
        # DTensor looks it up: gradient norms are summed over both dims by one all-reduce, not two.
        mesh["shard", "tp"]._flatten("shard_tp")
    return mesh


def data_parallel_mesh(mesh: DeviceMesh, levels: bool = False) -> DeviceMesh | Levels:
    """The part of `mesh` that `fully_shard` takes: all but tensor parallelism."""
    names = mesh.mesh_dim_names or ()
    if "replicate" not in names:
        return mesh["shard"]
    both = mesh["replicate", "shard"]
    return Levels(both) if levels else both


def tensor_parallel(part: nn.Module, mesh: DeviceMesh) -> None:
    """Make `part`'s parameters DTensors of which each rank along `mesh`, 1-D, holds its share.

    Every rank has filled the part with the same full weights and keeps its share of its own copy
    (``src_data_rank=None``).
    """
    parallelize_module(part, mesh, plan(part), src_data_rank=None)


def plan(part: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """How to cut one of the model's parts: embedding, block, last norm or head.

    Between layers activations are whole on every rank, hence of any length; the norms' weights are
    DTensors too, so that one optimizer and one gradient norm have parameters on one mesh only.
    """
    if isinstance(part, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    if isinstance(part, nn.RMSNorm):
        return ReplicateParallel()
    if isinstance(part, nn.Linear):
        return ColwiseParallel(output_layouts=Replicate())  # the head: whole logits
    styles: dict[str, ParallelStyle] = {}
    for path, module in part.named_modules():
        rowwise = path.endswith(_ROWWISE)
        if isinstance(module, nn.RMSNorm):
            styles[path] = ReplicateParallel()
        elif isinstance(module, LoRALinear):
            # The adapter's narrow side is whole on every rank; its wide side is cut like the base.
            styles[f"{path}.base"] = RowwiseParallel() if rowwise else ColwiseParallel()
            styles[f"{path}.lora_a"] = RowwiseParallel() if rowwise else ReplicateParallel()
            styles[f"{path}.lora_b"] = ReplicateParallel() if rowwise else ColwiseParallel()
        elif isinstance(module, nn.Linear) and path not in styles:
            styles[path] = RowwiseParallel() if rowwise else ColwiseParallel()
    return styles


class ReplicateParallel(PrepareModuleInputOutput):
    """Whole on every rank: the same input, the same weights, the same output and gradients."""

    def __init__(self) -> None:
        whole = Replicate()
        super().__init__(
            input_layouts=whole,
            desired_input_layouts=whole,
            output_layouts=whole,
            desired_output_layouts=whole,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return super()._apply(distribute_module(module, device_mesh), device_mesh)

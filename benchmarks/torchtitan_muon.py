"""torchtitan's DistMuon on CPU ranks, for `benchmarks.muon`: needs ``torchtitan>=0.3``.

It takes one CUDA device per process and packs, sends and updates on two streams. Here its check of
the device says yes, and streams and events do nothing: its packing, messages and arithmetic are
its own, and nothing overlaps, as on gloo nothing of ours does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn


class _Nothing:
    """A stream or an event."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object = None) -> None: ...


@contextlib.contextmanager
def _on_cpu(optimizer_class: Any) -> Iterator[None]:
    device = SimpleNamespace(
        Stream=_Nothing,
        Event=_Nothing,
        current_stream=lambda device=None: _Nothing(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    cpu = torch.device("cpu")
    with (
        mock.patch.object(optimizer_class, "_validate_parameter_storage", return_value=cpu),
        mock.patch.object(torch, "get_device_module", return_value=device),
    ):
        yield


def make(model: nn.Sequential) -> torch.optim.Optimizer:
    """DistMuon of a sharded model whose children are units of matrices alone: a bucket per unit."""
    from torchtitan.distributed.flex_shard import (
        BucketConfig,
        ComputeLayout,
        Owned,
        build_dist_muon,
        dist_muon,
    )

    names, params = zip(*model.named_parameters(), strict=True)
    (axis,) = params[0].device_mesh.mesh_dim_names
    owned = ComputeLayout(shardings_by_mesh_axis={axis: Owned()})
    buckets = [
        BucketConfig(patterns=(f"{unit}.*",), name=unit) for unit, _ in model.named_children()
    ]
    with _on_cpu(dist_muon.DistMuon):
        return build_dist_muon(
            [{"params": params, "param_names": names}],
            compute_sharding_by_fqn=dict.fromkeys(names, owned),
            bucket_configs=buckets,
        )

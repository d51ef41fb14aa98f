"""Offloading on a CPU mesh, where shards are in CPU memory anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fsdp2.sharding import assembly


@contextmanager
def forced_offload() -> Iterator[None]:
    """While this is active, `fully_shard` takes an offload policy at its word on a CPU mesh too."""
    with mock.patch.object(assembly, "_effective_offload", lambda offload, device: offload):
        yield

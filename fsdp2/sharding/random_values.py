"""Random operators on shards that are on the CPU draw what they draw on the full tensor.

    weight.uniform_(-1, 1)   rows 4 to 7 of 8 are here
        draw 8 rows ── keep rows 4 to 7      every rank draws the same numbers, and advances alike

torch draws the rows of an accelerator's shards at different offsets of one random stream. It leaves
the CPU's as they come: with one seed, all ranks draw the same rows, and with a seed per rank,
replicas differ. It asks one object of the process, its tracker, to surround such operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed.tensor._random as torchs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.core.device.collectives import gather_numbers
from fsdp2.core.layout.mesh import part_of

_CPU = torch.device("cpu")
_LIKE = {
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
}


def draw_as_unsharded() -> None:
    """From now on, random operators on CPU shards draw full tensors, if no tracker is there."""
    if torchs._rng_tracker is None:
        torchs._rng_tracker = _Tracker()


class _Tracker(torchs.OffsetBasedRNGTracker):
    """torch's for an accelerator's meshes, whose shards may be offloaded; ours on the CPU."""

    def __init__(self) -> None:  # torch's asks for an accelerator
        self._use_distribute_region = True
        self._of_accelerator: torchs.OffsetBasedRNGTracker | None = None

    @contextlib.contextmanager
    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            if spec.mesh.device_type != "cpu":
                if self._of_accelerator is None:
                    self._of_accelerator = torchs.OffsetBasedRNGTracker(spec.mesh)
                around.enter_context(self._of_accelerator._distribute_region(spec, generator))
            around.enter_context(_FullDraws(spec, generator or torch.default_generator))
            yield


class _FullDraws(TorchDispatchMode):
    """Replaces a random operator on this rank's rows by one on the full tensor."""

    def __init__(self, spec: DTensorSpec, generator: torch.Generator) -> None:
        super().__init__()
        self._spec = spec
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        rows, given = args[0], dict(kwargs or {})
        fills = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if not (fills or func in _LIKE) or type(rows) is not Tensor or rows.device != _CPU:
            return func(*args, **given)
        meta = self._spec.tensor_meta
        assert meta is not None
        offsets, lengths = part_of(self._spec.mesh, self._spec.placements, meta.shape)
        if lengths != tuple(rows.shape):  # a view of which torch knows another shape
            return func(*args, **given)
        full = torch.empty_strided(meta.shape, meta.stride, dtype=rows.dtype)
        if fills:
            given["generator"] = self._generator
        with _state_of_the_first(self._generator, self._spec.mesh):
            drawn: Tensor = func(full, *args[1:], **given)
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            drawn = drawn.narrow(dim, start, length)
        return rows.copy_(drawn) if fills else drawn.clone()


@contextlib.contextmanager
def _state_of_the_first(generator: torch.Generator, mesh: DeviceMesh) -> Iterator[None]:
    """The state of the mesh's first rank; another one of this rank's is put back afterwards."""
    own = generator.get_state()
    state = own
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            numbers = state.view(torch.int64).tolist()
            first = gather_numbers(mesh.get_group(dim), numbers, _CPU)[0]
            state = torch.tensor(first, dtype=torch.int64).view(torch.uint8)
    if torch.equal(state, own):
        yield
        return
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(own)

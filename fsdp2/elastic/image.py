"""A value for a peer: a head that says what it is, and its tensors' bytes one after the other.

    head    JSON: the value with its types (`fsdp2.checkpoint.values`), a `Part` per tensor, layout
    bytes   [ tensor 0 | tensor 1 | … ]     each as it lies in memory on its rank: nothing is copied

A DTensor is this rank's rows and how they are spread; who unpacks it has a mesh of the same ranks.
Heads run no code. Which ranks a mesh has counts within a group, so the same rank of another group
has the same mesh.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2.checkpoint.folder import Json
from fsdp2.checkpoint.snapshots import Nested
from fsdp2.checkpoint.values import Packed, Value, unpacked
from fsdp2.core.errors import coded
from fsdp2.core.facts import local_of, wrap_local

MeshKey = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Names of a mesh's dims, its shape, and its ranks in order."""

Layout = Mapping[str, str]
"""By name of a tensor, what a rank has of it, in words."""


@dataclass(frozen=True)
class Part:
    """A tensor of an image: this rank's rows."""

    dtype: str
    shape: Sequence[int]
    order: Sequence[int]  # of dims in memory, the first outermost
    spread: Nested | None = None  # of a DTensor, see `_spread_of`

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return prod(self.shape) * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def memory(self) -> Tensor:
        """New CPU memory for the rows, contiguous in ``order``."""
        return torch.empty([self.shape[dim] for dim in self.order], dtype=self._dtype)

    def tensor(self, memory: Tensor, meshes: Mapping[MeshKey, DeviceMesh]) -> Tensor:
        """The tensor whose rows are in memory that `memory` has made."""
        rows = memory.permute([self.order.index(dim) for dim in range(len(self.order))])
        return rows if self.spread is None else wrap_local(rows, self._spec(meshes))

    def _spec(self, meshes: Mapping[MeshKey, DeviceMesh]) -> DTensorSpec:
        assert self.spread is not None
        names, shape, ranks = self.spread["mesh"]
        key = (tuple(names), tuple(shape), tuple(ranks))
        if key not in meshes:
            raise coded(
                ValueError,
                "elastic-mesh",
                f"a peer has a DTensor on the ranks {ranks} of a mesh {shape}, but this group has "
                f"no parameter on such a mesh; start groups with equally many ranks and the same "
                f"sharding",
            )
        placements = tuple(_placement(kind, at) for kind, *at in self.spread["placements"])
        meta = TensorMeta(
            torch.Size(self.spread["shape"]), tuple(self.spread["stride"]), self._dtype
        )
        return DTensorSpec(meshes[key], placements, tensor_meta=meta)


@dataclass(frozen=True)
class Head:
    """The description of an image."""

    step: int  # how many were committed before
    token: str  # no other image has it
    layout: Layout
    content: Json = None  # the value, without its tensors
    parts: Sequence[Part] = ()
    refusal: str = ""  # why there is no value

    @classmethod
    def decoded(cls, data: bytes) -> Head:
        """The head that `encoded` has written."""
        fields = json.loads(data)
        fields["parts"] = [Part(**part) for part in fields["parts"]]
        return cls(**fields)

    def encoded(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    def starts(self) -> list[int]:
        """The offset of each tensor's bytes, and the end of the last one's."""
        return list(itertools.accumulate((part.nbytes for part in self.parts), initial=0))

    def value(self, memories: Sequence[Tensor], meshes: Mapping[MeshKey, DeviceMesh]) -> Value:
        """The value, with tensors whose bytes are in ``memories``."""
        pairs = zip(self.parts, memories, strict=True)
        tensors = {str(at): part.tensor(memory, meshes) for at, (part, memory) in enumerate(pairs)}
        return unpacked(self.content, tensors)


@dataclass
class Image:
    """A value of one committed step, to be read while its tensors stay as they are."""

    head: Head
    rows: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, step: int, value: Value, layout: Layout) -> Image:
        """Views of a value's tensors; one that has gaps in memory is copied."""
        numbers = itertools.count()
        found = Packed(value, lambda *_: str(next(numbers)))
        if found.wrong:
            raise coded(
                ValueError,
                "elastic-code",
                f"{found.wrong[0]} cannot be sent to a peer, because loading it would run code; "
                f"build states from numbers, strings, bytes, tensors and containers of them",
            )
        parts, rows = [], []
        for tensor in found.tensors.values():
            local = local_of(tensor).detach()
            order = _order_of(local)
            laid_out = local.permute(order).contiguous()
            name = str(local.dtype).removeprefix("torch.")
            parts.append(Part(name, list(local.shape), order, _spread_of(tensor)))
            rows.append(laid_out)
        head = Head(step, secrets.token_hex(8), layout, found.content, parts)
        return cls(head, rows)

    @classmethod
    def of_refusal(cls, step: int, layout: Layout, sentence: str) -> Image:
        """In the place of a value that cannot be sent: why not."""
        return cls(Head(step, secrets.token_hex(8), layout, refusal=sentence))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.head.starts()[-1]

    def pieces(self, start: int, size: int) -> Iterator[tuple[int, memoryview]]:
        """(where it begins, bytes) of pieces from ``start`` on; a piece is of one tensor.

        Bytes of a device come through one buffer of ``size``: a piece is valid until the next.
        """
        buffer: Tensor | None = None
        for rows, begin in zip(self.rows, self.head.starts(), strict=False):
            for at in range(max(0, start - begin), rows.nbytes, size):
                length = min(size, rows.nbytes - at)
                if rows.device.type == "cpu":
                    yield begin + at, memory_of(rows)[at : at + length]
                    continue
                if buffer is None:
                    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                source = rows.view(-1).view(torch.uint8)[at : at + length]
                buffer[:length].copy_(source)
                yield begin + at, memory_of(buffer)[:length]


def memory_of(rows: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, which must outlive them."""
    if not rows.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr())).cast("B")


def meshes_of(tensors: Iterable[Tensor]) -> dict[MeshKey, DeviceMesh]:
    """The meshes that DTensors lie on."""
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return {_key_of(mesh): mesh for mesh in meshes}


def described(tensor: Tensor) -> str:
    """This rank's part of a tensor, in words that two ranks share if they have the same."""
    local = local_of(tensor)
    text = f"{str(local.dtype).removeprefix('torch.')} {list(local.shape)}"
    if not isinstance(tensor, DTensor):
        return text
    mesh = tensor.device_mesh
    at, ranks = tuple(mesh.get_coordinate() or ()), tuple(mesh.shape)
    return f"{text} of {list(tensor.shape)}, {tensor.placements} at {at} of a mesh {ranks}"


# ---- how tensors lie, and how they are spread


def _order_of(local: Tensor) -> list[int]:
    """The order of its dims in memory, the first outermost."""
    strides = local.stride()
    return sorted(range(local.ndim), key=lambda dim: (-strides[dim], dim))


def _key_of(mesh: DeviceMesh) -> MeshKey:
    names = mesh.mesh_dim_names or ()
    return tuple(names), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())


def _spread_of(tensor: Tensor) -> Nested | None:
    """Shape, stride, mesh and placements of a DTensor; ``None`` of any other tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "mesh": _key_of(tensor.device_mesh),
        "placements": [_written(placement) for placement in tensor.placements],
    }


def _written(placement: Placement) -> list[str | int]:
    if isinstance(placement, _StridedShard):
        return ["strided", placement.dim, int(placement.split_factor)]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    if placement.is_replicate():
        return ["replicate"]
    raise coded(
        ValueError,
        "elastic-partial",
        f"a DTensor that is {placement} cannot be sent to a peer; redistribute it to Shard or "
        f"Replicate",
    )


def _placement(kind: str, at: Sequence[int]) -> Placement:
    if kind == "strided":
        return _StridedShard(at[0], split_factor=at[1])
    return Shard(at[0]) if kind == "shard" else Replicate()

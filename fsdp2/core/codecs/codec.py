"""Codecs: rows of numbers become rows of bytes, and come back.

    numbers [rows, n]  ── encode ──>  message [rows, nbytes(n)] of uint8  ── decode ──>  numbers
                                                                         ── total  ──>  [n]

A row is what one rank sends to another, coded by itself: what a rank receives does not depend on
what the others receive. All are plain operators of torch, without a number that the host waits for.

    fp32, bf16   numbers of that dtype
    int8, int4   integers, and a scale for each block of neighbors; numbers i and 32 + i of a block
                 of int4 share a byte
        row   [ scale of block 0 | of block 1 | … | codes of block 0 | of block 1 | … | padding ]
    rotated      another codec's, of blocks of 128 times an orthonormal matrix: an outlier is spread
                 over its block before it sets a scale
"""

from __future__ import annotations

import math
import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp2.core.errors import coded
from fsdp2.core.pieces import ceil_div, round_up

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of numbers that a codec takes."""

ALIGNMENT = 16
"""Bytes of a row are a multiple of it, so that the next row's numbers are aligned, too."""


def check_coded(name: str, dtypes: Iterable[torch.dtype], wire: str) -> None:
    """Refuse a parameter that no codec takes: a dtype of its shard, rows or sums."""
    for dtype in dtypes:
        if dtype not in NUMBERS:
            raise coded(
                ValueError,
                "wire-format-dtype",
                f"parameter '{name}' cannot be sent as {wire}, which supports float32, bfloat16 "
                f"and float16, but not {dtype}; name it in set_wire_format(exact=…)",
            )


class Codec(ABC):
    """A format of numbers on the wire; ``name``: that which `set_wire_format` takes, if any."""

    name: ClassVar[str]

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` numbers."""

    @abstractmethod
    def encode(self, message: Tensor, numbers: Tensor) -> None:
        """Write ``numbers``, [rows, n] of a dtype of `NUMBERS`, to [rows, nbytes(n)] of uint8."""

    @abstractmethod
    def decoded(self, message: Tensor, numel: int) -> Tensor:
        """The numbers that ``message`` holds, [rows, ``numel``]; it may be a view of it."""

    def decode(self, numbers: Tensor, message: Tensor) -> None:
        """Write the numbers that ``message`` holds; as for `encode`."""
        numbers.copy_(self.decoded(message, numbers.shape[1]))

    def take_off(self, numbers: Tensor, message: Tensor) -> None:
        """Subtract the numbers that ``message`` holds; as for `encode`."""
        numbers.sub_(self.decoded(message, numbers.shape[1]))

    def total(self, sums: Tensor, message: Tensor) -> None:
        """Write the sums, [n], of all rows' numbers, summed in fp32 in the order of rows."""
        rows = self.decoded(message, sums.shape[0])
        # `torch.sum` takes an `out` only of the dtype in which it sums.
        if sums.dtype is torch.float32:
            torch.sum(rows, 0, dtype=torch.float32, out=sums)
        else:
            sums.copy_(rows.sum(0, dtype=torch.float32))


class Rounded(Codec):
    """bfloat16: off by 1/256 of a number at most; infinities and NaN stay what they are.

    It halves the bytes of fp32 gradients. Their sum is the fp32 sum of the rounded numbers: a
    collective that sums in bfloat16 would round after each addition.
    """

    name = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def nbytes(self, numel: int) -> int:
        return round_up(self.dtype.itemsize * numel, ALIGNMENT)

    def encode(self, message: Tensor, numbers: Tensor) -> None:
        self.decoded(message, numbers.shape[1]).copy_(numbers)

    def decoded(self, message: Tensor, numel: int) -> Tensor:
        """Exact, except into fp16: a view."""
        return message.view(self.dtype)[:, :numel]


class Whole(Rounded):
    """fp32: every number of fp32, bfloat16 and fp16 comes back as it was.

    Each rank gets only its own part, if a backend reduces and scatters by an all-reduce (gloo).
    """

    name = "fp32"
    dtype = torch.float32


ALONE = (Rounded.name, Whole.name)
"""Formats in which a number's message does not depend on its neighbors."""


# ---- integers and a scale per block

MOST = torch.finfo(torch.float32).max


class Blocks(Codec):
    """Integers with a scale per block; scales have fp32's range.

    A scale is the block's largest magnitude over the largest integer; a code is a number over its
    scale, rounded to nearest. Large numbers cost their own block precision, and no other.

    A number is off by half a scale at most: by 1/2 of its block's largest magnitude over
    ``largest``, and by what the rounding of a scale adds to that: the precision of its dtype times
    as much, and (``largest`` + 1) / 2 of the smallest numbers of that dtype. A block with an
    infinity or a NaN comes back as NaN, all of it: a check for numbers that are not finite sees it.
    """

    block: ClassVar[int]
    largest: ClassVar[int]
    scale_dtype: ClassVar[torch.dtype]

    def nbytes(self, numel: int) -> int:
        """Codes, and a scale per block."""
        return round_up(self._scale_bytes(numel) + self.code_bytes(numel), ALIGNMENT)

    @abstractmethod
    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` numbers."""

    @abstractmethod
    def _put(self, codes: Tensor, whole: Tensor) -> None:
        """Write whole numbers [rows, blocks, block] as codes [rows, bytes]."""

    @abstractmethod
    def _take(self, codes: Tensor, numel: int) -> Tensor:
        """Whole numbers [rows, blocks, block] in fp32 of ``codes``, in new memory."""

    def encode(self, message: Tensor, numbers: Tensor) -> None:
        """Scale and round to nearest, halves to even."""
        scales, codes = self._parts(message, numbers.shape[1])
        blocks = in_blocks(numbers.float(), self.block)
        scales.copy_(blocks.abs().amax(2).div_(self.largest))
        # By the scale as it is sent, rounded: receivers multiply by that one.
        scaled = blocks / scales.float().unsqueeze(2)  # of zeros by zero: NaN, which becomes 0
        self._put(codes, scaled.nan_to_num_(0.0).round_().clamp_(-self.largest, self.largest))

    def decoded(self, message: Tensor, numel: int) -> Tensor:
        """Code times scale, in fp32."""
        scales, codes = self._parts(message, numel)
        # A scale that is not finite makes NaN of every code, because each code of its block is 0.
        found = self._take(codes, numel).mul_(scales.float().unsqueeze(2))
        found.clamp_(-MOST, MOST)  # of fp32's largest a scale may be rounded up
        return found.flatten(1)[:, :numel]

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Views of scales [rows, blocks] and codes [rows, bytes]."""
        start = self._scale_bytes(numel)
        codes = message[:, start : start + self.code_bytes(numel)]
        return message[:, :start].view(self.scale_dtype), codes

    def _scale_bytes(self, numel: int) -> int:
        return ceil_div(numel, self.block) * self.scale_dtype.itemsize


def in_blocks(numbers: Tensor, block: int) -> Tensor:
    """[rows, n] -> [rows, blocks, block], padded with zeros."""
    missing = round_up(numbers.shape[1], block) - numbers.shape[1]
    whole = pad(numbers, (0, missing)) if missing else numbers
    return whole.unflatten(1, (-1, block))


class Bytes(Blocks):
    """Integers of 8 bits, off by 1/254 of the block's largest magnitude at most; scales are 3 %."""

    name = "int8"
    block = 128
    largest = 127
    scale_dtype = torch.float32

    def code_bytes(self, numel: int) -> int:
        """One per number."""
        return numel

    def _put(self, codes: Tensor, whole: Tensor) -> None:
        codes.view(torch.int8).copy_(whole.flatten(1)[:, : codes.shape[1]])

    def _take(self, codes: Tensor, numel: int) -> Tensor:
        return in_blocks(codes.view(torch.int8).float(), self.block)


class Nibbles(Blocks):
    """Integers of 4 bits, a scale in bf16 per 64 numbers: 4.25 bits per number.

    A number is off by 1/14 of its block's largest magnitude at most (and by 1 % of that more, as a
    bf16 scale is rounded). Numbers ``i`` of a block's two halves share a byte, so that all
    operators run over neighbors in memory.

    A larger block saves bytes and costs precision. A bit per number more halves the error; in these
    terms blocks of 64 cost least for numbers of a normal and of a Laplace distribution, of blocks
    of 16 to 256 (root of the mean square of the error, log2 of it plus bits per number: 32: 1.14
    and 1.46, 64: 1.04 and 1.42, 128: 1.03 and 1.49). A scale in bf16 changes none of these figures;
    in fp32 it would cost another quarter of a bit.
    """

    name = "int4"
    block = 64
    largest = 7
    scale_dtype = torch.bfloat16
    half = block // 2

    def code_bytes(self, numel: int) -> int:
        """One per two numbers of whole blocks."""
        return ceil_div(numel, self.block) * self.half

    def _put(self, codes: Tensor, whole: Tensor) -> None:
        halves = whole.unflatten(2, (2, self.half))
        # 8 is added to each: none is negative, so that their digits to the base 16 are they.
        both = torch.add(halves[:, :, 0], halves[:, :, 1], alpha=16).add_(8 + 16 * 8)
        codes.unflatten(1, (-1, self.half)).copy_(both)

    def _take(self, codes: Tensor, numel: int) -> Tensor:
        both = codes.unflatten(1, (-1, self.half))
        shape = (*both.shape[:2], self.block)
        whole = torch.empty(shape, dtype=torch.float32, device=codes.device)
        whole[:, :, : self.half].copy_(both & 15)
        whole[:, :, self.half :].copy_(both >> 4)
        return whole.sub_(8)


# ---- rotated

BLOCK = 128
"""Numbers that are rotated together: a block of 8 bits, or two of 4."""
SEED = 35
"""The seed of the signs. Python says which numbers follow from a seed, in all versions alike."""


class Rotated(Codec):
    """Another codec, of rotated numbers: times signs, the same on all ranks, and a Hadamard matrix.

    A rotation is linear: a receiver adds rotated numbers and rotates their sum back, once.

    The largest magnitude of a block that holds one outlier falls to 1/11 of it. The other numbers
    of the block are then off by less, and the outlier by more: the error is as large for each. A
    number that is not finite comes back as NaN of all 128. So do magnitudes above 3e37, whose
    rotation may leave the range of fp32.

    The matrix is made in the first use: its copy to a device is over when its call returns.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self._codec = codec
        self._device = device
        self._matrix: Tensor | None = None

    def nbytes(self, numel: int) -> int:
        return self._codec.nbytes(round_up(numel, BLOCK))

    def encode(self, message: Tensor, numbers: Tensor) -> None:
        """Rotate in fp32, then as the codec does."""
        rotated = in_blocks(numbers.float(), BLOCK) @ self._turn()
        self._codec.encode(message, rotated.flatten(1))

    def decoded(self, message: Tensor, numel: int) -> Tensor:
        """As the codec does, then rotate back."""
        rotated = self._codec.decoded(message, round_up(numel, BLOCK)).float()
        return self._back(rotated)[:, :numel]

    def total(self, sums: Tensor, message: Tensor) -> None:
        """As the codec does, then rotate back, once."""
        numel = sums.shape[0]
        rotated = self._turn().new_empty(1, round_up(numel, BLOCK))
        # The sum is rotated back, not each row: a rotation is linear.
        self._codec.total(rotated[0], message)
        sums.copy_(self._back(rotated)[0, :numel])

    def _turn(self) -> Tensor:
        if self._matrix is None:
            self._matrix = rotation(self._device)
        return self._matrix

    def _back(self, rotated: Tensor) -> Tensor:
        return (rotated.unflatten(1, (-1, BLOCK)) @ self._turn().T).flatten(1)


_matrices: weakref.WeakValueDictionary[torch.device, Tensor] = weakref.WeakValueDictionary()


def rotation(device: torch.device) -> Tensor:
    """The matrix [128, 128] in fp32: one for all that ask, as long as one of them has it."""
    found = _matrices.get(device)
    if found is None:
        # All models of the process share it, in whichever mode the first of them makes it.
        with torch.inference_mode(False):
            matrix = torch.ones(1, 1)
            while matrix.shape[0] < BLOCK:
                matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
            bits = random.Random(SEED).getrandbits(BLOCK)  # not a secret: the same on all ranks
            # Without signs, a block of equal numbers would become one outlier.
            signs = torch.tensor([1.0 - 2 * (bits >> i & 1) for i in range(BLOCK)])
            found = (signs.unsqueeze(1) * matrix / math.sqrt(BLOCK)).to(device)
        _matrices[device] = found
    return found


# ---- by name

GATHERED: dict[str, Codec] = {codec.name: codec for codec in (Bytes(), Nibbles())}
"""The codecs of parameters, by the name in `Wire.gather`. Much is lost of weights in 4 bits."""

REDUCED: dict[str, Codec] = {"fp32": Whole(), "bf16": Rounded(), **GATHERED}
"""Those of gradients, by the name in `Wire.reduce`."""


def codec_of(name: str, rotate: bool = False, device: torch.device | None = None) -> Codec:
    """The codec of gradients' messages, by the name of its format."""
    codec = REDUCED[name]
    return Rotated(codec, device or torch.device("cpu")) if rotate else codec

"""A byte or half a byte per number: integers, and a scale for each block of neighbors.

    row   [ scale of block 0 | of block 1 | … | codes of block 0 | of block 1 | … | padding ]
    int8     fp32, of 128 numbers               a byte each
    int4     bf16, of 64 numbers                numbers i and 32 + i of a block: one byte

A scale is the block's largest magnitude over the largest integer; a code is a number over its
scale, rounded to nearest. Large numbers cost their own block precision, and no other.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp2.core.codecs.codec import ALIGNMENT, Codec
from fsdp2.core.pieces import ceil_div, round_up

MOST = torch.finfo(torch.float32).max


class Blocks(Codec):
    """Integers with a scale per block; scales have fp32's range.

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

    def decode(self, numbers: Tensor, message: Tensor) -> None:
        """Code times scale, in fp32."""
        numbers.copy_(self._decoded(message, numbers.shape[1]))

    def take_off(self, numbers: Tensor, message: Tensor) -> None:
        """As it is decoded, without a copy."""
        numbers.sub_(self._decoded(message, numbers.shape[1]))

    def total(self, sums: Tensor, message: Tensor) -> None:
        sums.copy_(self._decoded(message, sums.shape[0]).sum(0))

    def _decoded(self, message: Tensor, numel: int) -> Tensor:
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

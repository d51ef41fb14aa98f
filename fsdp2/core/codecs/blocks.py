"""One byte per number: integers of 8 bits, and a scale for each block of neighbours.

    row   [ scale of block 0 | of block 1 | … | code of number 0 | of number 1 | … | padding ]
             fp32                               int8

A scale is the block's largest magnitude over 127; a code is a number over its scale, rounded to
nearest. Large numbers cost their own block precision, and no other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp2.core.codecs.codec import ALIGNMENT, Codec
from fsdp2.core.pieces import ceil_div, round_up

BLOCK = 128
"""Numbers that share a scale: 3 % of the bytes are scales."""
LARGEST = 127
MOST = torch.finfo(torch.float32).max


class Blocks(Codec):
    """Integers of 8 bits with a scale per block of 128 numbers.

    A number is off by 1/254 of its block's largest magnitude at most, and by 64 of fp32's smallest
    numbers (2**-149) more, since scales are rounded, too. A block with an infinity or a NaN comes
    back as NaN, all of it: a check for numbers that are not finite sees it.
    """

    name = "int8"

    def nbytes(self, numel: int) -> int:
        """One per number, and four per block."""
        return round_up(4 * ceil_div(numel, BLOCK) + numel, ALIGNMENT)

    def encode(self, message: Tensor, numbers: Tensor) -> None:
        """Scale and round to nearest, halves to even."""
        scales, codes = self._parts(message, numbers.shape[1])
        blocks = self._in_blocks(numbers.float())
        found = blocks.abs().amax(2) / LARGEST
        scales.copy_(found)
        scaled = blocks / found.unsqueeze(2)  # of zeros by zero: NaN, which becomes 0
        whole = scaled.nan_to_num_(0.0).round_().clamp_(-LARGEST, LARGEST)
        codes.copy_(whole.flatten(1)[:, : numbers.shape[1]])

    def decode(self, numbers: Tensor, message: Tensor) -> None:
        """Code times scale, in fp32."""
        numbers.copy_(self._decoded(message, numbers.shape[1]))

    def total(self, sums: Tensor, message: Tensor) -> None:
        """In fp32."""
        sums.copy_(self._decoded(message, sums.shape[0]).sum(0))

    def _decoded(self, message: Tensor, numel: int) -> Tensor:
        scales, codes = self._parts(message, numel)
        blocks = self._in_blocks(codes.float())  # new memory
        found = blocks.mul_(scales.unsqueeze(2))
        found.clamp_(-MOST, MOST)  # 127 times the scale of fp32's largest is infinite
        return found.flatten(1)[:, :numel]

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Views of scales [rows, blocks] and codes [rows, n]."""
        start = 4 * ceil_div(numel, BLOCK)
        scales = message[:, :start].view(torch.float32)
        return scales, message[:, start : start + numel].view(torch.int8)

    def _in_blocks(self, numbers: Tensor) -> Tensor:
        """[rows, n] -> [rows, blocks, BLOCK], behind the numbers zeros."""
        missing = round_up(numbers.shape[1], BLOCK) - numbers.shape[1]
        whole = pad(numbers, (0, missing)) if missing else numbers
        return whole.unflatten(1, (-1, BLOCK))

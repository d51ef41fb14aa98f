"""Floating-point numbers in messages: bfloat16, or fp32 without any loss.

bfloat16 halves the bytes of fp32 gradients. Their sum is the fp32 sum of the rounded numbers: a
collective that sums in bfloat16 would round after each addition. The benefit of fp32 is that each
rank gets only its own part, if a backend reduces and scatters by an all-reduce, as gloo does.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fsdp2.core.codecs.codec import ALIGNMENT, Codec
from fsdp2.core.pieces import round_up


class Rounded(Codec):
    """bfloat16: off by 1/256 of a number at most; infinities and NaN stay what they are."""

    name = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def nbytes(self, numel: int) -> int:
        return round_up(self.dtype.itemsize * numel, ALIGNMENT)

    def encode(self, message: Tensor, numbers: Tensor) -> None:
        self._numbers(message, numbers.shape[1]).copy_(numbers)

    def decode(self, numbers: Tensor, message: Tensor) -> None:
        """Exact, except into fp16."""
        numbers.copy_(self._numbers(message, numbers.shape[1]))

    def total(self, sums: Tensor, message: Tensor) -> None:
        rows = self._numbers(message, sums.shape[0])
        # `torch.sum` takes an `out` only of the dtype in which it sums.
        if sums.dtype is torch.float32:
            torch.sum(rows, 0, dtype=torch.float32, out=sums)
        else:
            sums.copy_(rows.sum(0, dtype=torch.float32))

    def _numbers(self, message: Tensor, numel: int) -> Tensor:
        return message.view(self.dtype)[:, :numel]


class Whole(Rounded):
    """fp32: every number of fp32, bfloat16 and fp16 comes back as it was."""

    name = "fp32"
    dtype = torch.float32


ALONE = (Rounded.name, Whole.name)
"""Formats in which a number's message does not depend on its neighbors."""

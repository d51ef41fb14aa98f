"""Codecs: rows of numbers become rows of bytes, and come back.

    numbers [rows, n]  ── encode ──>  message [rows, nbytes(n)] of uint8  ── decode ──>  numbers
                                                                         ── total  ──>  [n]

A row is what one rank sends to another, coded by itself: what a rank receives does not depend on
what the others receive. All are plain operators of torch, without a number that the host waits for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from fsdp2.core.errors import coded
from fsdp2.core.pieces import round_up

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
    def decode(self, numbers: Tensor, message: Tensor) -> None:
        """Write the numbers that ``message`` holds; as for `encode`."""

    def take_off(self, numbers: Tensor, message: Tensor) -> None:
        """Subtract the numbers that ``message`` holds, in fp32; as for `encode`."""
        decoded = torch.empty_like(numbers, dtype=torch.float32)
        self.decode(decoded, message)
        numbers.sub_(decoded)

    @abstractmethod
    def total(self, sums: Tensor, message: Tensor) -> None:
        """Write the sums, [n], of all rows' numbers, summed in fp32 in the order of rows."""


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
    """fp32: every number of fp32, bfloat16 and fp16 comes back as it was.

    Each rank gets only its own part, if a backend reduces and scatters by an all-reduce (gloo).
    """

    name = "fp32"
    dtype = torch.float32


ALONE = (Rounded.name, Whole.name)
"""Formats in which a number's message does not depend on its neighbors."""

"""A codec of rotated numbers: an outlier is spread over its block before it sets a scale.

    numbers ── blocks of 128 times a matrix ──> rotated ── encode ──> message
    message ── total ──> sums of rotated numbers ── times its transpose ──> sums

The matrix is orthonormal: signs, the same on all ranks, times a Hadamard matrix. A rotation is
linear, so that a receiver adds rotated numbers and rotates their sum back, once.
"""

from __future__ import annotations

import math
import random
import weakref

import torch
from torch import Tensor

from fsdp2.core.codecs.blocks import in_blocks
from fsdp2.core.codecs.codec import Codec
from fsdp2.core.pieces import round_up

BLOCK = 128
"""Numbers that are rotated together: a block of 8 bits, or two of 4."""
SEED = 35
"""The seed of the signs. Python says which numbers follow from a seed, in all versions alike."""


class Rotated(Codec):
    """Another codec, of rotated numbers.

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

    def decode(self, numbers: Tensor, message: Tensor) -> None:
        """As the codec does, then rotate back."""
        numbers.copy_(self._decoded(message, numbers.shape[1]))

    def take_off(self, numbers: Tensor, message: Tensor) -> None:
        numbers.sub_(self._decoded(message, numbers.shape[1]))

    def _decoded(self, message: Tensor, numel: int) -> Tensor:
        rotated = self._new(message.shape[0], numel)
        self._codec.decode(rotated, message)
        return self._back(rotated)[:, :numel]

    def total(self, sums: Tensor, message: Tensor) -> None:
        """As the codec does, then rotate back, once."""
        numel = sums.shape[0]
        rotated = self._new(1, numel)
        # The sum is rotated back, not each row: a rotation is linear.
        self._codec.total(rotated[0], message)
        sums.copy_(self._back(rotated)[0, :numel])

    def _turn(self) -> Tensor:
        if self._matrix is None:
            self._matrix = rotation(self._device)
        return self._matrix

    def _new(self, rows: int, numel: int) -> Tensor:
        return self._turn().new_empty(rows, round_up(numel, BLOCK))

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

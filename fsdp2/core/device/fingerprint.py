"""Fingerprints of contents: they show whether memory was written, whatever has written it.

Version counters do not: ``torch._foreach_*`` on DTensors, ``.data``, ``numpy()`` and collectives
leave them as they are (torch 2.11 to 2.15).

    bytes as int64, in blocks of 31 rows of 1021     sum of each column of each block
    a block that is not full                         the same
    a row that is not full                           as it is
    more than `_BLOCKS` blocks                       their sums, mixed by position, summed

Each byte is read once, as fast as memory is read. The sums are exact: a single changed bit always
changes one. `torch.hash_tensor` takes twice as long, without regard to order.

Values that change places change sums, unless all of them move by multiples of 1021 words within a
block. 1021 is prime: only rows of less than 31 words can do so, when they swap places with the
1021st after them. 31 is odd, so that the sign bits of a whole column do not cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

_WIDTH = 1021
_HEIGHT = 31
_BLOCKS = 32
"""Blocks whose sums are kept as they are: 261 KB. Few operators count more than few bytes then."""


def bind_fingerprint(tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """For the sums of some tensors' bytes, whenever it is called.

    A call reads the memory that the tensors, on one device, have now, once, and does not make the
    host wait. It returns an int64 tensor of one dim, for `differ`: a few KB, at most 280 KB per
    tensor. One that is not contiguous, or does not begin at a multiple of 8 bytes, is copied now.
    """
    # A forward may run inside `torch.func`, whose levels would wrap these tensors.
    with torch.no_grad(), torch._C._DisableFuncTorch():
        sums, rests = [], []
        for tensor in tensors:
            numbers, last = _as_integers(tensor)
            rows = int(numbers.numel()) // _WIDTH  # a tensor where `torch.jit.trace` looks on
            blocks, more = divmod(rows, _HEIGHT)
            full = blocks * _HEIGHT * _WIDTH
            if blocks:
                sums.append((numbers[:full].view(blocks, _HEIGHT, _WIDTH), 1))
            if more:
                sums.append((numbers[full : rows * _WIDTH].view(more, _WIDTH), 0))
            rests += [numbers[rows * _WIDTH :], last]
    return functools.partial(_read, sums, rests)


def _read(sums: Sequence[tuple[torch.Tensor, int]], rests: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad(), torch._C._DisableFuncTorch():
        found = [rest.long() for rest in rests if rest.numel()]
        for table, dim in sums:
            by_column = table.sum(dim)
            mixes = dim == 1 and len(by_column) > _BLOCKS
            found.append((_mixed(by_column) if mixes else by_column).view(-1))
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its bytes as int64, and those at its end that are less than 8."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = int(flat.numel()) // 8 * 8
    return flat[:words].view(torch.int64), flat[words:]


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    """One row of [blocks, columns]: products with odd numbers keep each bit, shifts carry it on."""
    place = torch.arange(len(sums), device=sums.device).mul_(2).add_(1).unsqueeze(1)
    factors = (place * 0x1E3779B97F4A7C15) | 1
    mixed = (sums ^ (sums >> 32)) * factors
    mixed ^= mixed >> 29
    return mixed.sum(0)


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A signed 64-bit number for the bytes of tensors, the same on any device; the host waits."""
    with torch.no_grad(), torch._C._DisableFuncTorch():
        # A single changed sum always changes this.
        return int(_mixed(bind_fingerprint(tensors)().unsqueeze(1)))


def differ(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> list[int]:
    """1 for each fingerprint that is not what it was, else 0; blocks the host once."""
    if not now or now[0].is_meta:  # a rehearsal writes nothing
        return [0] * len(now)
    if now[0].device.type == "cpu":
        return [int(not torch.equal(*pair)) for pair in zip(now, before, strict=True)]
    return differ_at_once(now, before)


def differ_at_once(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> list[int]:
    """As `differ` on an accelerator: few kernels, and one wait, for any number of fingerprints."""
    ends = [0, *accumulate(map(len, now))]
    unequal = torch.cat(list(now)) != torch.cat(list(before))
    counts: list[int] = torch.cat((unequal.new_zeros(1), unequal)).cumsum(0)[ends].tolist()
    return [int(after > upto) for upto, after in pairwise(counts)]

"""Fingerprints of contents: they show whether memory was written, whatever has written it.

Version counters do not: ``torch._foreach_*`` on DTensors, ``.data``, ``numpy()`` and collectives
leave them as they are (torch 2.11 to 2.15).

    bytes as int64, in rows of 1021   [ a b c … ]   sum of each row     a change anywhere
                                      [ d e f … ]   sum of each column  a change of order in a row
    the sums, mixed by their position, summed: one number

Sums of integers are exact, so that a single changed bit always changes the sum of its row. `torch`
sums 64-bit integers as fast as memory is read on a CPU, and `torch.hash_tensor` at half that speed,
without regard to order. 1021 is prime: rows of parameters have other lengths, so that a permutation
of them moves numbers to other rows and columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_WIDTH = 1021
_ROWS_IN_CACHE = 64
"""Rows that a CPU reads at a time, because both sums read them."""


def fingerprints(contents: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """One number for the bytes of each group of tensors: it does not make the host wait.

    Args:
        contents: groups of tensors, all on one device; they are read once.

    Returns:
        int64, [groups]: equal for equal bytes, whatever else is in ``contents``.
    """
    with torch.no_grad(), torch._C._DisableFuncTorch():
        sums, lengths = [], []
        for group in contents:
            found = [part for tensor in group for part in _sums(_as_integers(tensor))]
            sums += found
            lengths.append(sum(part.numel() for part in found))
        if not sums:
            return torch.zeros(len(contents), dtype=torch.int64)
        every = torch.cat(sums)
        if every.is_meta:  # a rehearsal
            return torch.zeros(len(contents), dtype=torch.int64)
        weights, owners = _positions(tuple(lengths), every.device)
        mixed = (every ^ (every >> 32)) * weights
        mixed ^= mixed >> 29
        return mixed.new_zeros(len(contents)).index_add_(0, owners, mixed)


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The number of one group of tensors: int64, of shape ``()``, on their device."""
    return fingerprints([tensors])[0]


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as int64, filled up with zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(torch.int64)


def _sums(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Sums of rows, those of columns, and what fills no row."""
    rows = numbers.numel() // _WIDTH
    rest = numbers[rows * _WIDTH :]
    if not rows:
        return [rest]
    table = numbers[: rows * _WIDTH].view(rows, _WIDTH)
    by_row = numbers.new_empty(rows)
    by_column = numbers.new_zeros(_WIDTH)
    at_a_time = _ROWS_IN_CACHE if table.device.type == "cpu" else rows
    for part, sums in zip(table.split(at_a_time), by_row.split(at_a_time), strict=True):
        torch.sum(part, 1, out=sums)
        by_column += part.sum(0)
    return [by_row, by_column, rest]


@functools.lru_cache(maxsize=64)
def _positions(lengths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """An odd factor for each sum, by its position in its group, and the group of each."""
    with torch.inference_mode(False):
        place = torch.cat([torch.arange(length, device=device) for length in lengths])
        factors = (place + 1) * 0x1E3779B97F4A7C15
        factors = (factors ^ (factors >> 30)) * 0x3F58476D1CE4E5B9
        owners = torch.arange(len(lengths), device=device)
        counts = torch.tensor(lengths, device=device)
        return factors | 1, owners.repeat_interleave(counts)

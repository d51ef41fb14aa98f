"""A fingerprint of tensors' contents: whether memory was written, whatever wrote it.

Version counters miss writes through ``.data``, ``to_local()``, ``torch._foreach_*`` and by
collectives. The bytes, in rows of `_WIDTH`, are multiplied with eight columns of fixed weights: one
product of int8 matrices, exact in int32, which reads each byte once. The few products are mixed,
each with its row, and summed. `torch.hash_tensor` would not do: its xor ignores positions, and
misses a change that is made twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

_WIDTH = 4096
_COLUMNS = 8
_FEWEST_ROWS = 17  # that CUDA's product takes
_HAS_PRODUCT = ("cpu", "cuda")
_ROWS_AT_ONCE = 1024  # where each byte becomes an int32 in memory
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that shows, but for a chance of about ``2**-60``, that contents or places differ.

    It does not synchronize the host with the device, and is equal on all devices for equal bytes.

    Args:
        tensors: on one device, of any dtypes. Those that are not contiguous are copied.

    Returns:
        int64, of shape ``()``, on the device of ``tensors``.
    """
    with torch.no_grad():
        products: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for tensor in tensors:
            data = tensor.detach().contiguous().view(-1).view(torch.int8)
            rows = data.numel() // _WIDTH
            if rows < _FEWEST_ROWS:
                rest.append(data)
                continue
            products.append(_products(data[: rows * _WIDTH].view(rows, _WIDTH)))
            rest.append(data[rows * _WIDTH :])
        joined = torch.cat(rest)
        rows = max(-(-joined.numel() // _WIDTH), _FEWEST_ROWS)
        filled = pad(joined, (0, rows * _WIDTH - joined.numel()))
        products.append(_products(filled.view(rows, _WIDTH)))
        return _sum_of(torch.cat(products))


def _products(rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes times the weights: ``(rows, _COLUMNS)``, int32."""
    weights = _weights(rows.device)
    if rows.device.type in _HAS_PRODUCT:
        return torch._int_mm(rows, weights.t())  # of this layout, as tensor cores want it
    parts = rows.split(_ROWS_AT_ONCE)
    columns = weights.int()
    return torch.cat(
        [torch.stack([(p * c).sum(1, dtype=torch.int32) for c in columns], 1) for p in parts]
    )


def _sum_of(products: torch.Tensor) -> torch.Tensor:
    """One number of all products; columns have weights, and rows are mixed with their places."""
    rows = torch.arange(len(products), device=products.device)
    return _mixed((products * _columns(products.device)).sum(1) + rows * _FACTORS[0]).sum()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Each int64 number as another one, all of whose bits depend on all bits (splitmix64)."""
    for factor, shift in zip(_FACTORS, (30, 27, 31), strict=True):
        numbers = numbers * factor
        numbers = numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))
    return numbers


def _draws(first: int, count: int) -> torch.Tensor:
    return _mixed(torch.arange(first, first + count))


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Fixed weights in [-127, 127], none 0: ``(_COLUMNS, _WIDTH)``, int8."""
    with _disable_current_modes(), torch.inference_mode(False):
        signed = (_draws(1, _COLUMNS * _WIDTH) & (2**31 - 1)) % 254 - 127
        signed += signed >= 0  # [0, 126] become [1, 127]
        return signed.view(_COLUMNS, _WIDTH).to(torch.int8).to(device)


@functools.cache
def _columns(device: torch.device) -> torch.Tensor:
    """Fixed weights of the products in a row, odd: ``(_COLUMNS,)``, int64."""
    with _disable_current_modes(), torch.inference_mode(False):
        return (_draws(-_COLUMNS, _COLUMNS) | 1).to(device)

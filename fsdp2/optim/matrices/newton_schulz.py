"""The nearest orthogonal matrix to each of several, by Muon's quintic Newton-Schulz iteration.

    X = G / |G|            transposed if there are more rows than columns
    X = a X + (b XXᵀ + c (XXᵀ)²) X                                            repeated

The operators and their order are those of ``torch.optim.Muon``, so that one matrix has the same
bits. Several matrices go through batched operators: on a CPU the bits are the same; on a GPU the
last bit may differ, because libraries choose kernels by shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of Keller Jordan's post, as in torch."""

EPS = 1e-7
STEPS = 5


def orthogonalized(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalize each matrix of [k, rows, columns], which is overwritten."""
    if len(stack) == 1:
        return _orthogonalized(stack[0], coefficients, steps, eps)[None]
    return _orthogonalized(stack, coefficients, steps, eps)


def _orthogonalized(
    given: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    a, b, c = coefficients
    tall = given.shape[-2] > given.shape[-1]
    x = given.mT if tall else given
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    multiplied: Callable[..., torch.Tensor] = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiplied(gram, gram, gram, beta=b, alpha=c)
        x = multiplied(x, polynomial, x, beta=a)
    return x.mT if tall else x


def flops(rows: int, columns: int, steps: int) -> float:
    """FLOPs of one matrix: per step, two products with it, and one of the smaller square."""
    small, large = sorted((rows, columns))
    return steps * (4.0 * small * small * large + 2.0 * small**3)

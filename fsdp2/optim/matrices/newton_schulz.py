"""The orthogonal matrix next to each of several, by the quintic Newton-Schulz iteration of Muon.

    X = G / |G|            with at most as many rows as columns: else of the transposed
    X = a X + (b XXᵀ + c (XXᵀ)²) X                                            a few times

The operators and their order are those of ``torch.optim.Muon``: on one matrix the bits are its.
Several go through the batched operators, with the same bits on a CPU; a GPU's may differ in the
last one, as libraries choose kernels by shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Those of Keller Jordan's post, as torch has them."""

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
    """FLOPs of one matrix: two products with it a step, and one of the smaller square."""
    small, large = sorted((rows, columns))
    return steps * (4.0 * small * small * large + 2.0 * small**3)

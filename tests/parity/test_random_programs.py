"""Random programs against the unsharded model: a few seeds, and every one that has failed once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.common.combinations import seldom
from tests.common.workers import ranks
from tests.parity import programs

FAILED_ONCE = {
    30: "an input that was a copy: a dataclass with caches that have gradients",
    66: "the same, in a later step",
    513: "zeros for what is unused: recomputed for the first of several forwards",
    1029: "side doors: notes ended with the backward of a unit that was called by itself",
}
"""By seed, on two ranks: what was wrong."""

FAILED_ONCE_ON_FOUR = {
    31: "side doors: notes ended with the first of several backwards",
    47: "a unit that raised, and was caught, counted as called where the root's forward ended",
}


@ranks(2)
@pytest.mark.parametrize("seed", [*range(4), *FAILED_ONCE])
def test_programs_on_two_ranks(seed: int) -> None:
    programs.Program(seed, dist.get_world_size()).run()


@ranks(4)
@pytest.mark.parametrize("seed", [0, *FAILED_ONCE_ON_FOUR])
def test_programs_on_four_ranks(seed: int) -> None:
    programs.Program(seed, dist.get_world_size()).run()


@ranks(2)
def test_a_program_notices() -> None:
    """Gradients that are divided by another number, and a parameter that one rank has changed."""
    program = programs.Program(0, 2)
    for unit in (*program.units, program.model):
        unit.set_gradient_divide_factor(3.0)
    with pytest.raises(AssertionError, match="elements differ"):
        program.run()
    program = programs.Program(0, 2)
    with torch.no_grad():
        next(program.plain.parameters()).add_(1e-6)
    with pytest.raises(AssertionError, match="elements differ"):
        program.run()


@ranks(2, 3, 4)
@pytest.mark.parametrize("seed", seldom(range(100, 115), extended=4))
def test_more_programs(seed: int) -> None:
    programs.Program(seed, dist.get_world_size()).run()

"""Optimizers that look at whole matrices, over shards: each matrix is whole on one rank alone.

base           MatrixOptimizer: a step, and what a subclass says of its matrices
muon           Muon, with torch's arguments and results
newton_schulz  the orthogonal matrix next to each of several
members        parameters as a step sees them: matrices, rows, gradients that ranks agree on
blocks         boxes of elements; matrices in a weight; which box each rank holds
owners         which rank owns a matrix; units that travel together
exchange       rows to owners and back, a message each way for a wave
elementwise    the other parameters, stepped as plain rows

momentum rows ──all-to-all──> whole matrices, each on its owner
                                 └─ update(matrix, state)
parameter rows <──all-to-all── updates
"""

from fsdp2.optim.matrices.base import MatrixOptimizer
from fsdp2.optim.matrices.muon import Muon
from fsdp2.optim.matrices.owners import MatrixOwners

__all__ = ["MatrixOptimizer", "MatrixOwners", "Muon"]

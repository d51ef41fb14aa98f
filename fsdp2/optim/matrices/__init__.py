"""Optimizers of whole matrices over shards: each matrix is gathered on one rank only, its owner.

muon           Muon, with torch's arguments and results
newton_schulz  the nearest orthogonal matrix to each of several
members        parameters in a step: matrices, rows, gradients
plan           messages of members whose gradients ranks agree on
blocks         boxes of elements: matrices in a weight, and the box of each rank
owners         which rank owns a matrix; units that share messages
exchange       rows to owners and back, one message per direction and wave
elementwise    other parameters, stepped as plain rows

momentum rows ──all-to-all──> whole matrices, each on its owner
                                 └─ update(matrix, state)
parameter rows <──all-to-all── updates
"""

from fsdp2.optim.matrices.muon import Muon
from fsdp2.optim.matrices.owners import MatrixOwners

__all__ = ["MatrixOwners", "Muon"]

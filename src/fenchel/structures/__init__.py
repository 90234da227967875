"""Sets of structures with a batched MAP oracle, and SparseMAP over them."""

from fenchel.structures.base import Structure
from fenchel.structures.chain import Chain
from fenchel.structures.matching import Matching
from fenchel.structures.sparsemap import Mixture, SparseMAP
from fenchel.structures.subsets import AtMost, SequentialSubsets, Share, Subsets
from fenchel.structures.tree import DependencyTree

__all__ = [
    "AtMost",
    "Chain",
    "DependencyTree",
    "Matching",
    "Mixture",
    "SequentialSubsets",
    "Share",
    "SparseMAP",
    "Structure",
    "Subsets",
]

"""Ω, a file a family; the functional maps live beside their Ω."""

from fenchel.regularizers.base import Regularizer, Scaled
from fenchel.regularizers.capped import Capped, KSubsets, constrained_softmax, constrained_sparsemax, k_subsets
from fenchel.regularizers.norm import Norm, normmax
from fenchel.regularizers.rows import support_size
from fenchel.regularizers.tsallis import Gini, Hard, Shannon, Tsallis, argmax, entmax, softmax, sparsemax

__all__ = [
    "Capped",
    "Gini",
    "Hard",
    "KSubsets",
    "Norm",
    "Regularizer",
    "Scaled",
    "Shannon",
    "Tsallis",
    "argmax",
    "constrained_softmax",
    "constrained_sparsemax",
    "entmax",
    "k_subsets",
    "normmax",
    "softmax",
    "sparsemax",
    "support_size",
]

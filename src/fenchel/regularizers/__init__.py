"""Ω, a file a family; the functional maps live beside their Ω."""

from fenchel.regularizers.base import Regularizer, Scaled
from fenchel.regularizers.custom import Custom
from fenchel.regularizers.norm import Norm, normmax
from fenchel.regularizers.rows import support_size
from fenchel.regularizers.tsallis import Gini, Hard, Shannon, Tsallis, argmax, entmax, softmax, sparsemax

__all__ = [
    "Custom",
    "Gini",
    "Hard",
    "Norm",
    "Regularizer",
    "Scaled",
    "Shannon",
    "Tsallis",
    "argmax",
    "entmax",
    "normmax",
    "softmax",
    "sparsemax",
    "support_size",
]

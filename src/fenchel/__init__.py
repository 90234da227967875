"""Fenchel: sparse and structured, differentiable choices for PyTorch."""

from fenchel import nn
from fenchel.attention import attention
from fenchel.losses import entmax_loss, fy_loss, normmax_loss, sparsemax_loss
from fenchel.regularizers import (
    Capped,
    Gini,
    Hard,
    KSubsets,
    Norm,
    Regularizer,
    Shannon,
    Tsallis,
    argmax,
    constrained_softmax,
    constrained_sparsemax,
    entmax,
    k_subsets,
    normmax,
    softmax,
    sparsemax,
    support_size,
)

__version__ = "0.1.0"

__all__ = [
    "Capped",
    "Gini",
    "Hard",
    "KSubsets",
    "Norm",
    "Regularizer",
    "Shannon",
    "Tsallis",
    "argmax",
    "attention",
    "constrained_softmax",
    "constrained_sparsemax",
    "entmax",
    "entmax_loss",
    "fy_loss",
    "k_subsets",
    "nn",
    "normmax",
    "normmax_loss",
    "softmax",
    "sparsemax",
    "sparsemax_loss",
    "support_size",
]

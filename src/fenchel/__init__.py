"""Fenchel: sparse and structured, differentiable choices for PyTorch."""

from fenchel import continuous, dp, hopfield, integrations, mixed, nn, seq2seq
from fenchel.factors import FactorGraph
from fenchel.losses import entmax_loss, fy_loss, normmax_loss, sparsemax_loss
from fenchel.regularizers import (
    Capped,
    Custom,
    Fused,
    Gini,
    Hard,
    KSubsets,
    Norm,
    Oscar,
    Regularizer,
    Shannon,
    TotalVariation2d,
    Tsallis,
    argmax,
    constrained_softmax,
    constrained_sparsemax,
    entmax,
    fusedmax,
    k_subsets,
    normmax,
    oscarmax,
    softmax,
    sparsemax,
    support_size,
    tvmax2d,
)
from fenchel.streaming.dot_product import attention
from fenchel.streaming.linear_loss import linear_entmax_loss
from fenchel.structures import SparseMAP
from fenchel.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Capped",
    "Custom",
    "FactorGraph",
    "Fused",
    "Gini",
    "Hard",
    "KSubsets",
    "Norm",
    "Oscar",
    "Regularizer",
    "Shannon",
    "SparseMAP",
    "TotalVariation2d",
    "Tsallis",
    "argmax",
    "attention",
    "constrained_softmax",
    "constrained_sparsemax",
    "continuous",
    "dp",
    "entmax",
    "entmax_loss",
    "fusedmax",
    "fy_loss",
    "hopfield",
    "integrations",
    "k_subsets",
    "linear_entmax_loss",
    "mixed",
    "nn",
    "normmax",
    "normmax_loss",
    "oscarmax",
    "seq2seq",
    "softmax",
    "sparsemax",
    "sparsemax_loss",
    "support_size",
    "tvmax2d",
    "warmup",
]

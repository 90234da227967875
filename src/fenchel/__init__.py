"""Fenchel: sparse and structured, differentiable choices for PyTorch."""

from fenchel import nn
from fenchel.attention import attention
from fenchel.losses import entmax_loss, fy_loss, normmax_loss, sparsemax_loss
from fenchel.output import linear_entmax_loss
from fenchel.regularizers import (
    Custom,
    Gini,
    Hard,
    Norm,
    Regularizer,
    Shannon,
    Tsallis,
    argmax,
    entmax,
    normmax,
    softmax,
    sparsemax,
    support_size,
)
from fenchel.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Custom",
    "Gini",
    "Hard",
    "Norm",
    "Regularizer",
    "Shannon",
    "Tsallis",
    "argmax",
    "attention",
    "entmax",
    "entmax_loss",
    "fy_loss",
    "linear_entmax_loss",
    "nn",
    "normmax",
    "normmax_loss",
    "softmax",
    "sparsemax",
    "sparsemax_loss",
    "support_size",
    "warmup",
]

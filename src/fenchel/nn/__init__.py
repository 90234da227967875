"""Modules: drop-in for torch.nn's Softmax, CrossEntropyLoss and MultiheadAttention."""

from fenchel.nn.attention import MultiheadAttention
from fenchel.nn.losses import EntmaxLoss, FenchelYoungLoss, NormmaxLoss, SparsemaxLoss
from fenchel.nn.maps import (
    Argmax,
    ConstrainedSoftmax,
    ConstrainedSparsemax,
    Entmax,
    KSubsets,
    Normmax,
    Softmax,
    Sparsemax,
)

__all__ = [
    "Argmax",
    "ConstrainedSoftmax",
    "ConstrainedSparsemax",
    "Entmax",
    "EntmaxLoss",
    "FenchelYoungLoss",
    "KSubsets",
    "MultiheadAttention",
    "Normmax",
    "NormmaxLoss",
    "Softmax",
    "Sparsemax",
    "SparsemaxLoss",
]

"""Modules: drop-in for torch.nn's Softmax, CrossEntropyLoss and MultiheadAttention."""

from fenchel.nn.attention import MultiheadAttention
from fenchel.nn.losses import EntmaxLoss, FenchelYoungLoss, NormmaxLoss, SparsemaxLoss
from fenchel.nn.maps import Argmax, Entmax, Fusedmax, Normmax, Oscarmax, Softmax, Sparsemax, TVmax2d

__all__ = [
    "Argmax",
    "Entmax",
    "EntmaxLoss",
    "FenchelYoungLoss",
    "Fusedmax",
    "MultiheadAttention",
    "Normmax",
    "NormmaxLoss",
    "Oscarmax",
    "Softmax",
    "Sparsemax",
    "SparsemaxLoss",
    "TVmax2d",
]

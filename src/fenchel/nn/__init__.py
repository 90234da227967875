"""Modules: drop-in for torch.nn's Softmax, CrossEntropyLoss and MultiheadAttention."""

from fenchel.nn.attention import MultiheadAttention
from fenchel.nn.losses import EntmaxLoss, FenchelYoungLoss, NormmaxLoss, SparsemaxLoss
from fenchel.nn.maps import Argmax, Entmax, Normmax, Softmax, Sparsemax
from fenchel.nn.output import LinearEntmaxLoss

__all__ = [
    "Argmax",
    "Entmax",
    "EntmaxLoss",
    "FenchelYoungLoss",
    "LinearEntmaxLoss",
    "MultiheadAttention",
    "Normmax",
    "NormmaxLoss",
    "Softmax",
    "Sparsemax",
    "SparsemaxLoss",
]

"""Modules: drop-in for torch.nn's Softmax, CrossEntropyLoss and MultiheadAttention; a layer that tags sequences."""

from fenchel.nn.attention import MultiheadAttention
from fenchel.nn.crf import CRF
from fenchel.nn.long_memory import ChunkOutput, ChunkState, LongMemoryAttention
from fenchel.nn.losses import EntmaxLoss, FenchelYoungLoss, NormmaxLoss, SparsemaxLoss
from fenchel.nn.maps import (
    Argmax,
    ConstrainedSoftmax,
    ConstrainedSparsemax,
    Entmax,
    Fusedmax,
    KSubsets,
    Normmax,
    Oscarmax,
    Softmax,
    Sparsemax,
    TVmax2d,
)
from fenchel.nn.output import LinearEntmaxLoss
from fenchel.nn.soft_dtw import SoftDTW

__all__ = [
    "CRF",
    "Argmax",
    "ChunkOutput",
    "ChunkState",
    "ConstrainedSoftmax",
    "ConstrainedSparsemax",
    "Entmax",
    "EntmaxLoss",
    "FenchelYoungLoss",
    "Fusedmax",
    "KSubsets",
    "LinearEntmaxLoss",
    "LongMemoryAttention",
    "MultiheadAttention",
    "Normmax",
    "NormmaxLoss",
    "Oscarmax",
    "SoftDTW",
    "Softmax",
    "Sparsemax",
    "SparsemaxLoss",
    "TVmax2d",
]

"""Associative memories: energy, retrieval, certificates, and layers made of them."""

from fenchel.hopfield.dynamics import Path, iterate, update
from fenchel.hopfield.layers import Hopfield, HopfieldLayer, HopfieldPooling

__all__ = [
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "Path",
    "iterate",
    "update",
]

"""Associative memories: energy, retrieval, certificates, and layers made of them."""

from fenchel.hopfield.dynamics import Path, iterate, update

__all__ = [
    "Path",
    "iterate",
    "update",
]

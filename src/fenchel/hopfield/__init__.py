"""Associative memories: energy, retrieval, certificates, and layers made of them."""

from fenchel.hopfield.certificates import Capacity, Certificate, capacity
from fenchel.hopfield.classical import ClassicalMemory, DenseMemory
from fenchel.hopfield.dynamics import Path, iterate, update
from fenchel.hopfield.layers import Hopfield, HopfieldLayer, HopfieldPooling
from fenchel.hopfield.memory import Memory, Retrieval

__all__ = [
    "Capacity",
    "Certificate",
    "ClassicalMemory",
    "DenseMemory",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "Memory",
    "Path",
    "Retrieval",
    "capacity",
    "iterate",
    "update",
]

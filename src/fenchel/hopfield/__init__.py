"""Associative memories: energy, retrieval, certificates, and layers made of them."""

from fenchel.hopfield.association import Hopfield
from fenchel.hopfield.certificates import Certificate
from fenchel.hopfield.classical import ClassicalMemory, DenseMemory
from fenchel.hopfield.dynamics import Path, iterate, update
from fenchel.hopfield.hflayers import load_hflayers
from fenchel.hopfield.learned import HopfieldLayer, HopfieldPooling
from fenchel.hopfield.memory import Memory, Retrieval
from fenchel.hopfield.storage import Capacity, capacity
from fenchel.hopfield.transformer import HopfieldDecoderLayer, HopfieldEncoderLayer

__all__ = [
    "Capacity",
    "Certificate",
    "ClassicalMemory",
    "DenseMemory",
    "Hopfield",
    "HopfieldDecoderLayer",
    "HopfieldEncoderLayer",
    "HopfieldLayer",
    "HopfieldPooling",
    "Memory",
    "Path",
    "Retrieval",
    "capacity",
    "iterate",
    "load_hflayers",
    "update",
]

"""Factor graphs: binary variables with scores under constraints, solved by LP-SparseMAP, with derivatives."""

from fenchel.factors.base import Factor
from fenchel.factors.graph import FactorGraph, Solution
from fenchel.factors.logic import AndOut, AtMostOne, Budget, Exactly, Imply, Knapsack, Or, OrOut, Xor, XorOut
from fenchel.factors.pair import Pair
from fenchel.factors.regularizer import LPSparseMAP
from fenchel.factors.structured import DependencyTree, Sequence, Structured
from fenchel.factors.variables import Variables

__all__ = [
    "AndOut",
    "AtMostOne",
    "Budget",
    "DependencyTree",
    "Exactly",
    "Factor",
    "FactorGraph",
    "Imply",
    "Knapsack",
    "LPSparseMAP",
    "Or",
    "OrOut",
    "Pair",
    "Sequence",
    "Solution",
    "Structured",
    "Variables",
    "Xor",
    "XorOut",
]

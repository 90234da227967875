"""Mixed distributions: random vectors in the closed simplex with probability on vertices, edges and faces."""

from fenchel.mixed.base import Estimate, Mixed, closed_simplex, faces, mutual_information
from fenchel.mixed.baselines import Concrete, LogisticNormal, StraightThroughConcrete
from fenchel.mixed.dirichlet import MixedDirichlet
from fenchel.mixed.gaussian_sparsemax import GaussianSparsemax
from fenchel.mixed.hard_concrete import HardConcrete
from fenchel.mixed.maximum_entropy import MaximumEntropy, maximum_code_length

__all__ = [
    "Concrete",
    "Estimate",
    "GaussianSparsemax",
    "HardConcrete",
    "LogisticNormal",
    "MaximumEntropy",
    "Mixed",
    "MixedDirichlet",
    "StraightThroughConcrete",
    "closed_simplex",
    "faces",
    "maximum_code_length",
    "mutual_information",
]

"""Densities over the line and the plane, and attention with them: over intervals of time and ellipses of images."""

from fenchel.continuous.attention import Attended, ContinuousAttention, Encoder, Focus, MatchedEncoder, PooledEncoder
from fenchel.continuous.basis import Basis, FunctionBasis, GaussianBasis, ValueFunction
from fenchel.continuous.deformed import beta_exp, beta_log
from fenchel.continuous.density import BetaGaussian
from fenchel.continuous.divergences import generalized_covariance, wasserstein2
from fenchel.continuous.ellipsoid import EllipsoidPower
from fenchel.continuous.integrals import expectation
from fenchel.continuous.line import LocationScale, Triangular
from fenchel.continuous.memory import LongMemory, MemoryState, Recalled
from fenchel.continuous.score import ScoreDensity

__all__ = [
    "Attended",
    "Basis",
    "BetaGaussian",
    "ContinuousAttention",
    "EllipsoidPower",
    "Encoder",
    "Focus",
    "FunctionBasis",
    "GaussianBasis",
    "LocationScale",
    "LongMemory",
    "MatchedEncoder",
    "MemoryState",
    "PooledEncoder",
    "Recalled",
    "ScoreDensity",
    "Triangular",
    "ValueFunction",
    "beta_exp",
    "beta_log",
    "expectation",
    "generalized_covariance",
    "wasserstein2",
]

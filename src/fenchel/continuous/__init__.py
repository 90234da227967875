"""Densities over the line and the plane, and attention with them: over intervals of time and ellipses of images."""

from fenchel.continuous.attention import Attended, ContinuousAttention, Encoder, Focus, MatchedEncoder, PooledEncoder
from fenchel.continuous.basis import GaussianBasis, ValueFunction
from fenchel.continuous.density import BetaGaussian
from fenchel.continuous.divergences import generalized_covariance, wasserstein2
from fenchel.continuous.ellipsoid import EllipsoidPower
from fenchel.continuous.integrals import expectation
from fenchel.continuous.line import LocationScale, Triangular

__all__ = [
    "Attended",
    "BetaGaussian",
    "ContinuousAttention",
    "EllipsoidPower",
    "Encoder",
    "Focus",
    "GaussianBasis",
    "LocationScale",
    "MatchedEncoder",
    "PooledEncoder",
    "Triangular",
    "ValueFunction",
    "expectation",
    "generalized_covariance",
    "wasserstein2",
]

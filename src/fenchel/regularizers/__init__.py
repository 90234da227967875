"""Regularizers Ω, one file per family, with the functional maps beside them."""

from fenchel.regularizers.base import Regularizer, Scaled
from fenchel.regularizers.capped import Capped, KSubsets, constrained_softmax, constrained_sparsemax, k_subsets
from fenchel.regularizers.custom import Custom
from fenchel.regularizers.fused import Fused, fusedmax, prox_tv1d
from fenchel.regularizers.norm import Norm, normmax
from fenchel.regularizers.oscar import Oscar, oscarmax, prox_oscar
from fenchel.regularizers.rows import support_size
from fenchel.regularizers.segments import segment_entmax
from fenchel.regularizers.total_variation import TotalVariation2d, tvmax2d
from fenchel.regularizers.tsallis import Gini, Hard, Shannon, Tsallis, argmax, entmax, softmax, sparsemax

__all__ = [
    "Capped",
    "Custom",
    "Fused",
    "Gini",
    "Hard",
    "KSubsets",
    "Norm",
    "Oscar",
    "Regularizer",
    "Scaled",
    "Shannon",
    "TotalVariation2d",
    "Tsallis",
    "argmax",
    "constrained_softmax",
    "constrained_sparsemax",
    "entmax",
    "fusedmax",
    "k_subsets",
    "normmax",
    "oscarmax",
    "prox_oscar",
    "prox_tv1d",
    "segment_entmax",
    "softmax",
    "sparsemax",
    "support_size",
    "tvmax2d",
]

"""Gini's negentropy of rows in every spelling that the library has."""

from fenchel import Capped, Fused, Gini, KSubsets, Oscar, Regularizer, SparseMAP, TotalVariation2d, Tsallis
from fenchel.structures import SequentialSubsets, Subsets


def spellings(width: int) -> dict[str, Regularizer]:
    """The same Ω nine times; a grid has a fixed number of pixels, the width of the rows."""
    return {
        "Tsallis": Tsallis(2.0),
        "scaled": 1.0 * (1.0 * Gini()),
        "Fused": Fused(0.0),
        "Oscar": Oscar(0.0),
        "grid": TotalVariation2d(0.0, shape=(1, width)),
        "KSubsets": KSubsets(1),
        "Capped": Capped(1.0),
        "SparseMAP": SparseMAP(Subsets(1)),
        "sequence": SparseMAP(SequentialSubsets(1)),
    }

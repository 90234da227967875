"""Dynamic programming with max_Ω: chains, alignments (DTW), any directed graph without cycles, binary trees."""

from fenchel.dp.alignment import Alignment
from fenchel.dp.brackets import Bracketing, from_brackets, to_brackets
from fenchel.dp.chain import LinearChain
from fenchel.dp.constituency import Constituency
from fenchel.dp.lattice import Lattice
from fenchel.dp.monotonic import Monotonic
from fenchel.dp.program import Bounds, DynamicProgram, Paths
from fenchel.dp.series import barycenter, dtw, dtw_divergence

__all__ = [
    "Alignment",
    "Bounds",
    "Bracketing",
    "Constituency",
    "DynamicProgram",
    "Lattice",
    "LinearChain",
    "Monotonic",
    "Paths",
    "barycenter",
    "dtw",
    "dtw_divergence",
    "from_brackets",
    "to_brackets",
]

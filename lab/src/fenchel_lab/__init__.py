"""The laboratory: chapters that compute figures and tables of papers with Fenchel, and the command `fenchel`."""

import os

# All numbers of a run come from kernels: none from torch operations that serve until kernels are compiled.
os.environ.setdefault("FENCHEL_KERNELS", "wait")

"""The laboratory: chapters that compute figures and tables of papers with Fenchel, and the command `fenchel`."""

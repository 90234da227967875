"""Structures: their best members, and the active sets of SparseMAP."""

"""Drawings: one style for all figures, and pictures of arcs, highlighted texts and searches."""

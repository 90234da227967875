"""Sequences out of sparse distributions: sampling, and metrics that survive a probability of zero."""

from fenchel.seq2seq.generation import (
    best_epsilon,
    distinct,
    epsilon_perplexity,
    jensen_shannon,
    repetition,
    sample,
    sparsemax_score,
)

__all__ = [
    "best_epsilon",
    "distinct",
    "epsilon_perplexity",
    "jensen_shannon",
    "repetition",
    "sample",
    "sparsemax_score",
]

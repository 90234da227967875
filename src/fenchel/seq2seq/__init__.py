"""Encoder-decoders with sparse attention and sparse output, and a beam search that reports whether it was exact.

model = Recurrent(source, target, attention=Tsallis(1.5), output=Tsallis(1.5))
train(model, pairs, validation)
beam_search(model, [source_symbols])[0].exact
"""

from fenchel.seq2seq import checkpoints, saving
from fenchel.seq2seq.batches import IGNORED, Batch, Batches, Pair, Source, collate, read
from fenchel.seq2seq.checkpoints import DivergedError
from fenchel.seq2seq.fertility import FertilityPredictor
from fenchel.seq2seq.generation import (
    best_epsilon,
    distinct,
    epsilon_perplexity,
    jensen_shannon,
    repetition,
    sample,
    sparsemax_score,
)
from fenchel.seq2seq.model import Seq2Seq
from fenchel.seq2seq.recurrent import Recurrent
from fenchel.seq2seq.search import (
    Beam,
    Choice,
    Completion,
    Ensemble,
    Hypothesis,
    Stepper,
    beam_search,
    complete,
    enumerate_support,
    force,
)
from fenchel.seq2seq.training import History, Scores, Training, Validation, train, validate
from fenchel.seq2seq.transformer import Transformer
from fenchel.seq2seq.vocabulary import STOP, UNKNOWN, Vocabulary

__all__ = [
    "IGNORED",
    "STOP",
    "UNKNOWN",
    "Batch",
    "Batches",
    "Beam",
    "Choice",
    "Completion",
    "DivergedError",
    "Ensemble",
    "FertilityPredictor",
    "History",
    "Hypothesis",
    "Pair",
    "Recurrent",
    "Scores",
    "Seq2Seq",
    "Source",
    "Stepper",
    "Training",
    "Transformer",
    "Validation",
    "Vocabulary",
    "beam_search",
    "best_epsilon",
    "checkpoints",
    "collate",
    "complete",
    "distinct",
    "enumerate_support",
    "epsilon_perplexity",
    "force",
    "jensen_shannon",
    "read",
    "repetition",
    "sample",
    "saving",
    "sparsemax_score",
    "train",
    "validate",
]

"""Encoder-decoders with sparse attention and sparse output: few candidates, and a search that can prove its answer.

model = Recurrent(source, target, attention=Tsallis(1.5), output=Tsallis(1.5))
train(model, pairs, validation)
beam_search(model, [source_symbols])[0].exact
"""

from fenchel.seq2seq.batches import Batch, Batches, Pair, Source, collate, read
from fenchel.seq2seq.generation import (
    best_epsilon,
    distinct,
    epsilon_perplexity,
    jensen_shannon,
    repetition,
    sample,
    sparsemax_score,
)
from fenchel.seq2seq.inflection import Inflected, inflect, paired, spelled, unknown
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
    "STOP",
    "UNKNOWN",
    "Batch",
    "Batches",
    "Beam",
    "Choice",
    "Completion",
    "Ensemble",
    "History",
    "Hypothesis",
    "Inflected",
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
    "collate",
    "complete",
    "distinct",
    "enumerate_support",
    "epsilon_perplexity",
    "force",
    "inflect",
    "jensen_shannon",
    "paired",
    "read",
    "repetition",
    "sample",
    "sparsemax_score",
    "spelled",
    "train",
    "unknown",
    "validate",
]

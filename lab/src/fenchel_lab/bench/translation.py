"""The translation model that is measured: 8,000 words, sentences of a made-up language, a few steps of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fenchel import Regularizer, Shannon, Tsallis
from fenchel.seq2seq import STOP, Batch, Pair, Recurrent, Source, Vocabulary, beam_search, collate

WORDS, WIDTH, SENTENCES, LENGTH = 8000, 256, 32, 13
WARM = 120
"""Steps of training before a sparse model is measured. At the start hundreds of words are possible at every step, and a
sparse loss takes longer than a dense one; soon they are few, and stay so. What softmax takes does not change."""

DECODED, LONGEST = 16, 10


class _Torch(Shannon):
    """Torch's own softmax: the rival is to be as fast as it can be."""

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return torch.softmax(scores, dim)


class _Softmax(Recurrent):
    """The same model with torch's own loss."""

    def loss(self, hidden: Tensor, target: Tensor, *, reduction: Literal["none", "mean", "sum"] = "mean") -> Tensor:
        return F.cross_entropy(self.output(hidden).flatten(0, -2), target.flatten(), reduction=reduction)


def _sentences(count: int, seed: int) -> list[Pair]:
    """Sentences of words as frequent as words are (Zipf), each translated word by word."""
    random = Random(seed)
    weights = [1 / rank for rank in range(1, WORDS + 1)]
    sources = [random.choices(range(WORDS), weights, k=LENGTH) for _ in range(count)]
    return [Pair(tuple(f"s{word}" for word in row), tuple(f"t{word}" for word in row)) for row in sources]


@cache
def _batch(seed: int) -> Batch:
    return collate(_sentences(SENTENCES, seed), *_vocabularies())


@cache
def _vocabularies() -> tuple[Vocabulary, Vocabulary]:
    return Vocabulary(f"s{word}" for word in range(WORDS)), Vocabulary(f"t{word}" for word in range(WORDS))


@cache
def _model(alpha: float) -> tuple[Recurrent, torch.optim.Optimizer]:
    """A model, after some steps of training; made when it is first needed."""
    omega: Regularizer = _Torch() if alpha == 1 else Tsallis(alpha)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        kind = _Softmax if alpha == 1 else Recurrent
        model = kind(*_vocabularies(), embedding=WIDTH, hidden=WIDTH, layers=1, attention=omega, output=omega)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for step in range(WARM if alpha > 1 else 1):
            _train(model, optimizer, _batch(step + 1))
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # what is measured must not learn its one batch by heart
    return model, optimizer


def _train(model: Recurrent, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    model.train()
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    value: Tensor = loss.detach()
    return value


def inputs() -> tuple[Tensor, ...]:
    """A batch that no model has seen."""
    batch = _batch(0)
    return batch.source.numbers, batch.source.lengths, batch.inputs, batch.target


def training(alpha: float) -> Callable[..., Tensor]:
    """A whole training step: loss, gradients, clipping, Adam."""

    def step(numbers: Tensor, lengths: Tensor, read: Tensor, targets: Tensor) -> Tensor:
        return _train(*_model(alpha), Batch(Source(numbers, lengths), read, targets))

    return step


def decoding(alpha: float) -> Callable[..., Tensor]:
    """Beam search for some sentences, each to the same length: its end is forbidden before."""

    def search(*inputs: Tensor) -> Tensor:
        model, _ = _model(alpha)
        model.eval()
        end = float(model.output.bias[STOP])
        with torch.no_grad():
            model.output.bias[STOP] = -1e4
            found = beam_search(model, [pair.source for pair in _sentences(DECODED, 0)], max_length=LONGEST)
            model.output.bias[STOP] = end
        return torch.tensor([each.best.log_probability for each in found])

    return search

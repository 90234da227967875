"""A reader of documents: word vectors, a bidirectional LSTM, and attention that is discrete, continuous or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from fenchel import Regularizer
from fenchel.continuous import Attended, BetaGaussian, ContinuousAttention, GaussianBasis, MatchedEncoder, PooledEncoder
from fenchel_lab.data.sst import Review
from fenchel_lab.models.training import by_length

UNKNOWN = 0
AT_ONCE = 128
"""Documents that are classified at a time."""


@dataclass(frozen=True)
class Attention:
    """How a document is summed up.

    Args:
        kind: "discrete": weights of words. "continuous": a density whose place and width a convolution and max-pooling
            tell. "combined": a density with the moments of discrete weights, and the sum of both contexts.
        omega: Ω of the discrete weights.
        alpha: of the density, 1 or 2.
        functions: how many basis functions the words are turned into.
    """

    kind: Literal["discrete", "continuous", "combined"]
    omega: Regularizer
    alpha: float
    functions: int = 0


@dataclass(frozen=True)
class Size:
    """How large the reader is."""

    hidden: int = 32
    filters: int = 32
    dropout: float = 0.3
    batch: int = 32


@dataclass(frozen=True)
class Batch:
    """Documents side by side: numbers of words (B, L), lengths (B,) and classes (B,)."""

    words: Tensor
    lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(self.words.to(device), self.lengths.to(device), self.labels.to(device))


class Vocabulary:
    """Words as numbers, and their vectors, of which the first is that of words that are not known.

    Args:
        rows: the row of every word in the vectors.
        vectors: (words, width).
        longest: of longer documents the last so many words are read.
    """

    def __init__(self, rows: Mapping[str, int], vectors: Tensor, longest: int) -> None:
        if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
            raise ValueError(f"longest must be an int of at least 1, got {longest!r}")
        for word, row in rows.items():
            if not isinstance(word, str) or type(row) is not int or not 0 <= row < len(vectors):
                raise ValueError(
                    f"rows must be ints in [0, {len(vectors) - 1}], one for each word, got {word!r}: {row!r}"
                )
        self.rows, self.longest = rows, longest
        self.vectors = torch.cat([vectors.new_zeros(1, vectors.shape[1]), vectors])

    def batch(self, reviews: Sequence[Review]) -> Batch:
        """Reviews as numbers."""
        known = [[self.rows.get(word, UNKNOWN - 1) + 1 for word in self.read(review)] for review in reviews]
        return Batch(
            pad_sequence([torch.tensor(words, dtype=torch.long) for words in known], batch_first=True),
            torch.tensor([len(words) for words in known]),
            torch.tensor([review.label for review in reviews]),
        )

    def batches(self, reviews: Sequence[Review], size: int) -> Iterator[Batch]:
        """Reviews of about equal length together."""
        for some in self.grouped(reviews, size):
            yield self.batch(some)

    def grouped(self, reviews: Sequence[Review], size: int) -> Iterator[list[Review]]:
        """So many reviews of about equal length at a time."""
        for rows in by_length([len(self.read(review)) for review in reviews], size):
            yield [reviews[row] for row in rows]

    def read(self, review: Review) -> tuple[str, ...]:
        """The words that are read: the last ones, where opinions are summed up."""
        return review.words[-self.longest :]


@dataclass(frozen=True)
class Look:
    """What attention saw of a batch.

    Args:
        context: (B, width).
        weights: (B, L), discrete; None if there are none.
        attended: the continuous part; None if there is none.
    """

    context: Tensor
    weights: Tensor | None = None
    attended: Attended | None = None


class Reader(nn.Module):
    """Scores of a document's classes. The vectors of words are trained if they are ``trainable``."""

    vectors: Tensor

    def __init__(self, vectors: Tensor, attention: Attention, size: Size, trainable: bool = False) -> None:
        super().__init__()
        self.attention = attention
        if trainable:
            self.vectors = nn.Parameter(vectors.detach().clone())
        else:
            self.register_buffer("vectors", vectors, persistent=False)
        width = 2 * size.hidden
        self.lstm = nn.LSTM(vectors.shape[1], size.hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(size.dropout)
        self.classes = nn.Linear(width, 2)
        if attention.kind == "continuous":
            self.pool = nn.Conv1d(width, size.filters, 3, padding=1)
            self.density = _density(attention, PooledEncoder(size.filters))
        else:
            self.score = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1, bias=False))
        if attention.kind == "combined":
            self.density = _density(attention, MatchedEncoder(attention.omega))

    def forward(self, batch: Batch) -> Tensor:
        scores: Tensor = self.classes(self.dropout(self.look(batch).context))
        return scores

    def look(self, batch: Batch) -> Look:
        """Where attention goes."""
        hidden = self._read(batch)
        mask = torch.arange(hidden.shape[1]) < batch.lengths.unsqueeze(-1)
        if self.attention.kind == "continuous":
            answers = self.pool(hidden.mT).relu().masked_fill(~mask.unsqueeze(1), 0.0)
            attended = self.density.attend(hidden, answers.amax(-1), mask)
            return Look(attended.context, None, attended)
        scores = self.score(hidden).squeeze(-1)
        if self.attention.kind == "combined":
            attended = self.density.attend(hidden, scores, mask)
            assert attended.focus.discrete is not None
            return Look(attended.context, attended.focus.discrete.squeeze(-2), attended)
        weights = self.attention.omega.argmax(scores, mask=mask)
        return Look((weights.unsqueeze(-2) @ hidden).squeeze(-2), weights)

    def _read(self, batch: Batch) -> Tensor:
        words = self.dropout(self.vectors[batch.words])
        packed = pack_padded_sequence(words, batch.lengths, batch_first=True, enforce_sorted=False)
        hidden: Tensor = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return hidden


def _density(attention: Attention, encoder: PooledEncoder | MatchedEncoder) -> ContinuousAttention:
    basis = GaussianBasis.line(attention.functions, widths=(0.1, 0.5))
    return ContinuousAttention(basis, attention.alpha, encoder, combined=attention.kind == "combined")


def loss(reader: Reader, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(reader(batch), batch.labels)


@torch.no_grad()
def accuracy(reader: Reader, batches: Sequence[Batch]) -> float:
    """The share of documents that are classified right."""
    right = sum(int((reader(batch).argmax(-1) == batch.labels).sum()) for batch in batches)
    return right / sum(len(batch.labels) for batch in batches)


@torch.no_grad()
def attended(reader: Reader, batches: Sequence[Batch]) -> float:
    """The share of a document that has any weight: of its words, or of [0, 1] under a density."""
    shares = []
    for batch in batches:
        look = reader.look(batch)
        if look.weights is not None and look.attended is None:
            shares.append((look.weights > 0).sum(-1) / batch.lengths)
        else:
            low, high = interval(look)
            shares.append((high.clamp(0, 1) - low.clamp(0, 1)).float())
    return float(torch.cat(shares).mean())


@torch.no_grad()
def spreads(reader: Reader, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over time of the densities, each (documents,)."""
    found = [density_of(reader.look(batch)) for batch in batches]
    places = torch.cat([density.mean[..., 0].flatten() for density in found])
    return places, torch.cat([density.variance[..., 0].sqrt().flatten() for density in found])


def interval(look: Look) -> tuple[Tensor, Tensor]:
    """The ends (B,) of the densities' supports."""
    density = density_of(look)
    radius = density.support_radius * density.sigma[..., 0, 0].sqrt()
    return (density.loc[..., 0] - radius).squeeze(-1), (density.loc[..., 0] + radius).squeeze(-1)


def density_of(look: Look) -> BetaGaussian:
    """The densities of a batch, (B, 1)."""
    assert look.attended is not None
    density = look.attended.density
    assert isinstance(density, BetaGaussian)
    return density

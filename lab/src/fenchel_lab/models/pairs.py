"""Pairs of sentences: a model that aligns their words by attention, and judges pairs by how alike these are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fenchel import SparseMAP, softmax, sparsemax
from fenchel.structures import Chain, Matching
from fenchel_lab.models.training import by_length

PAD, UNKNOWN = 0, 1
AT_ONCE = 200
"""Pairs that are judged at a time."""

Kind = Literal["softmax", "sparsemax", "sequence", "matching"]


@dataclass(frozen=True)
class Pair:
    """A sentence, one in another language, and whether the second says what the first does."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    true: bool


@dataclass(frozen=True)
class Size:
    """How large the model is, and how many pairs are seen at a time."""

    width: int = 64
    dropout: float = 0.2
    batch: int = 32


@dataclass(frozen=True)
class Batch:
    """Numbers of words (B, N) and (B, M), ``PAD`` after the last, and labels (B,)."""

    first: Tensor
    second: Tensor
    labels: Tensor


class Vocabulary:
    """Words of both languages as numbers; those that are seen once are unknown."""

    def __init__(self, pairs: Sequence[Pair], least: int = 2) -> None:
        sides = ([pair.first for pair in pairs], [pair.second for pair in pairs])
        counts = [Counter(word for sentence in side for word in sentence) for side in sides]
        self.sides = [
            {word: row for row, word in enumerate(sorted(word for word in count if count[word] >= least), UNKNOWN + 1)}
            for count in counts
        ]

    def batch(self, pairs: Sequence[Pair]) -> Batch:
        """Pairs as numbers."""
        first, second = (
            pad_sequence([torch.tensor([rows.get(word, UNKNOWN) for word in each]) for each in side], True, PAD)
            for rows, side in zip(
                self.sides, ([pair.first for pair in pairs], [pair.second for pair in pairs]), strict=True
            )
        )
        return Batch(first, second, torch.tensor([float(pair.true) for pair in pairs]))

    def batches(self, pairs: Sequence[Pair], size: int) -> Iterator[Batch]:
        """Pairs of about equal length together."""
        for rows in by_length([len(pair.first) for pair in pairs], size):
            yield self.batch([pairs[row] for row in rows])


class Judge(nn.Module):
    """A score of each pair, positive if the sentences agree.

    Every word of the second sentence gets an average of the words of the first by attention. The score is the mean
    product of the words and their averages, on a scale that is learned.
    """

    def __init__(self, vocabulary: Vocabulary, kind: Kind, size: Size) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = (nn.Embedding(len(rows) + 2, size.width) for rows in vocabulary.sides)
        self.dropout = nn.Dropout(size.dropout)
        self.scale, self.offset = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(-1.0))
        self.back = nn.Parameter(torch.tensor(0.5))  # what a step back costs the sequence, for each word of it
        for table in (self.first, self.second):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, batch: Batch) -> Tensor:
        first, second = self.dropout(self.first(batch.first)), self.dropout(self.second(batch.second))
        found = self.weights(batch, first, second) @ first
        present = batch.second != PAD
        alike = ((second * found).sum(-1) * present).sum(1) / present.sum(1)
        score: Tensor = self.scale * alike / first.shape[-1] ** 0.5 + self.offset
        return score

    def weights(self, batch: Batch, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """What each word of the second sentence takes of each word of the first, (B, M, N)."""
        first = self.first(batch.first) if first is None else first
        second = self.second(batch.second) if second is None else second
        scores = second @ first.mT / first.shape[-1] ** 0.5
        rows, columns = (batch.second != PAD).unsqueeze(-1), (batch.first != PAD).unsqueeze(-2)
        if self.kind == "softmax":
            return softmax(scores, mask=columns)
        if self.kind == "sparsemax":
            return sparsemax(scores, mask=columns)
        if self.kind == "matching":
            return SparseMAP(Matching()).argmax(scores, mask=rows & columns)
        places = torch.arange(scores.shape[-1])
        steps = -self.back * (places.unsqueeze(1) - places).relu()
        return SparseMAP(Chain(steps)).argmax(scores, mask=rows & columns)


def loss(judge: Judge, batch: Batch) -> Tensor:
    """Logistic."""
    return F.binary_cross_entropy_with_logits(judge(batch), batch.labels)


@torch.no_grad()
def accuracy(judge: Judge, batches: Sequence[Batch]) -> float:
    """The share of pairs that are judged right."""
    right = sum(int(((judge(batch) > 0) == (batch.labels > 0)).sum()) for batch in batches)
    return right / sum(len(batch.labels) for batch in batches)


@torch.no_grad()
def shape_of(judge: Judge, batches: Sequence[Batch]) -> dict[str, float]:
    """What attention to true pairs is like: words that a word takes from, and the largest sum on one word."""
    cells = words = 0.0
    most = []
    for batch in batches:
        weights = judge.weights(batch)[batch.labels > 0]
        cells += float((weights > 0).sum())
        words += float((batch.second[batch.labels > 0] != PAD).sum())
        most.append(weights.sum(1).amax(-1))
    return {"words": cells / max(words, 1.0), "most": float(torch.cat(most).mean())}


def pairs_of(
    captions: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], seed: int, tried: int, longest: int
) -> list[Pair]:
    """Each caption once with its translation and once with another's: the most like it of so many drawn ones.

    Args:
        captions: sentences and translations.
        seed: of the draw.
        tried: how many are drawn for each; the one that shares the most words with the translation is taken.
        longest: only sentences of at most so many words are taken.
    """
    random = Random(seed)
    short = [each for each in captions if 0 < len(each[0]) <= longest and 0 < len(each[1]) <= longest]
    pairs = []
    for first, second in short:
        true = set(second)
        others = [other for _, other in random.sample(short, min(tried, len(short))) if set(other) != true]
        if others:
            false = max(others, key=lambda other: len(true & set(other)) / len(true | set(other)))
            pairs += [Pair(first, second, True), Pair(first, false, False)]
    return pairs


def words_of(sentence: str) -> tuple[str, ...]:
    """Lower-case words of a sentence, without punctuation.

    Example:
        >>> words_of("Ein Mann, der läuft.")
        ('ein', 'mann', 'der', 'läuft')
    """
    return tuple(re.findall(r"\w+", sentence.lower()))

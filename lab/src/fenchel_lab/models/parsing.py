"""A dependency parser: embeddings, a bidirectional LSTM, and a score for every arc from a head to a modifier."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fenchel_lab.data.ud_ewt import Sentence
from fenchel_lab.models.training import Course, trained

UNKNOWN = 0
SEEN = 2
"""How often a word must be seen to be known: from the others it is learned what unknown words are like."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""From scores (B, N, N + 1), [modifier, head] with head 0 the root, and heads (B, N) to a loss per sentence (B,)."""


@dataclass(frozen=True)
class Size:
    """How large the parser is, and how long it is trained."""

    word: int = 64
    tag: int = 16
    hidden: int = 96
    arc: int = 96
    dropout: float = 0.3
    epochs: int = 6
    batch: int = 32
    rate: float = 2e-3


@dataclass(frozen=True)
class Batch:
    """Sentences of one length, so that none is padded: words, tags and heads (B, N)."""

    words: Tensor
    tags: Tensor
    heads: Tensor


class Vocabulary:
    """Words, lowercased, and parts of speech as numbers."""

    def __init__(self, sentences: Sequence[Sentence]) -> None:
        counts = Counter(word.lower() for sentence in sentences for word in sentence.words)
        known = sorted(word for word, count in counts.items() if count >= SEEN)
        self.words = {word: i for i, word in enumerate(known, 1)}
        self.tags = {tag: i for i, tag in enumerate(sorted({tag for s in sentences for tag in s.tags}), 1)}

    def batch(self, sentences: Sequence[Sentence]) -> Batch:
        """Sentences of one length as numbers."""
        return Batch(
            torch.tensor([[self.words.get(word.lower(), UNKNOWN) for word in s.words] for s in sentences]),
            torch.tensor([[self.tags.get(tag, UNKNOWN) for tag in s.tags] for s in sentences]),
            torch.tensor([s.heads for s in sentences]),
        )


class Parser(nn.Module):
    """Scores of arcs, biaffine in what the LSTM says of the head and of the modifier."""

    def __init__(self, vocabulary: Vocabulary, size: Size) -> None:
        super().__init__()
        self.word = nn.Embedding(len(vocabulary.words) + 1, size.word)
        self.tag = nn.Embedding(len(vocabulary.tags) + 1, size.tag)
        self.lstm = nn.LSTM(size.word + size.tag, size.hidden, batch_first=True, bidirectional=True)
        self.root = nn.Parameter(0.1 * torch.randn(2 * size.hidden))
        self.modifier = nn.Linear(2 * size.hidden, size.arc)
        self.head = nn.Linear(2 * size.hidden, size.arc)
        self.pair = nn.Parameter(torch.zeros(size.arc, size.arc))
        self.lone = nn.Parameter(torch.zeros(size.arc))
        self.dropout = nn.Dropout(size.dropout)
        nn.init.xavier_uniform_(self.pair)

    def forward(self, batch: Batch) -> Tensor:
        known = torch.cat([self.word(batch.words), self.tag(batch.tags)], -1)
        hidden, _ = self.lstm(self.dropout(known))
        hidden = self.dropout(hidden)
        root = self.root.expand(len(hidden), 1, -1)
        modifier = self.dropout(self.modifier(hidden).relu())
        head = self.dropout(self.head(torch.cat([root, hidden], 1)).relu())
        scores: Tensor = modifier @ self.pair @ head.mT + (head @ self.lone).unsqueeze(1)
        return scores


def train(
    sentences: Sequence[Sentence], loss: Loss, size: Size, progress: Callable[[float], None]
) -> tuple[Parser, Vocabulary]:
    """A parser trained with a loss of its arc scores."""
    course = Course(size.epochs, size.rate)
    vocabulary = Vocabulary(sentences)
    parser = Parser(vocabulary, size)
    optimizer = torch.optim.Adam(parser.parameters(), lr=size.rate, betas=(0.9, 0.95))
    batches = [vocabulary.batch([sentences[row] for row in rows]) for rows in _by_length(sentences, size.batch)]

    def mean(parser: Parser, batch: Batch) -> Tensor:
        return loss(parser(batch), batch.heads).mean()

    return trained(parser, batches, mean, None, course, progress, optimizer=optimizer)[0], vocabulary


@torch.no_grad()
def heads(
    parser: Parser, vocabulary: Vocabulary, sentences: Sequence[Sentence], decode: Callable[[Tensor], Tensor]
) -> list[tuple[int, ...]]:
    """The heads of every sentence's words. ``decode`` makes them, (B, N), of scores."""
    found: dict[int, tuple[int, ...]] = {}
    for rows in _by_length(sentences, 64):
        scores = parser(vocabulary.batch([sentences[row] for row in rows]))
        found |= {row: tuple(each) for row, each in zip(rows, decode(scores).tolist(), strict=True)}
    return [found[row] for row in range(len(sentences))]


def attachment(sentences: Sequence[Sentence], found: Sequence[tuple[int, ...]]) -> float:
    """The share of words with the right head (UAS), punctuation included."""
    pairs = [(a, b) for s, row in zip(sentences, found, strict=True) for a, b in zip(s.heads, row, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def without_loops(scores: Tensor) -> Tensor:
    """Scores in which no word is its own head."""
    n = scores.shape[-2]
    own = torch.eye(n, n + 1, dtype=torch.bool).roll(1, -1)
    return scores.masked_fill(own, -torch.inf)


def arcs(heads: Tensor) -> Tensor:
    """Heads (…, N) as a structure (…, N, N + 1)."""
    return nn.functional.one_hot(heads, heads.shape[-1] + 1)


def _by_length(sentences: Sequence[Sentence], size: int) -> Iterator[list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for row, sentence in enumerate(sentences):
        groups[len(sentence.words)].append(row)
    for _, rows in sorted(groups.items()):
        for first in range(0, len(rows), size):
            yield rows[first : first + size]

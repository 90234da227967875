"""A tagger of words: character CNN, word embeddings and a bidirectional LSTM that score a chain of tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from fenchel import Regularizer
from fenchel.dp import LinearChain
from fenchel_lab.data.ner import Sentence
from fenchel_lab.models.training import Course, by_length, trained

PAD, UNKNOWN = 0, 1
AFTER_THE_END = -1
LONGEST_WORD = 20
SEEN = 2
"""How often a word must be seen to be known: from the others it is learned what unknown words are like."""


@dataclass(frozen=True)
class Size:
    """How large the tagger is, and how long it is trained."""

    word: int = 100
    character: int = 25
    filters: int = 30
    hidden: int = 100
    dropout: float = 0.5
    epochs: int = 12
    batch: int = 32
    rate: float = 5e-3
    patience: int = 5


@dataclass(frozen=True)
class Batch:
    """Sentences side by side: words and tags (B, T), characters (B, T, L), lengths (B,)."""

    words: Tensor
    characters: Tensor
    lengths: Tensor
    tags: Tensor


class Vocabulary:
    """Words, characters and tags as numbers. Words are lowercased, digits all the same: characters tell more."""

    def __init__(self, sentences: Sequence[Sentence]) -> None:
        counts = Counter(_normal(word) for sentence in sentences for word in sentence.words)
        known = sorted(word for word, count in counts.items() if count >= SEEN)
        characters = sorted({character for sentence in sentences for word in sentence.words for character in word})
        self.words = {word: i for i, word in enumerate(known, UNKNOWN + 1)}
        self.characters = {character: i for i, character in enumerate(characters, UNKNOWN + 1)}
        self.tags = sorted({tag for sentence in sentences for tag in iobes(sentence.tags)})

    def batch(self, sentences: Sequence[Sentence]) -> Batch:
        """Sentences as numbers."""
        number = {tag: i for i, tag in enumerate(self.tags)}
        words = [torch.tensor([self.words.get(_normal(w), UNKNOWN) for w in s.words]) for s in sentences]
        # A tag that was never seen in training cannot be scored: any will do, for it is not trained on.
        tags = [torch.tensor([number.get(tag, 0) for tag in iobes(s.tags)]) for s in sentences]
        characters = [torch.tensor([self._spelled(word) for word in s.words]) for s in sentences]
        return Batch(
            pad_sequence(words, batch_first=True, padding_value=PAD),
            pad_sequence(characters, batch_first=True, padding_value=PAD),
            torch.tensor([len(s.words) for s in sentences]),
            pad_sequence(tags, batch_first=True, padding_value=AFTER_THE_END),
        )

    def _spelled(self, word: str) -> list[int]:
        numbers = [self.characters.get(character, UNKNOWN) for character in word[:LONGEST_WORD]]
        return numbers + [PAD] * (LONGEST_WORD - len(numbers))


class Tagger(nn.Module):
    """Scores of tags from words and their characters, and of a tag after a tag; Ω makes a distribution of them."""

    def __init__(self, vocabulary: Vocabulary, size: Size, omega: Regularizer) -> None:
        super().__init__()
        states = len(vocabulary.tags)
        self.omega = omega
        self.word = nn.Embedding(len(vocabulary.words) + 2, size.word, padding_idx=PAD)
        self.character = nn.Embedding(len(vocabulary.characters) + 2, size.character, padding_idx=PAD)
        self.filters = nn.Conv1d(size.character, size.filters, 3, padding=1)
        self.lstm = nn.LSTM(size.word + size.filters, size.hidden, batch_first=True, bidirectional=True)
        self.score = nn.Linear(2 * size.hidden, states)
        self.transition = nn.Parameter(torch.zeros(states, states))
        self.start = nn.Parameter(torch.zeros(states))
        self.end = nn.Parameter(torch.zeros(states))
        self.dropout = nn.Dropout(size.dropout)
        for table in (self.word, self.character):
            nn.init.uniform_(table.weight, -0.1, 0.1)

    def forward(self, batch: Batch) -> LinearChain:
        known = torch.cat([self.word(batch.words), self._spelling(batch.characters)], -1)
        packed = pack_padded_sequence(self.dropout(known), batch.lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        unary = self.score(self.dropout(hidden))
        return LinearChain(unary, self.transition, batch.lengths, self.start, self.end, self.omega)

    def _spelling(self, characters: Tensor) -> Tensor:
        """Words by their characters: the strongest answer of each filter."""
        spelled, of = torch.unique(characters.flatten(0, 1), dim=0, return_inverse=True)
        answers: Tensor = self.filters(self.character(spelled).transpose(1, 2)).relu().amax(-1)
        return answers[of].reshape(*characters.shape[:2], -1)


def train(
    sentences: Sequence[Sentence],
    omega: Regularizer,
    size: Size,
    progress: Callable[[float], None],
    score: Callable[[Tagger, Vocabulary], float] | None = None,
) -> tuple[Tagger, Vocabulary, float]:
    """A tagger trained with the loss of Ω: max_Ω over all tag sequences minus the score of the right one.

    It is that of the epoch with the best score, which is returned too; without ``score`` that of the last epoch.
    """
    course = Course(size.epochs, size.rate, decay=0.0, patience=size.patience)
    vocabulary = Vocabulary(sentences)
    tagger = Tagger(vocabulary, size, omega)
    batches = [vocabulary.batch(group) for group in grouped(sentences, size.batch)]

    def loss(tagger: Tagger, batch: Batch) -> Tensor:
        chain: LinearChain = tagger(batch)
        return chain.loss(batch.tags).mean()

    measure = None if score is None else lambda tagger: score(tagger, vocabulary)
    found, best = trained(tagger, batches, loss, measure, course, progress)
    return found, vocabulary, best


@torch.no_grad()
def tagged(tagger: Tagger, vocabulary: Vocabulary, sentences: Sequence[Sentence]) -> list[list[str]]:
    """The best tag sequence of every sentence, in IOB2."""
    tags: dict[int, list[str]] = {}
    for rows in by_length([len(sentence.words) for sentence in sentences], 64):
        paths = tagger(vocabulary.batch([sentences[row] for row in rows])).map()
        for row, path in zip(rows, paths.tolist(), strict=True):
            tags[row] = iob2([vocabulary.tags[state] for state in path[: len(sentences[row].words)]])
    return [tags[row] for row in range(len(sentences))]


def grouped(sentences: Sequence[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Groups of sentences of about equal length."""
    for rows in by_length([len(sentence.words) for sentence in sentences], size):
        yield [sentences[row] for row in rows]


def iobes(tags: Sequence[str]) -> list[str]:
    """Tags that tell the last word of an entity, and the only one, from the others.

    Example:
        >>> iobes(["B-PER", "I-PER", "O", "B-LOC"])
        ['B-PER', 'E-PER', 'O', 'S-LOC']
    """
    told = []
    for tag, after in zip(tags, [*tags[1:], "O"], strict=True):
        goes_on = after == f"I-{tag[2:]}"
        told.append(tag if tag == "O" or goes_on else f"{'S' if tag[0] == 'B' else 'E'}-{tag[2:]}")
    return told


def iob2(tags: Sequence[str]) -> list[str]:
    """The way back.

    Example:
        >>> iob2(["B-PER", "E-PER", "O", "S-LOC"])
        ['B-PER', 'I-PER', 'O', 'B-LOC']
    """
    return [{"S": "B", "E": "I"}.get(tag[0], tag[0]) + tag[1:] for tag in tags]


def _normal(word: str) -> str:
    return re.sub(r"\d", "0", word.lower())

"""Padded batches of sequences of similar lengths, in an order that depends on a seed and the epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from fenchel._checks import check_count, check_kind
from fenchel.seq2seq.vocabulary import STOP, Vocabulary

IGNORED = -100
"""The target of padding, which losses ignore."""

POOL = 50
"""The number of batches that are sorted by length together, to reduce padding; epochs still have random batches."""


@dataclass(frozen=True)
class Pair:
    """A source sequence of symbols and its target sequence.

    Example:
        >>> Pair(tuple("abc"), tuple("cba"))
        Pair(source=('a', 'b', 'c'), target=('c', 'b', 'a'))
    """

    source: tuple[str, ...]
    target: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A batch of source sequences: numbers of symbols (B, J), padded, and lengths (B,).

    Example:
        >>> read(["ab", "b"], Vocabulary("ab")).mask
        tensor([[ True,  True],
                [ True, False]])
    """

    numbers: Tensor
    lengths: Tensor

    @property
    def mask(self) -> Tensor:
        """Whether there is a symbol, boolean (B, J), on the device of the lengths."""
        return torch.arange(self.numbers.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)

    def to(self, device: torch.device) -> Source:
        """The batch with its numbers on another device; lengths stay on the CPU, where packing needs them."""
        return self if self.numbers.device == device else Source(self.numbers.to(device), self.lengths)


@dataclass(frozen=True)
class Batch:
    """A batch of pairs as numbers: the sources, and the inputs and targets of the decoder, (B, T) each.

    Example:
        >>> letters = Vocabulary("ab")
        >>> collate([Pair(("a",), ("a", "b"))], letters, letters).tokens  # two symbols and the end
        3
    """

    source: Source
    inputs: Tensor
    target: Tensor

    @property
    def tokens(self) -> int:
        """The number of target symbols, ends included."""
        return int((self.target != IGNORED).sum())


def read(sequences: Sequence[Sequence[str]], vocabulary: Vocabulary) -> Source:
    """Encode source sequences as one padded batch.

    Example:
        >>> read(["ab", "b"], Vocabulary("ab")).numbers
        tensor([[2, 3],
                [3, 5]])
    """
    check_kind(sequences, "sources", Sequence, what="a list of sequences of symbols")
    if isinstance(sequences, str):
        raise TypeError(f"sources must be a list of sequences, such as [{sequences[:20]!r}], got a string")
    if not sequences:
        raise ValueError("a batch must have at least one source, got none")
    for each in sequences:
        check_kind(each, "sources", Sequence, what="a list of sequences of symbols, each of them")
    if empty := [number for number, sequence in enumerate(sequences) if not sequence]:
        raise ValueError(f"a source must have at least one symbol; number {empty[0]} of the batch has none")
    rows = [vocabulary.encode(sequence) for sequence in sequences]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long, device="cpu")
    return Source(_padded(rows, vocabulary.pad), lengths)


def collate(pairs: Sequence[Pair], source: Vocabulary, target: Vocabulary) -> Batch:
    """Encode pairs as one padded batch.

    Example:
        >>> letters = Vocabulary("ab")
        >>> batch = collate([Pair(("a",), ("a", "b")), Pair(("b",), ("b",))], letters, letters)
        >>> batch.inputs, batch.target
        (tensor([[4, 2, 3],
                [4, 3, 5]]), tensor([[   2,    3,    0],
                [   3,    0, -100]]))
    """
    if not pairs:
        raise ValueError("a batch must have at least one pair, got none")
    rows = [target.encode(pair.target) for pair in pairs]
    inputs = _padded([[target.start, *row] for row in rows], target.pad)
    targets = _padded([[*row, STOP] for row in rows], IGNORED)
    return Batch(read([pair.source for pair in pairs], source), inputs, targets)


def check_pairs(pairs: Sequence[Pair], name: str) -> None:
    """Check a sequence of pairs."""
    check_kind(pairs, name, Sequence, what="a sequence of Pair")
    for each in pairs:
        if not isinstance(each, Pair):
            raise TypeError(f"{name} must hold objects of the class Pair, got {type(each).__name__}")


class Batches:
    """Batches of pairs with similar lengths; iteration is in order of length, ``epoch`` in random order.

    Args:
        pairs: of source and target sequences.
        source: the vocabulary of the sources.
        target: the vocabulary of the targets.
        size: the number of pairs in a batch.
        seed: of the random order.
        parts: the number of epochs in which every pair is used once.

    Example:
        >>> letters = Vocabulary("ab")
        >>> pairs = [Pair(("a",), ("a",) * n) for n in (3, 1, 2)]
        >>> [tuple(batch.target.shape) for batch in Batches(pairs, letters, letters, size=2)]
        [(2, 3), (1, 4)]
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        source: Vocabulary,
        target: Vocabulary,
        *,
        size: int = 64,
        seed: int = 0,
        parts: int = 1,
    ) -> None:
        check_pairs(pairs, "pairs")
        check_kind(source, "source", Vocabulary)
        check_kind(target, "target", Vocabulary)
        size, parts = check_count(size, "size"), check_count(parts, "parts", 0)
        if not 1 <= parts <= max(len(pairs), 1):
            raise ValueError(f"parts must be between 1 and {len(pairs)}, the number of pairs, got {parts}")
        self.pairs, self.source, self.target, self.size = pairs, source, target, size
        self.seed, self.parts = seed, parts

    def __len__(self) -> int:
        """The number of batches of an epoch; of the longest if epochs differ."""
        return math.ceil(math.ceil(len(self.pairs) / self.parts) / self.size)

    def __iter__(self) -> Iterator[Batch]:
        """All batches in order of length, for validation."""
        rows = sorted(range(len(self.pairs)), key=self._length)
        yield from map(self._batch, self._groups(rows))

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of an epoch in a random order, the same in every call, so that a run can be resumed."""
        turn, part = divmod(number, self.parts)
        random = Random(f"{self.seed} {turn}")
        rows = list(range(len(self.pairs)))
        random.shuffle(rows)
        rows = rows[part :: self.parts]
        pool = POOL * self.size
        pools = [sorted(rows[first : first + pool], key=self._length) for first in range(0, len(rows), pool)]
        groups = [group for each in pools for group in self._groups(each)]
        random.shuffle(groups)
        yield from map(self._batch, groups)

    def _length(self, row: int) -> tuple[int, int]:
        return len(self.pairs[row].target), len(self.pairs[row].source)

    def _groups(self, rows: Sequence[int]) -> list[Sequence[int]]:
        return [rows[first : first + self.size] for first in range(0, len(rows), self.size)]

    def _batch(self, rows: Sequence[int]) -> Batch:
        return collate([self.pairs[row] for row in rows], self.source, self.target)


def _padded(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Rows of numbers as a tensor (rows, longest), filled up with ``pad``."""
    width = max(map(len, rows), default=0)
    full = [[*row, *[pad] * (width - len(row))] for row in rows]
    return torch.tensor(full, dtype=torch.long, device="cpu").reshape(-1, width)

"""Vocabularies: numbers for symbols such as characters, words or tags, and four special numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

STOP, UNKNOWN = 0, 1
"""Classes besides the symbols: the end of a sequence, and a symbol that is not in the vocabulary."""

SPECIAL = ("</s>", "<unk>")


class Vocabulary:
    """A mapping between symbols and numbers.

    A model writes ``STOP``, ``UNKNOWN`` or a symbol: these are the ``len(vocabulary)`` classes of an output layer. What
    it only ever reads, ``start`` and ``pad``, comes after them.

    Args:
        symbols: in the order of their numbers; each once.

    Example:
        >>> letters = Vocabulary("abc")
        >>> letters.encode("cab!"), letters.decode([4, 2, 3])
        ([4, 2, 3, 1], ('c', 'a', 'b'))
        >>> len(letters), letters.start, letters.pad
        (5, 5, 6)
    """

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = tuple(symbols)
        if strange := [symbol for symbol in self.symbols if not isinstance(symbol, str)]:
            raise TypeError(f"symbols must be strings, got {strange[0]!r}")
        if clash := [symbol for symbol, count in Counter([*SPECIAL, *self.symbols]).items() if count > 1]:
            raise ValueError(f"symbols must be different, and none of {', '.join(SPECIAL)}; {clash[0]!r} comes twice")
        self._names = (*SPECIAL, *self.symbols)
        self._numbers = {symbol: number for number, symbol in enumerate(self.symbols, len(SPECIAL))}

    @classmethod
    def of(cls, sequences: Iterable[Sequence[str]], *, most: int | None = None, seen: int = 1) -> Vocabulary:
        """Collect the symbols of sequences, the most frequent first, equally frequent ones by name.

        Args:
            sequences: of symbols.
            most: the largest number of symbols to keep.
            seen: the smallest number of occurrences of a symbol that is kept.

        Example:
            >>> Vocabulary.of(["abba", "cab"], most=2).symbols
            ('a', 'b')
        """
        counts = Counter(symbol for sequence in sequences for symbol in sequence)
        ranked = sorted((-count, symbol) for symbol, count in counts.items() if count >= seen)
        return cls(symbol for _, symbol in ranked[:most])

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash(self.symbols)

    def __contains__(self, symbol: object) -> bool:
        return symbol in self._numbers

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.symbols[:5])) + (", …" if len(self.symbols) > 5 else "")
        return f"Vocabulary({len(self.symbols)} symbols: {shown})"

    @property
    def start(self) -> int:
        """The number of the token that is read before the first symbol of a target."""
        return len(self)

    @property
    def pad(self) -> int:
        """The number that pads the shorter sequences of a batch."""
        return len(self) + 1

    def encode(self, sequence: Sequence[str]) -> list[int]:
        """The numbers of symbols; ``UNKNOWN`` for those that are not in the vocabulary."""
        return [self._numbers.get(symbol, UNKNOWN) for symbol in sequence]

    def decode(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """The symbols of numbers."""
        return tuple(self.name(number) for number in numbers)

    def name(self, number: int) -> str:
        """The symbol of a number, or the name of a special one."""
        if not 0 <= number < len(self):
            raise ValueError(f"a number must be in [0, {len(self) - 1}], got {number}")
        return self._names[number]

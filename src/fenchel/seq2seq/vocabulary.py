"""Vocabularies: numbers of symbols such as characters, words or tags, and of four special tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fenchel._checks import check_kind

STOP, UNKNOWN = 0, 1
"""The numbers of two special classes: the end of a sequence, and any symbol that is not in the vocabulary."""

SPECIAL = ("</s>", "<unk>")


class Vocabulary:
    """A mapping between symbols and numbers.

    The output of a model is ``STOP``, ``UNKNOWN`` or a symbol: these are the ``len(vocabulary)`` classes of an output
    layer. ``start`` and ``pad``, which are only inputs, have the next two numbers.

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
        check_kind(symbols, "symbols", Iterable, what="strings")
        self.symbols = tuple(symbols)
        if strange := [symbol for symbol in self.symbols if not isinstance(symbol, str)]:
            raise TypeError(f"symbols must be strings, got {strange[0]!r}")
        if clash := [symbol for symbol, count in Counter([*SPECIAL, *self.symbols]).items() if count > 1]:
            raise ValueError(f"symbols must be different, and none of {', '.join(SPECIAL)}; {clash[0]!r} occurs twice")
        self._names = (*SPECIAL, *self.symbols)
        self._numbers = {symbol: number for number, symbol in enumerate(self.symbols, len(SPECIAL))}

    @classmethod
    def of(cls, sequences: Iterable[Sequence[str]], *, max_size: int | None = None, min_count: int = 1) -> Vocabulary:
        """Collect the symbols of sequences, the most frequent first, equally frequent ones by name.

        Args:
            sequences: of symbols.
            max_size: the largest number of symbols.
            min_count: the smallest number of occurrences of a symbol that is kept.

        Example:
            >>> Vocabulary.of(["abba", "cab"], max_size=2).symbols
            ('a', 'b')
        """
        counts = Counter(symbol for sequence in sequences for symbol in sequence)
        ranked = sorted((-count, symbol) for symbol, count in counts.items() if count >= min_count)
        return cls(symbol for _, symbol in ranked[:max_size])

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
        """The number of the decoder's first input, before the first symbol of a target."""
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

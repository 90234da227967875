"""Morphological inflection: tags and a lemma are read as one sequence, the inflected form is written by letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fenchel.seq2seq import Beam, Pair, Seq2Seq, Stepper, Vocabulary, beam_search
from fenchel_lab.data.sigmorphon2018 import Inflection
from fenchel_lab.models.training import by_length

LONGEST = 60
"""Letters that a form may have."""


def spelled(lemma: str, tags: Sequence[str], language: str = "") -> tuple[str, ...]:
    """What a model reads: the language, the tags, then the letters of the lemma. One model may know many languages.

    Example:
        >>> spelled("draw", ["V", "PST"], "english")
        ('<english>', '<V>', '<PST>', 'd', 'r', 'a', 'w')
    """
    if not lemma:
        raise ValueError("a lemma must have at least one letter, got ''")
    if isinstance(tags, str):
        raise TypeError(f"tags must be a sequence of tags, such as ['N', 'PL'], got {tags!r}")
    return (*[f"<{tag}>" for tag in ([language] if language else []) + list(tags)], *lemma)


def paired(inflection: Inflection, language: str = "") -> Pair:
    """An inflection as a pair to learn from."""
    return Pair(spelled(inflection.lemma, inflection.tags, language), tuple(inflection.form))


def unknown(source: Sequence[str], vocabulary: Vocabulary) -> tuple[str, ...]:
    """Symbols of a source that no model has seen in training: each is read as the one symbol for all of them."""
    return tuple(dict.fromkeys(symbol for symbol in source if symbol not in vocabulary))


@dataclass(frozen=True)
class Inflected:
    """What a model holds possible: forms and their probabilities, the most probable first; and the beam behind them.

    If no form ended within ``LONGEST`` letters, there is one, which was cut there: its probability is that of all forms
    that begin so.
    """

    forms: tuple[tuple[str, float], ...]
    beam: Beam

    @property
    def form(self) -> str:
        """The most probable one."""
        return self.forms[0][0]

    @property
    def cut(self) -> bool:
        """Whether the form was cut at ``LONGEST`` letters, before its end."""
        return not self.beam.best.finished

    @property
    def single(self) -> bool:
        """Whether a single form has all the probability, and that is certain."""
        return self.beam.exact and self.beam.seen == 1


def inflect(
    model: Seq2Seq,
    sources: Sequence[Sequence[str]],
    beam: int = 5,
    *,
    n_best: int | None = None,
    batch: int = 64,
    stepper: Stepper | None = None,
    keep_tree: bool = False,
) -> list[Inflected]:
    """Forms of lemmas and tags as ``spelled`` gives them, by beam search.

    Args:
        model: whose symbols are written.
        sources: as ``spelled`` gives them.
        beam: prefixes that go on.
        n_best: forms to return for each.
        batch: how many are searched at a time.
        stepper: to be asked in its place: an ``Ensemble``.
        keep_tree: whether to keep all prefixes of the beam, for a drawing.
    """
    found: dict[int, Inflected] = {}
    for rows in by_length([len(source) for source in sources], batch):
        beams = beam_search(
            stepper or model,
            [sources[row] for row in rows],
            beam_size=beam,
            n_best=n_best,
            max_length=LONGEST,
            keep_tree=keep_tree,
        )
        for row, each in zip(rows, beams, strict=True):
            forms = [("".join(model.target.decode(h.tokens)), h.probability) for h in each.hypotheses]
            found[row] = Inflected(tuple(forms), each)
    return [found[row] for row in range(len(sources))]

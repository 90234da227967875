"""Rationalizers: classifiers that select words, class a text by these, and tell which they were.

An encoder reads the text, a Hopfield pooling layer with one static query selects words, a predictor classes what was
pooled: the vectors of the selected words, and nothing of the others. What selects is an Ω: k-subsets and sequential
k-subsets with a budget that is a share of the text, or, to compare, the attention of softmax, sparsemax, entmax and
fusedmax.

    model = Rationalizer(vocabulary, ["bad", "good"], Selection("sequential k-subsets", budget=0.1))
    model, _ = trained(model, reviews, others, Course(5))
    model.explain("A film that nobody needs, and the dullest of the year.").spans
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel import Fused, Gini, Regularizer, Shannon, SparseMAP, Tsallis
from fenchel.hopfield import HopfieldPooling
from fenchel.seq2seq import saving
from fenchel.seq2seq.checkpoints import CHECKPOINT, Checkpoint
from fenchel.structures import SequentialSubsets, Share, Subsets
from fenchel_lab.data.sst import Review
from fenchel_lab.drawing import highlights
from fenchel_lab.drawing.highlights import Explanation
from fenchel_lab.models import training
from fenchel_lab.models.documents import AT_ONCE, UNKNOWN, Batch, Vocabulary
from fenchel_lab.models.training import Course, by_length
from fenchel_lab.models.words import WordEncoder

Kind = Literal["softmax", "sparsemax", "entmax", "fusedmax", "k-subsets", "sequential k-subsets"]
Reads = Literal["words", "states"]
WINDOW = 4 * AT_ONCE
"""Texts that are sorted by length, to be explained, at a time."""
KINDS: tuple[Kind, ...] = ("softmax", "sparsemax", "entmax", "fusedmax", "k-subsets", "sequential k-subsets")


@dataclass(frozen=True)
class Selection:
    """How words are selected.

    Args:
        kind: "k-subsets" or "sequential k-subsets", whose weights are 1 at most and add up to the budget; or an
            attention that decides by itself how many words have weight: "softmax" (all), "sparsemax", "entmax"
            (α = 1.5), "fusedmax".
        budget: of k-subsets: a share of the words, up to 1, or how many, an int. Texts shorter than that are
            selected whole.
        transition: of sequential k-subsets: what a pair of selected neighbours adds to the score of a selection.
        temperature: scores and transitions are divided by it; the lower, the nearer to a selection of whole words.
        test_transition: outside of training; the same if None.
        test_temperature: outside of training; the same if None. With 1e-3 selections are nearly whole words.
        strength: of fusedmax.
    """

    kind: Kind = "sequential k-subsets"
    budget: float | int = 0.2
    transition: float = 0.3
    temperature: float = 0.1
    test_transition: float | None = None
    test_temperature: float | None = None
    strength: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        numeric = isinstance(self.budget, int | float) and not isinstance(self.budget, bool)
        if not numeric or not self.budget > 0 or (isinstance(self.budget, float) and self.budget > 1):
            raise ValueError(f"budget must be a share in (0, 1] or a positive int, got {self.budget!r}")
        for name in ("temperature", "test_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("transition", "test_transition"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength must be at least 0 and finite, got {self.strength}")

    def omega(self, training: bool = True, places: int | None = None) -> Regularizer:
        """Ω of the weights.

        Args:
            training: whether temperature and transition are those of training.
            places: how many words there are at most; a structure has no fewer parts than its k.
        """
        gamma = self.temperature if training or self.test_temperature is None else self.test_temperature
        transition = self.transition if training or self.test_transition is None else self.test_transition
        size: int | Share = Share(self.budget) if isinstance(self.budget, float) else self.budget
        if isinstance(size, int) and places is not None:
            size = min(size, places)
        choices: dict[str, Callable[[], Regularizer]] = {
            "softmax": Shannon,
            "sparsemax": Gini,
            "entmax": partial(Tsallis, 1.5),
            "fusedmax": partial(Fused, self.strength),
            "k-subsets": lambda: SparseMAP(Subsets(size)),
            "sequential k-subsets": lambda: SparseMAP(SequentialSubsets(size, transition / gamma)),
        }
        plain = self.kind == "sequential k-subsets" and transition == 0  # equal, and faster to compute
        return gamma * choices["k-subsets" if plain else self.kind]()


@dataclass(frozen=True)
class Size:
    """How large a rationalizer is.

    Args:
        hidden: units of the encoder, of each direction.
        dropout: of words' vectors in training.
        head_dropout: of the pooled vector in training.
    """

    hidden: int = 100
    dropout: float = 0.0
    head_dropout: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.hidden, bool) or not isinstance(self.hidden, int) or self.hidden < 1:
            raise ValueError(f"hidden must be an int of at least 1, got {self.hidden!r}")
        for name in ("dropout", "head_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)!r}")


class Rationalizer(nn.Module):
    r"""Class or rate a text by a few of its words, and tell which.

    .. math:: w = \operatorname{argmax}_\Omega\big(\beta K \xi\big), \qquad \text{scores} = W \sum_i w_i v_i + b

    with K linear images of the words' states, ξ the static query, and v linear images of the words' own vectors: a
    Hopfield pooling layer. Words without weight do not reach the predictor: they have a say in which words are selected
    and how much weight these have, for the encoder reads all, and no other. With ``reads="states"`` v are images of the
    states; these know their neighbours, so that words which are not selected reach the predictor too. (Which of both
    the paper pools it does not tell.)

    A text without words has the class of an empty selection and no spans. A text that is shorter than the budget is
    selected whole. Words without a vector share one, of zeros or trained, are told in ``Explanation.unknown`` and may
    be selected as others are. Of texts that are longer than the vocabulary reads, the words before are not selected.

    Args:
        vocabulary: words and where their vectors begin.
        labels: names of the classes; none for ratings, numbers that are predicted by a head with one output and the
            mean squared error.
        selection: how words are selected.
        size: of the layers.
        reads: what is read out of the selected words: the "words" alone, or their "states".
        trainable: whether the words' vectors are trained.

    References: Santos et al. (2024), section 5.4; Guerreiro & Martins (2021).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        labels: Sequence[str],
        selection: Selection | None = None,
        size: Size | None = None,
        reads: Reads = "words",
        trainable: bool = False,
    ) -> None:
        super().__init__()
        if len(labels) == 1 or len(set(labels)) < len(labels):
            raise ValueError(f"labels must be at least two different names, or none for ratings, got {list(labels)}")
        if reads not in ("words", "states"):
            raise ValueError(f"reads must be 'words' or 'states', got {reads!r}")
        self.vocabulary, self.labels, self.reads = vocabulary, tuple(labels), reads
        self.selection, self.size = selection or Selection(), size or Size()
        self.encoder = WordEncoder(vocabulary.vectors, self.size.hidden, self.size.dropout, trainable)
        width = self.encoder.width
        self.pool = HopfieldPooling(
            width,
            width,
            pattern_size=width,
            pattern_projection_size=width if reads == "states" else vocabulary.vectors.shape[1],
            disable_out_projection=True,
            # A query that starts near zero lets every word have its say before some are dropped.
            normalize_state_pattern=False,
            omega=self.selection.omega(),
        )
        # Sums of k words and means of a few: what is classed does not depend on how many there are.
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Dropout(self.size.head_dropout), nn.Linear(width, len(self.labels) or 1)
        )
        self.to(vocabulary.vectors)

    def forward(self, batch: Batch) -> Tensor:
        """Scores of the classes, (B, classes), or ratings (B, 1)."""
        scores: Tensor = self.head(self.pool(*self._patterns(batch)))
        return scores

    @torch.no_grad()
    def weights(self, batch: Batch) -> Tensor:
        """Weights of the words, (B, L): exactly zero where they are not selected, and behind the ends."""
        found = self.pool.get_association_matrix(*self._patterns(batch))[:, 0, 0]
        return found[:, : batch.words.shape[1]]

    def explain(self, text: str | Sequence[str]) -> Explanation:
        """Class or rate a text, or a sequence of words, and tell which words decided."""
        return next(self.explain_all([text]))

    def explain_all(self, texts: Sequence[str | Sequence[str]]) -> Iterator[Explanation]:
        """``explain`` for many texts, in their order; texts of about equal length are read together."""
        for first in range(0, len(texts), WINDOW):
            yield from self._explain_some(texts[first : first + WINDOW])

    def _explain_some(self, texts: Sequence[str | Sequence[str]]) -> list[Explanation]:
        laid = [_laid(text) for text in texts]
        found: dict[int, Explanation] = {}
        training, device = self.training, self.encoder.vectors.device
        self.eval()
        try:
            with torch.no_grad():
                for rows in by_length([len(places) for _, places in laid], AT_ONCE):
                    reviews = [Review(tuple(_words(*laid[row])), 0) for row in rows]
                    batch = self.vocabulary.batch(reviews).to(device)
                    chances, weights = self._answers(batch).tolist(), self.weights(batch).tolist()
                    for at, row in enumerate(rows):
                        found[row] = self._explanation(*laid[row], weights[at], chances[at])
        finally:
            self.train(training)
        return [found[row] for row in range(len(laid))]

    def _answers(self, batch: Batch) -> Tensor:
        """Probabilities of the classes, (B, classes), or ratings (B, 1)."""
        scores: Tensor = self(batch)
        return scores.softmax(-1) if self.labels else scores

    def _explanation(
        self, text: str, places: list[highlights.Place], weights: list[float], chances: list[float]
    ) -> Explanation:
        words = _words(text, places)
        read = weights[: min(len(words), self.vocabulary.longest)]
        unknown = dict.fromkeys(word for word in words if word not in self.vocabulary.rows)
        return Explanation(
            text,
            places,
            [0.0] * (len(words) - len(read)) + read,
            self.labels[max(range(len(chances)), key=chances.__getitem__)] if self.labels else f"{chances[0]:.2f}",
            dict(zip(self.labels, chances, strict=True)) if self.labels else {},
            tuple(unknown),
        )

    def _patterns(self, batch: Batch) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """What is pooled, and which places are padding."""
        words = batch.words if batch.words.shape[1] else F.pad(batch.words, (0, 1), value=UNKNOWN)
        self.pool.hopfield.omega = self.selection.omega(self.training, words.shape[1])
        states = self.encoder(words, batch.lengths)
        padding = torch.arange(words.shape[1], device=words.device) >= batch.lengths.unsqueeze(-1)
        return (states if self.reads == "states" else (states, self.encoder.vectors[words])), padding

    # -- folders -------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What the model is made of besides its parameters, as JSON can hold it."""
        return {
            "format": saving.FORMAT,
            "model": type(self).__name__,
            "sizes": asdict(self.size),
            "selection": asdict(self.selection),
            "reads": self.reads,
            "trainable": isinstance(self.encoder.vectors, nn.Parameter),
            "labels": list(self.labels),
            "longest": self.vocabulary.longest,
            "words": dict(self.vocabulary.rows),
        }

    def save(self, folder: Path | str) -> None:
        """Write ``model.safetensors`` and ``model.json`` into a folder, made if need be."""
        saving.save(folder, self.settings(), self.state_dict())

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """The model that was saved to a folder, in evaluation mode."""
        settings, tensors = saving.load(folder, [cls.__name__])
        with saving.whole(folder, cls.__name__):
            vectors, words, longest = tensors["encoder.vectors"][1:], dict(settings["words"]), settings["longest"]
            labels = saving.check_strings(settings["labels"], "labels")
            for name, kind in (("selection", Selection), ("sizes", Size)):
                saving.check_names([each.name for each in fields(kind)], settings[name])
            selection, size = Selection(**settings["selection"]), Size(**settings["sizes"])
            reads, trainable = settings["reads"], settings["trainable"]
            selection.omega(training=False)  # an Ω that cannot be is told here, not at the first text
            if not isinstance(trainable, bool):
                raise ValueError(f"trainable must be true or false, got {trainable!r}")
            Vocabulary(words, vectors, longest)

        def make() -> Rationalizer:
            here = vectors.to("meta") if torch.get_default_device().type == "meta" else vectors
            return cls(Vocabulary(words, here, longest), labels, selection, size, reads, trainable)

        return cast(Self, saving.build(folder, cls.__name__, tensors, make))


@dataclass(frozen=True)
class Found:
    """What a rationalizer does to reviews.

    Args:
        predicted: classes or ratings.
        labels: those that are right.
        chosen: places of the selected words, of each review, counted in what was read.
        lengths: how many words were read.
        marked: places of the words that people marked, in what was read; None where nobody did.
    """

    predicted: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    chosen: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    marked: list[list[int] | None] = field(default_factory=list)

    @property
    def f1(self) -> float:
        """Of the classes, their mean."""
        return highlights.f1(self.predicted, self.labels)

    @property
    def error(self) -> float:
        """Of ratings, the mean squared error."""
        return _mean([(predicted - label) ** 2 for predicted, label in zip(self.predicted, self.labels, strict=True)])

    @property
    def share(self) -> float:
        """Of a text that is selected, on average."""
        return _mean([len(chosen) / length for chosen, length in zip(self.chosen, self.lengths, strict=True) if length])

    @property
    def runs(self) -> float:
        """Of neighbours in a text's selection, on average."""
        return _mean([1 + sum(b - a > 1 for a, b in pairwise(c)) for c in self.chosen if c])

    @property
    def run_length(self) -> float:
        """Words in a run, on average over all runs."""
        words, all_runs = sum(map(len, self.chosen)), self.runs * sum(bool(chosen) for chosen in self.chosen)
        return words / all_runs if all_runs else 0.0

    @property
    def overlap(self) -> float | None:
        """F₁ of the selected words beside the marked ones, the mean over reviews; None where nothing is marked."""
        pairs = [(chosen, marked) for chosen, marked in zip(self.chosen, self.marked, strict=True) if marked]
        return _mean([highlights.overlap(*pair) for pair in pairs]) if pairs else None

    @property
    def overlap_of_means(self) -> float | None:
        """F₁ of the mean precision and the mean recall over reviews, as in the paper; None where nothing is marked."""
        hits = [
            (len(set(chosen) & set(marked)), len(chosen), len(marked))
            for chosen, marked in zip(self.chosen, self.marked, strict=True)
            if marked
        ]
        return _f1_of_means(hits)

    @property
    def chance(self) -> float | None:
        """The overlap to be expected of as many words, taken at random."""
        expected = [2 * hits / (chosen + marked) for hits, chosen, marked in self._expected()]
        return _mean(expected) if expected else None

    @property
    def chance_of_means(self) -> float | None:
        """The overlap of means of as many words, taken at random: that of the expected precision and recall."""
        return _f1_of_means(self._expected())

    def _expected(self) -> list[tuple[float, int, int]]:
        """For every marked review the expected number of hits by chance, and how many words are selected and marked."""
        rows = zip(map(len, self.chosen), self.marked, self.lengths, strict=True)
        return [(chosen * len(marked) / length, chosen, len(marked)) for chosen, marked, length in rows if marked]


@torch.no_grad()
def found(model: Rationalizer, reviews: Sequence[Review], top: float | None = None) -> Found:
    """Read reviews, which may be annotated.

    Args:
        model: in evaluation mode.
        reviews: of which those with a ``rationale`` tell what people marked.
        top: take this share of the words, those with the largest weights, in place of all that have weight.
    """
    result = Found()
    for some in model.vocabulary.grouped(reviews, AT_ONCE):
        batch = model.vocabulary.batch(some)
        scores = model(batch)
        result.predicted.extend((scores.argmax(-1) if model.labels else scores.squeeze(-1)).tolist())
        result.labels.extend(batch.labels.tolist())
        result.lengths.extend(batch.lengths.tolist())
        weights = model.weights(batch)
        for review, row, length in zip(some, weights, batch.lengths.tolist(), strict=True):
            result.chosen.append(chosen(row[:length], top))
            marked = getattr(review, "rationale", None)
            skipped = len(review.words) - length
            result.marked.append(None if marked is None else [at - skipped for at in marked if at >= skipped])
    return result


def chosen(weights: Tensor, top: float | None = None) -> list[int]:
    """Places (of one text) with weight, or so large a share of all with the largest weights; rising."""
    if top is None:
        return weights.nonzero().flatten().tolist()
    if not len(weights):
        return []
    places: list[int] = weights.topk(min(len(weights), Share(top).size(len(weights)))).indices.sort().values.tolist()
    return places


def shuffled(reviews: Sequence[Review]) -> list[Review]:
    """In random order: files have one class after the other, and texts of equal length would make batches of one."""
    return [reviews[row] for row in torch.randperm(len(reviews)).tolist()]


def loss(model: Rationalizer, batch: Batch) -> Tensor:
    """Cross-entropy, or the mean squared error of ratings."""
    scores = model(batch)
    if model.labels:
        return F.cross_entropy(scores, batch.labels)
    return F.mse_loss(scores.squeeze(-1), batch.labels.to(scores))


def quality(model: Rationalizer, reviews: Sequence[Review]) -> float:
    """By which epochs are compared: F₁ of the classes; of ratings 1 / (1 + mean squared error)."""
    told = found(model, reviews)
    return told.f1 if model.labels else 1 / (1 + told.error)


def trained(
    model: Rationalizer,
    train: Sequence[Review],
    valid: Sequence[Review],
    course: Course,
    batch: int = 16,
    progress: Callable[[float], None] = lambda part: None,
    folder: Path | str | None = None,
) -> tuple[Rationalizer, float]:
    """The model of the epoch with the best ``quality`` on ``valid``, in evaluation mode, and that quality.

    With a folder, a checkpoint is written there after every epoch, and the best model so far is saved. If it has a
    checkpoint of the same training, with the same seed of torch's generator, the run goes on from it, to the same
    parameters that it would have reached without the interruption.
    """
    if not train or not valid:
        raise ValueError(f"there must be reviews to train and to validate with, got {len(train)} and {len(valid)}")
    checkpoint, save = None, None
    if folder is not None:
        what = _what(model, train, valid, {**asdict(course), "batch": batch})
        checkpoint = Checkpoint(Path(folder) / CHECKPOINT, what, frozenset({"patience"}))
        save = partial(Rationalizer.save, folder=folder)
    batches = list(model.vocabulary.batches(shuffled(train), batch))
    return training.trained(model, batches, loss, partial(quality, reviews=valid), course, progress, checkpoint, save)


def _what(
    model: Rationalizer, train: Sequence[Review], valid: Sequence[Review], course: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """What is trained, how, and on what; long lists by a short name that changes with them."""
    settings = model.settings()
    words, vectors = settings.pop("words"), model.encoder.vectors.detach().cpu().numpy().tobytes()
    data = {"train": repr(list(train)), "valid": repr(list(valid)), "words": repr(words)}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in data.items()}
    digests["vectors"] = hashlib.sha256(vectors).hexdigest()[:16]
    return {"training": {**course, "seed": torch.initial_seed()}, "model": settings, "data": digests}


def _laid(text: str | Sequence[str]) -> tuple[str, list[highlights.Place]]:
    """A text and the places of its words; words that are given one by one are joined by blanks."""
    if isinstance(text, str):
        return text, highlights.places(text)
    places, at = [], 0
    for word in text:
        places.append((at, at + len(word)))
        at += len(word) + 1
    return " ".join(text), places


def _words(text: str, places: Sequence[highlights.Place]) -> list[str]:
    return [highlights.normal(text[start:end]) for start, end in places]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _f1_of_means(rows: Sequence[tuple[float, int, int]]) -> float | None:
    """F₁ of the mean precision and the mean recall of rows (hits, selected, marked)."""
    if not rows:
        return None
    precision = _mean([hits / chosen if chosen else 0.0 for hits, chosen, _ in rows])
    recall = _mean([hits / marked for hits, _, marked in rows])
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

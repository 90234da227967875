"""The explanation game: a classifier decides, an explainer sends a few of the words, a layperson guesses the decision.

The layperson knows no more than the message, a bag of words, and is linear. How often the guess is right, the
communication success rate, tells how much of the decision is in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel.hopfield import HopfieldPooling
from fenchel.structures import Share
from fenchel_lab.data.sst import Review
from fenchel_lab.models import training
from fenchel_lab.models.documents import AT_ONCE, Batch, Vocabulary
from fenchel_lab.models.rationale import Rationalizer, Selection, Size, shuffled
from fenchel_lab.models.training import Course
from fenchel_lab.models.words import WordEncoder


@dataclass(frozen=True)
class Round:
    """Texts, what the classifier says of them, and the words that are sent: boolean (B, L)."""

    batch: Batch
    message: Tensor


class Layperson(nn.Module):
    """A linear classifier of bags of words: the mean over the words of a message of what each says of the classes."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.opinions = nn.Parameter(torch.zeros(words, classes))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, given: Round) -> Tensor:
        message = given.message.to(self.opinions.dtype)
        total = message.unsqueeze(-2) @ self.opinions[given.batch.words]
        scores: Tensor = total.squeeze(-2) / message.sum(-1, keepdim=True).clamp_min(1.0) + self.bias
        return scores


class Explainer(nn.Module):
    """Selects words for a layperson that is trained with it: together they guess what the classifier says.

    It reads the text, not the classifier. In training the message has weights; what is sent in the end are the words
    with the largest weights, as many as the budget says, and no weights.
    """

    def __init__(self, vocabulary: Vocabulary, classes: int, selection: Selection, size: Size) -> None:
        super().__init__()
        if isinstance(selection.budget, int) or not selection.kind.endswith("subsets"):
            raise ValueError(f"selection must be of k-subsets with a share of the words as budget, got {selection}")
        self.selection = selection
        self.encoder = WordEncoder(vocabulary.vectors, size.hidden, size.dropout)
        self.layperson = Layperson(len(vocabulary.vectors), classes)
        self.pool = HopfieldPooling(
            self.encoder.width,
            self.encoder.width,
            pattern_size=classes,
            pattern_projection_size=classes,
            pattern_projection_as_static=True,
            normalize_pattern_projection=False,
            normalize_state_pattern=False,
            disable_out_projection=True,
            omega=selection.omega(),
        )

    def forward(self, batch: Batch) -> Tensor:
        states, padding = self._read(batch)
        total = self.pool((states, self.layperson.opinions[batch.words]), padding)
        chosen = _sizes(batch.lengths, self.selection.budget).unsqueeze(-1)
        scores: Tensor = total / chosen + self.layperson.bias
        return scores

    @torch.no_grad()
    def message(self, batch: Batch) -> Tensor:
        """The words that are sent: those with the largest weights, as many as the budget says."""
        states, padding = self._read(batch)
        weights = self.pool.get_association_matrix((states, self.layperson.opinions[batch.words]), padding)[:, 0, 0]
        return largest(weights, batch.lengths, self.selection.budget)

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        states = self.encoder(batch.words, batch.lengths)
        return states, torch.arange(states.shape[1]) >= batch.lengths.unsqueeze(-1)


Messages = Callable[[Batch], Tensor]
"""An explainer: the words that it sends, boolean (B, L)."""


def attended(model: Rationalizer) -> Messages:
    """Send the words that a sparse attention gives any weight."""
    return lambda batch: model.weights(batch) > 0


def top(model: Rationalizer, budget: float) -> Messages:
    """Send a share of the words, those with the most attention."""
    return lambda batch: largest(model.weights(batch), batch.lengths, budget)


def largest(weights: Tensor, lengths: Tensor, budget: float) -> Tensor:
    """Where the largest weights of each text stand, as many as the budget says, and none behind its end.

    Example:
        >>> largest(torch.tensor([[0.1, 0.5, 0.0, 0.4], [0.3, 0.7, 0.0, 0.0]]), torch.tensor([4, 2]), 0.5)
        tensor([[False,  True, False,  True],
                [False,  True, False, False]])
    """
    inside = torch.arange(weights.shape[-1]) < lengths.unsqueeze(-1)
    order = torch.where(inside, weights, -1.0).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return (order < _sizes(lengths, budget).unsqueeze(-1)) & inside


def _sizes(lengths: Tensor, budget: float) -> Tensor:
    """How many words of texts the budget lets through."""
    return torch.tensor([Share(budget).size(length) for length in lengths.tolist()])


@torch.no_grad()
def decided(classifier: Rationalizer, reviews: Sequence[Review], size: int = AT_ONCE) -> list[Batch]:
    """Reviews as batches, with what the classifier says of them in place of their classes."""
    batches = classifier.vocabulary.batches(reviews, size)
    return [replace(batch, labels=classifier(batch).argmax(-1)) for batch in batches]


@dataclass(frozen=True)
class Outcome:
    """How a game ended.

    Args:
        success: how often the layperson guessed the classifier's output.
        right: how often the guess was the review's own class.
        length: words per message, on average.
    """

    success: float
    right: float
    length: float


def play(
    classifier: Rationalizer,
    messages: Messages,
    train: Sequence[Review],
    valid: Sequence[Review],
    test: Sequence[Review],
    course: Course,
    size: int = 16,
    progress: Callable[[float], None] = lambda part: None,
) -> Outcome:
    """Train a layperson on the messages of an explainer that is given, and test it."""
    layperson = Layperson(len(classifier.vocabulary.vectors), len(classifier.labels))
    rounds = [Round(batch, messages(batch)) for batch in decided(classifier, shuffled(train), size)]
    known = [Round(batch, messages(batch)) for batch in decided(classifier, valid)]

    def loss(model: Layperson, given: Round) -> Tensor:
        return F.cross_entropy(model(given), given.batch.labels)

    layperson, _ = training.trained(layperson, rounds, loss, lambda model: _success(model, known), course, progress)
    return outcome(classifier, layperson, messages, test)


def together(
    classifier: Rationalizer,
    explainer: Explainer,
    train: Sequence[Review],
    valid: Sequence[Review],
    test: Sequence[Review],
    course: Course,
    size: int = 16,
    progress: Callable[[float], None] = lambda part: None,
) -> Outcome:
    """Train an explainer and its layperson together, and test them."""
    known = decided(classifier, valid)

    def loss(model: Explainer, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch), batch.labels)

    def score(model: Explainer) -> float:
        return _success(model.layperson, [Round(batch, model.message(batch)) for batch in known])

    batches = decided(classifier, shuffled(train), size)
    explainer, _ = training.trained(explainer, batches, loss, score, course, progress)
    return outcome(classifier, explainer.layperson, explainer.message, test)


@torch.no_grad()
def outcome(classifier: Rationalizer, layperson: Layperson, messages: Messages, reviews: Sequence[Review]) -> Outcome:
    """Play with reviews that nobody was trained on."""
    success = right = words = 0
    for batch in classifier.vocabulary.batches(reviews, AT_ONCE):
        given = Round(batch, messages(batch))
        guess = layperson(given).argmax(-1)
        success += int((guess == classifier(batch).argmax(-1)).sum())
        right += int((guess == batch.labels).sum())
        words += int(given.message.sum())
    return Outcome(success / len(reviews), right / len(reviews), words / len(reviews))


@torch.no_grad()
def _success(layperson: Layperson, rounds: Sequence[Round]) -> float:
    right = sum(int((layperson(given).argmax(-1) == given.batch.labels).sum()) for given in rounds)
    return right / sum(len(given.batch.labels) for given in rounds)

"""The reader of documents: batches, attention of every kind, and what is measured on it."""

import pytest
import torch

from fenchel import Gini, Shannon
from fenchel_lab.data.sst import Review
from fenchel_lab.models import documents
from fenchel_lab.models.documents import Attention, Reader, Size, Vocabulary

WORDS = ("a", "good", "bad", "film", "plot")
REVIEWS = [
    Review(("a", "good", "film"), 1),
    Review(("a", "film", "of", "bad", "plot", "a", "plot"), 0),
    Review(("good",), 1),
    Review(("bad", "bad", "plot", "film"), 0),
]
KINDS = [
    Attention("discrete", Shannon(), 1.0),
    Attention("discrete", Gini(), 2.0),
    Attention("continuous", Shannon(), 1.0, 8),
    Attention("continuous", Gini(), 2.0, 8),
    Attention("combined", Shannon(), 1.0, 8),
    Attention("combined", Gini(), 2.0, 8),
]


def vocabulary(longest: int = 6) -> Vocabulary:
    vectors = torch.randn(len(WORDS), 4, generator=torch.Generator().manual_seed(0))
    return Vocabulary({word: row for row, word in enumerate(WORDS)}, vectors, longest)


def reader(attention: Attention) -> Reader:
    torch.manual_seed(0)
    return Reader(vocabulary().vectors, attention, Size(hidden=3, filters=4)).eval()


def test_words_become_their_rows_and_those_not_known_zeros() -> None:
    known = vocabulary()
    batch = known.batch(REVIEWS)
    assert batch.lengths.tolist() == [3, 6, 1, 4]
    assert batch.labels.tolist() == [1, 0, 1, 0]
    vectors = known.vectors[batch.words]
    assert vectors.shape == (4, 6, 4)
    for row, review in enumerate(REVIEWS):
        for place, word in enumerate(review.words[-6:]):
            right = known.vectors[1 + WORDS.index(word)] if word in WORDS else torch.zeros(4)
            assert torch.equal(vectors[row, place], right)


def test_batches_hold_every_review_once_by_length() -> None:
    batches = list(vocabulary().batches(REVIEWS, 3))
    assert [batch.lengths.tolist() for batch in batches] == [[1, 3, 4], [6]]
    assert [label for batch in batches for label in batch.labels.tolist()] == [1, 1, 0, 0]


@pytest.mark.parametrize("attention", KINDS, ids=lambda each: f"{each.kind}-{each.alpha:g}")
def test_a_review_is_read_the_same_among_others_and_alone(attention: Attention) -> None:
    model = reader(attention)
    known = vocabulary()
    together = model(known.batch(REVIEWS))
    alone = torch.cat([model(known.batch([review])) for review in REVIEWS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", KINDS, ids=lambda each: f"{each.kind}-{each.alpha:g}")
def test_every_parameter_learns(attention: Attention) -> None:
    model = reader(attention)
    documents.loss(model, vocabulary().batch(REVIEWS)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool((parameter.grad != 0).any()), name


def test_combined_attention_adds_no_parameter_to_discrete() -> None:
    counts = [sum(p.numel() for p in reader(attention).parameters()) for attention in KINDS]
    assert counts[0] == counts[1] == counts[4] == counts[5]


def test_combined_attention_has_the_moments_of_its_words() -> None:
    look = reader(KINDS[5]).look(vocabulary().batch(REVIEWS))
    assert look.weights is not None
    lengths = torch.tensor([3, 6, 1, 4])
    times = (torch.arange(6) + 0.5) / lengths.unsqueeze(-1)
    mean = (look.weights * times).sum(-1)
    variance = (look.weights * (times - mean.unsqueeze(-1)) ** 2).sum(-1)
    p = documents.density_of(look)
    torch.testing.assert_close(p.loc.flatten(), mean)
    torch.testing.assert_close(p.sigma.flatten(), variance + 1e-6, atol=1e-6, rtol=1e-4)


def test_attended_counts_words_or_the_length_of_intervals() -> None:
    known = vocabulary()
    batches = [known.batch(REVIEWS[:2]), known.batch(REVIEWS[2:])]
    assert documents.attended(reader(KINDS[0]), batches) == 1.0
    assert documents.attended(reader(KINDS[2]), batches) == 1.0
    for attention in (KINDS[3], KINDS[5]):
        model = reader(attention)
        t = torch.linspace(0, 1, 20001).reshape(-1, 1, 1)
        shares = []
        for batch in batches:
            p = documents.density_of(model.look(batch))
            inside = p.log_prob(t.unsqueeze(-1).expand(-1, len(batch.labels), 1, 1)) > -torch.inf
            shares += inside.float().mean(0).flatten().tolist()
        assert documents.attended(model, batches) == pytest.approx(sum(shares) / 4, abs=2e-4)
    sparse = reader(KINDS[1])
    with torch.no_grad():
        sparse.score[2].weight.mul_(1000)  # type: ignore[union-attr, operator]
    assert documents.attended(sparse, batches) == pytest.approx((1 / 3 + 1 / 6 + 1 + 1 / 4) / 4)


def test_accuracy_counts_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = reader(KINDS[0]), vocabulary().batch(REVIEWS)
    monkeypatch.setattr(
        model, "forward", lambda part: torch.tensor([[0.0, 1], [0, 1], [1, 0], [1, 0]])[: len(part.labels)]
    )
    assert documents.accuracy(model, [batch]) == 0.5
    assert documents.accuracy(model, [batch, vocabulary().batch(REVIEWS[:1])]) == 0.6

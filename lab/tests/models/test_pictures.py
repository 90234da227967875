"""Questions about pictures: batches, attention of every kind, and where it is measured to lie."""

import numpy as np
import pytest
import torch

from fenchel import Gini, Shannon
from fenchel_lab.chapters.visual_questions import made_up
from fenchel_lab.data.easy_vqa import Questions
from fenchel_lab.models import pictures
from fenchel_lab.models.pictures import Answerer, Attention, Look, Size, Vocabulary

SMALL = Size(channels=(4, 6), strides=(2, 2), places=4, width=5, functions=4, batch=3)
KINDS = [Attention(Shannon()), Attention(Gini()), Attention(alpha=1.0), Attention(alpha=2.0)]


def model(attention: Attention, data: Questions) -> Answerer:
    torch.manual_seed(0)
    return Answerer(Vocabulary(data), attention, SMALL).eval()


def test_batches_hold_every_question_once_beside_its_image() -> None:
    data = made_up(7, 0, side=8)
    known = Vocabulary(data)
    batches = known.batches(data, 3)
    assert [len(batch.images) for batch in batches] == [3, 3, 1]
    assert sum(len(batch.answers) for batch in batches) == 28
    name = {number: word for word, number in known.words.items()}
    asked = [
        (" ".join(name[n] for n in words.tolist() if n), known.answers[int(answer)], 3 * number + int(image))
        for number, batch in enumerate(batches)
        for words, answer, image in zip(batch.words, batch.answers, batch.image, strict=True)
    ]
    right = [(q.rstrip("?"), a, i) for q, a, i in zip(data.questions, data.answers, data.image.tolist(), strict=True)]
    assert asked == right


def test_words_and_answers_that_were_not_trained_are_neither_known_nor_right() -> None:
    known = Vocabulary(Questions(np.zeros((1, 8, 8, 3), np.uint8), ["what?"], ["red"], np.array([0])))
    data = Questions(np.zeros((1, 8, 8, 3), np.uint8), ["what now?"], ["blue"], np.array([0]))
    [batch] = known.batches(data, 4)
    assert batch.words.tolist() == [[1, 0]]
    assert batch.answers.tolist() == [-1]
    assert pictures.accuracy(Answerer(known, KINDS[0], SMALL), [batch]) == 0.0


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_every_parameter_learns_and_all_have_the_same(attention: Attention) -> None:
    data = made_up(4, 0, side=16)
    answerer = model(attention, data)
    [batch] = Vocabulary(data).batches(data, 4)
    pictures.loss(answerer, batch).backward()
    for name, parameter in answerer.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name
    first = model(KINDS[0], data)
    assert {name for name, _ in answerer.named_parameters()} == {name for name, _ in first.named_parameters()}


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_densities_have_the_moments_of_discrete_attention(alpha: float) -> None:
    data = made_up(3, 0, side=16)
    [batch] = Vocabulary(data).batches(data, 3)
    look = model(Attention(alpha=alpha), data).look(batch)
    assert look.density is not None
    assert look.weights.shape == (12, 4, 4)
    weights, middles = look.weights.double(), (torch.arange(4).double() + 0.5) / 4
    row, column = (weights.sum(2) * middles).sum(1), (weights.sum(1) * middles).sum(1)
    torch.testing.assert_close(look.density.loc, torch.stack([row, column], 1), atol=1e-6, rtol=1e-5)
    both = (weights * middles.unsqueeze(1) * middles).sum((1, 2)) - row * column
    covariance = look.density.covariance_matrix
    torch.testing.assert_close(covariance[:, 0, 1], both, atol=1e-5, rtol=1e-4)
    square = (weights.sum(2) * middles.square()).sum(1) - row.square() + 1 / 192
    torch.testing.assert_close(covariance[:, 0, 0], square, atol=1e-5, rtol=1e-4)
    mass = pictures.attention_map(look, 64)
    assert mass.shape == (12, 64, 64)
    place = mass.double().sum(2) @ ((torch.arange(64).double() + 0.5) / 64)
    if alpha == 2.0:
        inside = mass.sum((1, 2)) > 0.999
        torch.testing.assert_close(place[inside], row[inside], atol=5e-3, rtol=0)


def test_the_map_of_discrete_attention_spreads_each_place_over_its_pixels() -> None:
    weights = torch.rand(2, 4, 4)
    mass = pictures.attention_map(Look(torch.zeros(2, 1), weights), 16)
    torch.testing.assert_close(mass.unfold(1, 4, 4).unfold(2, 4, 4).sum((-2, -1)), weights)
    torch.testing.assert_close(mass[0, 4:8, 8:12], (weights[0, 1, 2] / 16).expand(4, 4))


def test_boxes_are_those_around_the_shapes() -> None:
    images = np.full((2, 16, 16, 3), 240, np.uint8)
    images[0, 3:7, 5] = (255, 0, 0)
    images[0, 4, 5:9] = (255, 0, 0)
    images[1, 0, 0] = (0, 0, 0)
    found = pictures.boxes(pictures.pixels(images))
    right = np.zeros((2, 16, 16), bool)
    right[0, 3:7, 5:9] = True
    right[1, 0, 0] = True
    np.testing.assert_array_equal(found.numpy(), right)


def test_the_share_on_the_shape_is_that_of_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.full((1, 16, 16, 3), 240, np.uint8)
    images[0, :4, :4] = 0
    data = Questions(images, ["what?", "now?"], ["a", "b"], np.array([0, 0]))
    [batch] = Vocabulary(data).batches(data, 1)
    answerer = model(KINDS[0], data)
    weights = torch.zeros(2, 4, 4)
    weights[0, 0, 0], weights[0, 3, 3], weights[1, 0, 1] = 0.75, 0.25, 1.0
    monkeypatch.setattr(answerer, "look", lambda part: Look(torch.zeros(2, 1), weights))
    assert pictures.on_shape(answerer, [batch]) == pytest.approx(0.375)

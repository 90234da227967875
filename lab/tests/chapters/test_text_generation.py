"""Text generation: measures against their definitions, ways to sample, and the study on made-up reviews."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from fenchel_lab.chapters.text_generation import LOSSES, rules
from fenchel_lab.models import language
from fenchel_lab.models.language import END, EPSILONS, LanguageModel, Size, Words
from fenchel_lab.report import Run

SMALL = Size(8, 2, 1, 6, 0.0, 4, 3)


def test_measures_are_those_of_their_definitions() -> None:
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.full(7, 0.3), 20)
    p[p < 0.05] = 0
    p /= p.sum(1, keepdims=True)
    right = generator.integers(7, size=20)
    found = language.measures(torch.from_numpy(p), torch.from_numpy(right))
    for row, (each, word) in enumerate(zip(p, right, strict=True)):
        one = np.eye(7)[word]
        assert found["divergence"][row] == pytest.approx(jensenshannon(each, one) ** 2, abs=1e-9)
        assert found["sparsemax score"][row] == pytest.approx(1 - 0.5 * ((one - each) ** 2).sum())
        assert found["support"][row] == (each > 0).sum()
        for epsilon in EPSILONS:
            smooth = (each + epsilon) / (each + epsilon).sum()
            assert found[f"perplexity {epsilon:g}"][row] == pytest.approx(-math.log(smooth[word]))


@pytest.mark.parametrize("way", [way for alpha in LOSSES.values() for way in rules(alpha)])
def test_all_ways_to_sample_give_probabilities_that_keep_the_order(way: str) -> None:
    torch.manual_seed(0)
    scores = 2 * torch.randn(5, 300)
    rule = (rules(1.0) | rules(1.5))[way]
    p = rule(scores)
    assert p.sum(-1).allclose(torch.ones(5))
    assert torch.equal(p.argmax(-1), scores.argmax(-1))
    kept = (p > 0).sum(-1)
    if way.startswith("top-k"):
        assert (kept == int(way.split()[1])).all()
    if way.startswith("nucleus"):
        share = float(way.split()[1])
        ordered = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
        assert torch.equal(kept, (ordered < share).sum(-1) + 1)


def test_the_next_word_depends_on_none_behind_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(9, SMALL, 1.5).eval()
    tokens = torch.randint(9, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 9
    assert torch.allclose(model(tokens)[:, :4], model(changed)[:, :4], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 4:], model(changed)[:, 4:], atol=1e-3)


def test_continuations_follow_the_prompt_and_have_possible_words_alone() -> None:
    torch.manual_seed(0)
    words = Words([("a", "film", "a", "plot")], 2)
    model = LanguageModel(len(words.names), SMALL, 1.0).eval()
    stream = words.stream([("a", "film"), ("plot",)])
    assert stream.tolist() == [2, 3, END, 0, END]
    written = language.continued(model, stream[:2].unsqueeze(0), language.greedy, 9)
    assert written.shape == (1, 9)
    again = language.continued(model, torch.cat([stream[:2].unsqueeze(0), written[:, :4]], 1), language.greedy, 5)
    assert torch.equal(again, written[:, 4:])


@pytest.mark.slow
def test_the_study_samples_in_every_way_and_entmax_leaves_few_words(chapter: Callable[[str], Run]) -> None:
    result = chapter("text_generation").result
    assert result is not None
    table, speed, texts = result.tables
    assert [str(row[0]).split(",")[0] for row in table.rows] == [
        "softmax",
        "greedy",
        "top-k",
        "nucleus",
        "1.5-entmax",
        "people",
    ]
    possible = {str(row[0]): float(str(row[5])) for row in table.rows[:-1]}
    assert possible["greedy"] == 1 < possible["1.5-entmax"] <= possible["softmax"]
    assert len(speed.rows) == 2
    assert len(texts.rows) == 6

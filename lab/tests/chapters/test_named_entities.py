"""Named entities: the sparse model's whole distribution, and names of entities."""

from collections.abc import Callable

import numpy as np
import pytest

from fenchel_lab.chapters import named_entities
from fenchel_lab.chapters.named_entities import entities, made_up
from fenchel_lab.data.ner import Sentence
from fenchel_lab.report import Run


@pytest.mark.slow
def test_both_losses_tag_far_better_than_chance_and_one_is_sparse(chapter: Callable[[str], Run]) -> None:
    result = chapter("named_entities").result
    assert result is not None
    dense, sparse = result.tables[0].rows
    assert float(dense[3]) > 60
    assert float(sparse[3]) > 60
    mean, _, states = str(dense[4]).split()
    assert float(mean) == float(states)
    assert float(str(sparse[4]).split()[0]) < 2
    assert dense[5] == "0 %"


@pytest.mark.slow
def test_the_sparse_list_ends_with_all_the_probability(chapter: Callable[[str], Run]) -> None:
    result = chapter("named_entities").result
    assert result is not None
    rows = result.tables[1].rows
    sums = {str(loss): float(p) for loss, p, what in rows if what == "sum of these"}
    assert sums["Gini"] == 1.0
    assert sums["Shannon (CRF)"] < 1.0
    listed = [float(p) for loss, p, what in rows if loss == "Gini" and what != "sum of these"]
    assert sum(listed) == pytest.approx(1, abs=2e-4)
    assert 2 <= len(listed) <= named_entities.MOST_PATHS
    assert listed == sorted(listed, reverse=True)


@pytest.mark.slow
def test_blank_cells_are_those_of_the_sparse_model(chapter: Callable[[str], Run]) -> None:
    result = chapter("named_entities").result
    assert result is not None
    dense, sparse = (np.ma.filled(axes.images[0].get_array(), np.nan) for axes in result.figures[0].drawing.axes)
    assert not np.isnan(dense).any()
    assert np.isnan(sparse).mean() > 0.3
    np.testing.assert_allclose(np.nansum(sparse, 1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O O", "none"),
        ("B-PER I-PER O", "a b (PER)"),
        ("B-PER B-PER I-LOC", "a (PER), b (PER), c (LOC)"),
        ("I-PER O I-PER", "a (PER), c (PER)"),
    ],
)
def test_entities_are_told_in_words(tags: str, found: str) -> None:
    assert entities(["a", "b", "c"], tags.split()) == found


def test_made_up_sentences_are_well_tagged_and_the_same_every_time() -> None:
    train, test = made_up(50, 20)
    assert (train, test) == made_up(50, 20)
    assert (len(train), len(test)) == (50, 20)
    for sentence in [*train, *test]:
        assert isinstance(sentence, Sentence)
        for before, tag in zip(("O", *sentence.tags), sentence.tags, strict=False):
            assert not tag.startswith("I-") or before[2:] == tag[2:]
    known = {word for sentence in train for word in sentence.words}
    assert {word for sentence in test for word in sentence.words} - known

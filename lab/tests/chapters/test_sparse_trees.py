"""Sparse trees: every answer is a mixture of trees, and doubt is where the sentences have it."""

from collections.abc import Callable

import pytest
import torch

from fenchel_lab.chapters import sparse_trees
from fenchel_lab.chapters.sparse_trees import Outcome, made_up, mixture
from fenchel_lab.models import parsing
from fenchel_lab.models.parsing import Size
from fenchel_lab.report import Run


def is_tree(heads: tuple[int, ...]) -> bool:
    """One root, and every word comes to it by its heads."""

    def reaches(word: int) -> bool:
        seen = set()
        while word and word not in seen:
            seen.add(word)
            word = heads[word - 1]
        return word == 0

    return heads.count(0) == 1 and all(reaches(word) for word in range(1, len(heads) + 1))


@pytest.mark.slow
def test_parsers_are_far_better_than_chance(chapter: Callable[[str], Run]) -> None:
    result = chapter("sparse_trees").result
    assert result is not None
    for _, _, uas, _ in result.tables[0].rows:
        assert 80 < float(uas) < 100  # where a last phrase belongs is left to chance


@pytest.mark.slow
def test_every_test_sentence_is_counted_once(chapter: Callable[[str], Run]) -> None:
    result = chapter("sparse_trees").result
    assert result is not None
    counts = [int(row[1]) for row in result.tables[1].rows]
    assert sum(counts) == sparse_trees.TOY_SENTENCES[1]
    assert counts[0] > 0
    assert sum(counts[1:]) > 0


@pytest.mark.slow
def test_the_drawn_weights_sum_to_one(chapter: Callable[[str], Run]) -> None:
    result = chapter("sparse_trees").result
    assert result is not None
    titles = [axes.get_title(loc="left") for axes in result.figures[0].drawing.axes]
    weights = [float(title.split(",")[0]) for title in titles]
    assert 2 <= len(weights) <= sparse_trees.DRAWN_TREES
    assert abs(sum(weights) - 1) < 0.01 * len(weights)
    assert weights == sorted(weights, reverse=True)


def test_mixtures_are_of_trees_with_weights_that_sum_to_one() -> None:
    torch.manual_seed(0)
    sentences, _ = made_up(20, 0)
    vocabulary = parsing.Vocabulary(sentences)
    parser = parsing.Parser(vocabulary, Size(word=8, tag=4, hidden=8, arc=8)).eval()
    for each in sentences[:5]:
        trees = mixture(Outcome("", parser, vocabulary), each)
        assert abs(sum(weight for weight, _ in trees) - 1) < 1e-5
        assert all(is_tree(heads) for _, heads in trees)


def test_made_up_sentences_are_trees_and_the_same_every_time() -> None:
    train, test = made_up(50, 10)
    assert (train, test) == made_up(50, 10)
    assert all(is_tree(each.heads) for each in (*train, *test))
    assert len({each.heads for each in train}) > 5

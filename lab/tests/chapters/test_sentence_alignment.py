"""Alignments of a sentence pair: each kind keeps its promise."""

from collections.abc import Callable

import numpy as np
import torch

from fenchel_lab.chapters.sentence_alignment import HYPOTHESIS, PREMISE, SHARPNESS, alignments, likeness, steps
from fenchel_lab.report import Run


def test_words_share_out_their_weight_and_a_matching_takes_none_twice() -> None:
    chosen = {each.name: each for each in alignments(SHARPNESS * likeness(None))}
    for each in chosen.values():
        assert each.weights.shape == (len(HYPOTHESIS), len(PREMISE))
        np.testing.assert_allclose(each.weights.sum(1).numpy(), 1, atol=1e-6)
    assert chosen["matching"].weights.sum(0).max() <= 1 + 1e-6
    assert chosen["sparsemax"].weights.sum(0).max() > 1
    assert (chosen["softmax"].weights > 0).all()
    for name in ("sequence", "matching"):
        mixture = chosen[name].mixture
        assert mixture is not None
        np.testing.assert_allclose(mixture.sum().item(), 1, atol=1e-6)


def test_the_sequence_moves_forward() -> None:
    [sequence] = [each for each in alignments(SHARPNESS * likeness(None)) if each.name == "sequence"]
    places = sequence.weights @ torch.arange(len(PREMISE), dtype=torch.float64)
    assert (places.diff() > -0.5).all()


def test_steps_back_cost_by_the_word_and_others_nothing() -> None:
    assert steps(3).tolist() == [[0, 0, 0], [-1, 0, 0], [-2, -1, 0]]


def test_the_figure_draws_four_matrices_and_blanks_zeros(chapter: Callable[[str], Run]) -> None:
    result = chapter("sentence_alignment").result
    assert result is not None
    images = [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in result.figures[0].drawing.axes]
    assert [bool(np.isnan(image).any()) for image in images] == [False, True, True, True]

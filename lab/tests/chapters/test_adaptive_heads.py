"""Heads that learn their α: one for each head, told after every epoch, and trained."""

from collections.abc import Callable

import pytest
import torch

from fenchel.seq2seq import Batches
from fenchel_lab.chapters import adaptive_heads
from fenchel_lab.models.translating import HEADS, alphas, built, made_up
from fenchel_lab.report import Run


def test_every_head_of_every_attention_has_an_alpha_that_the_loss_moves() -> None:
    torch.manual_seed(0)
    corpus = made_up(40, 10, 10)
    model = built("learned heads", corpus, adaptive_heads.TOY)
    before = alphas(model)
    assert before == {part: [[1.5, 1.5], [1.5, 1.5]] for part in ("encoder", "decoder", "cross")}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(next(iter(Batches(corpus.train, model.source, model.target)))).backward()
    optimizer.step()
    after = alphas(model)
    assert all(alpha != 1.5 and 1 <= alpha <= 2 for layers in after.values() for layer in layers for alpha in layer)
    fixed = alphas(built("sparsemax heads", corpus, adaptive_heads.TOY))
    assert fixed["cross"] == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.slow
def test_the_figure_has_a_line_for_every_head(chapter: Callable[[str], Run]) -> None:
    result = chapter("adaptive_heads").result
    assert result is not None
    size = adaptive_heads.TOY
    (figure,), (table,) = result.figures, result.tables
    assert [len(axes.lines) for axes in figure.drawing.axes] == [size.heads] * (3 * size.layers)
    assert all(len(line.get_xdata()) == size.how.epochs for axes in figure.drawing.axes for line in axes.lines)
    assert [row[0] for row in table.rows] == list(HEADS)

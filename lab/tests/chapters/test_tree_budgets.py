"""The tree with budgets: what is drawn obeys them, and is a tree where all is sure."""

from collections.abc import Callable

import torch

from fenchel import SparseMAP, structures
from fenchel_lab.chapters.tree_budgets import BUDGETS, WORDS, modifiers, parse, scores
from fenchel_lab.report import Run


def test_no_word_has_more_modifiers_than_its_budget() -> None:
    for budget in BUDGETS:
        mu = parse(scores(), budget)
        torch.testing.assert_close(mu.sum(1), torch.ones(len(WORDS), dtype=torch.float64))
        assert budget is None or modifiers(mu).max() <= budget + 1e-12


def test_without_budgets_it_is_sparsemap_and_undecided_about_one_word() -> None:
    mu = parse(scores(), None)
    torch.testing.assert_close(mu, SparseMAP(structures.DependencyTree(single_root=True)).argmax(scores()))
    assert [WORDS[i] for i in ((mu > 0) & (mu < 1)).any(1).nonzero().reshape(-1)] == ["with"]


def test_the_budget_takes_with_to_man() -> None:
    mu = parse(scores(), 2)
    assert bool(((mu == 0) | (mu == 1)).all())
    assert mu[WORDS.index("with"), 1 + WORDS.index("man")] == 1


def test_the_chapter_draws_a_panel_a_budget(chapter: Callable[[str], Run]) -> None:
    result = chapter("tree_budgets").result
    assert result is not None
    assert len(result.figures[0].drawing.axes) == len(BUDGETS)
    [table] = result.tables
    assert len(table.rows) == 1 + len(BUDGETS)

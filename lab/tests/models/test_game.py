"""The explanation game: messages, a linear layperson, and rates by hand."""

from __future__ import annotations

import pytest
import torch

from fenchel_lab.data.sst import Review
from fenchel_lab.models import game
from fenchel_lab.models.documents import Batch, Vocabulary
from fenchel_lab.models.game import Explainer, Layperson, Round
from fenchel_lab.models.rationale import Selection, Size
from fenchel_lab.report import find, run
from fenchel_lab.report.registry import Context


def test_largest_words_are_as_many_as_the_budget_and_never_padding() -> None:
    torch.manual_seed(0)
    weights, lengths = torch.rand(4, 9), torch.tensor([9, 4, 1, 0])
    sent = game.largest(weights, lengths, 0.34)
    assert sent.sum(-1).tolist() == [3, 1, 1, 0]
    for row, length in enumerate(lengths.tolist()):
        best = weights[row, :length].topk(int(sent[row].sum())).indices.sort().values
        assert sent[row].nonzero().flatten().tolist() == best.tolist()


def test_a_layperson_averages_what_the_words_of_a_message_say() -> None:
    layperson = Layperson(5, 2)
    with torch.no_grad():
        layperson.opinions.copy_(torch.arange(10.0).reshape(5, 2))
        layperson.bias.copy_(torch.tensor([0.0, 1.0]))
    batch = Batch(torch.tensor([[1, 4, 2], [3, 0, 0]]), torch.tensor([3, 1]), torch.zeros(2, dtype=torch.long))
    message = torch.tensor([[True, False, True], [False, False, False]])
    assert layperson(Round(batch, message)).tolist() == [[3.0, 5.0], [0.0, 1.0]]


def test_a_joint_explainer_divides_by_as_many_words_as_it_sends() -> None:
    vocabulary = Vocabulary({"a": 0}, torch.randn(1, 3), 100)
    explainer = Explainer(vocabulary, 2, Selection("k-subsets", 0.7), Size(2)).eval()
    with torch.no_grad():
        explainer.layperson.opinions.fill_(1.0)
    batch = vocabulary.batch([Review(("a",) * 45, 0)])  # 31.5 words, but for rounding
    assert explainer.message(batch).sum() == 31
    torch.testing.assert_close(explainer(batch), torch.ones(1, 2))


@pytest.mark.parametrize("selection", [Selection("k-subsets", 2), Selection("entmax")])
def test_joint_explainers_select_a_share_by_subsets(selection: Selection) -> None:
    with pytest.raises(ValueError, match="selection must be of k-subsets with a share"):
        Explainer(Vocabulary({"a": 0}, torch.randn(1, 3), 10), 2, selection, Size(2))


@pytest.mark.slow
def test_the_study_names_every_explainer_and_rates_are_shares() -> None:
    done = run(find("explanation_game"), Context(data=None))
    assert done.result is not None, done.error
    (table,) = done.result.tables
    assert len(table.rows) == 5
    for row in table.rows:
        assert 50 < float(str(row[2])) <= 100
        assert 0 < float(str(row[4])) < 30

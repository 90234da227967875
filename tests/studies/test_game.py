"""The explanation game: messages, a linear layperson, and rates by hand."""

from __future__ import annotations

import torch

from fenchel.studies import find, game, run
from fenchel.studies.documents import Batch
from fenchel.studies.game import Layperson, Round
from fenchel.studies.registry import Context


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


def test_the_study_names_every_explainer_and_rates_are_shares() -> None:
    done = run(find("explanation_game"), Context(data=None))
    assert done.result is not None, done.error
    (table,) = done.result.tables
    assert len(table.rows) == 5
    for row in table.rows:
        assert 50 < float(str(row[2])) <= 100
        assert 0 < float(str(row[4])) < 30

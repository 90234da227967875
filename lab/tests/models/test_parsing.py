"""The parser: scores for every arc but loops, and training that learns."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel_lab.data.ud_ewt import Sentence
from fenchel_lab.models import parsing
from fenchel_lab.models.parsing import Size

SMALL = Size(word=6, tag=4, hidden=8, arc=8, dropout=0.0, epochs=25, batch=2, rate=3e-2)


def sentence(words: str, heads: tuple[int, ...]) -> Sentence:
    return Sentence(tuple(words.split()), tuple(words.upper().split()), heads, ("dep",) * len(heads))


SENTENCES = [sentence("dogs bark", (2, 0)), sentence("cats sleep", (2, 0)), sentence("she saw it .", (2, 0, 2, 2))]


def by_words(scores: Tensor, heads: Tensor) -> Tensor:
    rows = parsing.without_loops(scores).flatten(0, 1)
    return F.cross_entropy(rows, heads.flatten(), reduction="none").view_as(heads).sum(-1)


def test_no_word_is_its_own_head() -> None:
    scores = parsing.without_loops(torch.zeros(2, 3, 4))
    for word in range(3):
        assert torch.isinf(scores[:, word, word + 1]).all()
    assert torch.isinf(scores).sum() == 2 * 3


def test_arcs_are_one_head_a_word() -> None:
    assert parsing.arcs(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_attachment_counts_words() -> None:
    assert parsing.attachment(SENTENCES, [(2, 0), (0, 1), (2, 0, 2, 3)]) == 5 / 8


def test_a_parser_learns_its_sentences() -> None:
    torch.manual_seed(0)
    told: list[float] = []
    parser, vocabulary = parsing.train(SENTENCES, by_words, SMALL, told.append)
    found = parsing.heads(parser, vocabulary, SENTENCES, lambda scores: parsing.without_loops(scores).argmax(-1))
    assert found == [each.heads for each in SENTENCES]
    assert told[-1] == 1.0

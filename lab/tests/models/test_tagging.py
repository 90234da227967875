"""The tagger: tags there and back, padding that does not matter, and training that learns."""

import pytest
import torch

from fenchel import Gini, Regularizer, Shannon
from fenchel_lab.data.ner import Sentence
from fenchel_lab.models import tagging
from fenchel_lab.models.tagging import Size, Tagger, Vocabulary

SMALL = Size(word=6, character=4, filters=5, hidden=7, epochs=12, batch=2, rate=3e-2, dropout=0.0)
SENTENCES = [
    Sentence(("Ann", "saw", "New", "York", "."), ("B-PER", "O", "B-LOC", "I-LOC", "O")),
    Sentence(("Bob", "slept"), ("B-PER", "O")),
    Sentence(("he", "saw", "Ann", "Lee"), ("O", "O", "B-PER", "I-PER")),
]


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ("O", "O"),
        ("B-PER", "S-PER"),
        ("B-PER B-PER I-PER I-PER", "S-PER B-PER I-PER E-PER"),
        ("B-PER I-LOC O", "S-PER E-LOC O"),
        ("B-ORG I-ORG B-ORG", "B-ORG E-ORG S-ORG"),
    ],
)
def test_tags_go_there_and_back(plain: str, told: str) -> None:
    assert tagging.iobes(plain.split()) == told.split()
    assert tagging.iob2(told.split()) == plain.split()


def test_numbers_of_words_fold_case_and_digits_and_those_of_characters_do_not() -> None:
    vocabulary = Vocabulary([Sentence(("May", "1990"), ("O", "O"))])
    batch = vocabulary.batch([Sentence(("may", "1234", "new"), ("O", "O", "B-PER"))])
    known = vocabulary.batch([Sentence(("May", "1990", "x"), ("O", "O", "O"))])
    assert torch.equal(batch.words[0, :2], known.words[0, :2])
    assert not torch.equal(batch.characters[0, 0], known.characters[0, 0])
    assert batch.words[0, 2] == tagging.UNKNOWN


def test_scores_do_not_depend_on_the_other_rows_of_a_batch() -> None:
    torch.manual_seed(0)
    vocabulary = Vocabulary(SENTENCES)
    tagger = Tagger(vocabulary, SMALL, Gini()).eval()
    together = tagger(vocabulary.batch(SENTENCES)).marginals
    for row, sentence in enumerate(SENTENCES):
        alone = tagger(vocabulary.batch([sentence])).marginals[0]
        torch.testing.assert_close(together[row, : len(alone)], alone)


@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=["Shannon", "Gini"])
def test_a_tagger_learns_its_sentences(omega: Regularizer) -> None:
    torch.manual_seed(0)
    told: list[float] = []
    tagger, vocabulary, _ = tagging.train(4 * SENTENCES, omega, SMALL, told.append)
    assert tagging.tagged(tagger, vocabulary, SENTENCES) == [list(sentence.tags) for sentence in SENTENCES]
    assert told[-1] == 1.0

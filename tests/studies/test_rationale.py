"""Rationalizers: exact zeros, budgets, bad input, folders; and files of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel.data.eraser import Annotated
from fenchel.data.sst import Review
from fenchel.studies import labelled, rationale
from fenchel.studies.documents import Vocabulary
from fenchel.studies.rationale import KINDS, Rationalizer, Selection, Size
from fenchel.studies.text_highlights import made_up
from fenchel.studies.training import Course

WORDS = ["a", "bad", "dull", "film", "good", "is", "nice", "not", "plot", "the", "was"]
LENGTHS = [12, 0, 1, 7]


def model(kind: str = "sequential k-subsets", **options: object) -> Rationalizer:
    torch.manual_seed(0)
    selection = Selection(**{"kind": kind, "temperature": 0.01, "budget": 0.25} | options)  # type: ignore[arg-type]
    vocabulary = Vocabulary({word: row for row, word in enumerate(WORDS)}, torch.randn(len(WORDS), 6), 10)
    return Rationalizer(vocabulary, ["bad", "good"], selection, Size(4)).eval()


def texts() -> list[tuple[str, ...]]:
    torch.manual_seed(1)
    return [tuple(WORDS[row] for row in torch.randint(len(WORDS), (length,)).tolist()) for length in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_any_length_are_explained_alone_as_together(kind: str) -> None:
    reader = model(kind)
    together = list(reader.explain_all(texts()))
    for words, found in zip(texts(), together, strict=True):
        alone = reader.explain(words)
        assert alone.text == " ".join(words)
        assert len(found.weights) == len(words)
        assert found.weights == pytest.approx(alone.weights, abs=1e-5)
        assert found.probabilities == pytest.approx(alone.probabilities, abs=1e-5)
    assert list(reader.explain_all([])) == []
    assert not reader.training


@pytest.mark.parametrize("kind", KINDS[4:])
def test_budgets_are_shares_of_what_is_read(kind: str) -> None:
    sums = [sum(found.weights) for found in model(kind).explain_all(texts())]
    assert sums == pytest.approx([3, 0, 1, 2], abs=1e-5)  # a quarter of 10, 0, 1 and 7 words, rounded, one at least


@pytest.mark.parametrize("kind", KINDS[4:])
def test_texts_shorter_than_k_are_selected_whole(kind: str) -> None:
    found = list(model(kind, budget=9).explain_all(texts()))
    assert [sum(each.weights) for each in found] == pytest.approx([9, 0, 1, 7], abs=1e-5)
    assert found[3].spans[0].text == found[3].text


def test_an_empty_text_has_a_class_and_no_spans() -> None:
    found = model().explain(" \n")
    assert found.spans == []
    assert found.label in ("bad", "good")
    assert sum(found.probabilities.values()) == pytest.approx(1)


def test_unknown_words_share_a_vector_and_are_told() -> None:
    reader = model()
    one, other = reader.explain("The zyx was nice, not dull."), reader.explain("The qwe was nice, not dull.")
    assert one.unknown == ("zyx", ",", ".")
    assert one.weights == other.weights
    assert one.probabilities == other.probabilities


def test_words_before_those_that_are_read_have_no_weight() -> None:
    reader = model("softmax")
    weights = reader.explain(texts()[0]).weights
    assert weights[:2] == [0.0, 0.0]
    assert min(weights[2:]) > 0


def test_the_predictor_sees_the_highlighted_words_alone_if_it_reads_words() -> None:
    torch.manual_seed(0)
    reader = model()
    vocabulary = reader.vocabulary
    reader = Rationalizer(vocabulary, ["bad", "good"], replace(reader.selection, kind="k-subsets"), Size(4), "words")
    batch = vocabulary.batch([Review(texts()[3], 0)])
    weights = reader.eval().weights(batch)
    words = reader.encoder.vectors[batch.words]
    nowhere = torch.where((weights > 0).unsqueeze(-1), words, torch.randn_like(words))
    states = reader.encoder(batch.words, batch.lengths)
    torch.testing.assert_close(reader.pool((states, nowhere)), reader.pool((states, words)))


def test_temperatures_of_training_and_of_tests() -> None:
    reader = model("k-subsets", temperature=5.0, test_temperature=1e-4)
    batch = reader.vocabulary.batch([Review(texts()[3], 0)])
    assert (reader.eval().weights(batch) > 0).sum() == 2
    assert (reader.train().weights(batch) > 0).sum() > 2


def test_what_is_measured_by_hand() -> None:
    reader = model("k-subsets")
    reviews = [Annotated(texts()[3], 1, (0, 3)), Annotated(texts()[0], 0, (0, 1, 5)), Review(texts()[1], 0)]
    found = rationale.found(reader, reviews)
    assert found.lengths == [0, 7, 10]  # by length
    assert found.marked == [None, [0, 3], [3]]  # two words of the longest are not read
    assert list(map(len, found.chosen)) == [0, 2, 3]
    assert found.share == pytest.approx((2 / 7 + 3 / 10) / 2)
    assert found.overlap is not None
    assert rationale.found(reader, reviews[2:]).overlap is None
    assert rationale.found(reader, reviews, top=0.5).chosen[1:] != found.chosen[1:]
    by_hand = rationale.Found([0, 1], [0, 1], [[0, 1, 4], [2]], [6, 4], [[0], [2]])
    assert (by_hand.runs, by_hand.run_length, by_hand.overlap) == (1.5, pytest.approx(4 / 3), 0.75)


def test_a_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    reader = model(test_temperature=0.02)
    reader.save(tmp_path / "model")
    again = Rationalizer.load(tmp_path / "model")
    assert again.selection == reader.selection
    assert again.explain("not a good film") == reader.explain("not a good film")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]
    with pytest.raises(FileNotFoundError, match=r"no model\.json"):
        Rationalizer.load(tmp_path)
    (tmp_path / "model" / "model.json").write_text('{"model": "Other"}')
    with pytest.raises(ValueError, match="has a Other"):
        Rationalizer.load(tmp_path / "model")


def test_training_finds_the_words_that_decide() -> None:
    torch.manual_seed(0)
    reviews = made_up(200)
    words = sorted({word for review in reviews for word in review.words})
    vocabulary = Vocabulary({word: row for row, word in enumerate(words)}, torch.randn(len(words), 16), 40)
    selection = Selection("k-subsets", 0.15)
    reader = Rationalizer(vocabulary, ["bad", "good"], selection, Size(8, head_dropout=0.0), trainable=True)
    reader, best = rationale.trained(reader, reviews[:160], reviews[160:], Course(4, 2e-2))
    assert best > 0.9
    assert rationale.found(reader, reviews[160:]).f1 == best


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "argmax"}, "kind must be one of"),
        ({"budget": 0.0}, "budget must be"),
        ({"budget": 1.5}, "budget must be"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_selections_that_are_none_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Selection(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two different"):
        Rationalizer(model().vocabulary, ["good", "good"])


def test_files_are_read_in_both_formats(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("label\ttext\ngood\tA fine film.\r\n\nbad\t\nJust a text\n")
    (tmp_path / "a.jsonl").write_text('{"text": "A fine film.", "label": 1}\n{"text": ""}\n')
    columns, objects = labelled.read(tmp_path / "a.tsv"), labelled.read(tmp_path / "a.jsonl")
    assert [(each.text, each.label) for each in columns] == [
        ("A fine film.", "good"),
        ("", "bad"),
        ("Just a text", None),
    ]
    assert [(each.text, each.label) for each in objects] == [("A fine film.", "1"), ("", None)]
    assert columns[0].words == ("a", "fine", "film", ".")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.tsv", "x\n1\t2\t3\n", "line 2: 3 columns"),
        ("a.jsonl", "{}\n", 'with a "text"'),
        ("a.jsonl", "text\n", "line 1: not an object"),
        ("a.csv", "", "must end in one of"),
    ],
)
def test_damaged_files_are_told(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        labelled.read(tmp_path / name)


def test_vectors_are_read_and_damaged_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("the 0.5 1\nfilm -1 2\n")
    found = labelled.given_vectors(path, [], 10)
    assert found.rows == {"the": 0, "film": 1}
    assert found.vectors.tolist() == [[0, 0], [0.5, 1], [-1, 2]]
    for text, words in (("a b\n", "line 1: not a word"), ("a 1 2\nb 1\n", "line 2: 1 numbers"), ("", "no vectors")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            labelled.given_vectors(path, [], 10)

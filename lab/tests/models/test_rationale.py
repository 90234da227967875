"""Rationalizers: exact zeros, budgets, bad input, folders; and files of one's own."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from fenchel.seq2seq import saving
from fenchel_lab.chapters.document_classification import made_up_vectors
from fenchel_lab.chapters.text_highlights import made_up
from fenchel_lab.data.eraser import Annotated
from fenchel_lab.data.sst import Review
from fenchel_lab.drawing import highlights
from fenchel_lab.models import labelled, rationale, training
from fenchel_lab.models.documents import Batch, Vocabulary
from fenchel_lab.models.rationale import KINDS, Rationalizer, Selection, Size
from fenchel_lab.models.training import Course

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


@pytest.mark.parametrize("kind", KINDS[1:])
def test_words_that_are_not_highlighted_do_not_reach_the_predictor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = model(kind)
    batch = reader.vocabulary.batch([Review(texts()[3], 0)])
    weights, states = reader.weights(batch), reader.encoder(batch.words, batch.lengths)
    monkeypatch.setattr(reader.encoder, "forward", lambda words, lengths: states)  # the selection stays as it is
    for place, weight in enumerate(weights[0].tolist()):
        other = batch.words.clone()
        other[0, place] = 1 + other[0, place] % len(WORDS)
        moved = (reader(replace(batch, words=other)) - reader(batch)).abs().max()
        assert (moved == 0) == (weight == 0)
    assert 0 < (weights > 0).sum() < 7


def test_states_know_words_that_are_not_highlighted() -> None:
    torch.manual_seed(0)
    reader = Rationalizer(
        model().vocabulary, ["bad", "good"], Selection("k-subsets", 1, temperature=1e-5), Size(4), "states"
    )
    batch = reader.eval().vocabulary.batch([Review(texts()[3], 0)])
    (place,) = reader.weights(batch)[0].nonzero().flatten().tolist()
    other = batch.words.clone()
    other[0, place - 1] = 1 + other[0, place - 1] % len(WORDS)
    changed = replace(batch, words=other)
    assert reader.weights(changed)[0].nonzero().flatten().tolist() == [place]
    assert not torch.equal(reader(changed), reader(batch))


def test_temperatures_of_training_and_of_tests() -> None:
    reader = model("k-subsets", temperature=5.0, test_temperature=1e-4)
    batch = reader.vocabulary.batch([Review(texts()[3], 0)])
    assert (reader.eval().weights(batch) > 0).sum() == 2
    assert (reader.train().weights(batch) > 0).sum() > 2


def test_what_is_measured_by_hand() -> None:
    reader = model("k-subsets", temperature=1e-5)  # whole words
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
    assert rationale.Found([0], [0], [[]], [6], [[0]]).chance == 0.0
    assert by_hand.chance == pytest.approx((2 * (3 / 6) / 4 + 2 * (1 / 4) / 2) / 2)


def test_a_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    reader = model(test_temperature=0.02)
    reader.save(tmp_path / "model")
    again = Rationalizer.load(tmp_path / "model")
    assert again.selection == reader.selection
    assert again.explain("not a good film") == reader.explain("not a good film")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]
    with pytest.raises(FileNotFoundError, match=r"no model\.json"):
        Rationalizer.load(tmp_path)
    (tmp_path / "model" / "model.json").write_text('{"format": 1, "model": "Other"}')
    with pytest.raises(ValueError, match="has a Other"):
        Rationalizer.load(tmp_path / "model")


def test_words_keep_their_vectors_in_a_folder(tmp_path: Path) -> None:
    rows = {"film": 4, "movie": 4, "bad": 2, "a": 0}  # words may share a vector, and vectors have no word
    reader = Rationalizer(Vocabulary(rows, torch.randn(6, 5), 10), ["bad", "good"], size=Size(4)).eval()
    reader.save(tmp_path)
    again = Rationalizer.load(tmp_path)
    assert again.vocabulary.rows == rows
    assert again.explain("a bad movie, a film") == reader.explain("a bad movie, a film")


def test_double_precision_comes_from_the_vectors_and_from_a_folder(tmp_path: Path) -> None:
    double = model().double()
    double.save(tmp_path)
    assert Rationalizer.load(tmp_path).explain("not a good film") == double.explain("not a good film")
    vocabulary = Vocabulary({"film": 0}, torch.randn(1, 5, dtype=torch.float64), 10)
    assert {tensor.dtype for tensor in Rationalizer(vocabulary, ["bad", "good"]).state_dict().values()} == {
        torch.float64
    }


def test_a_damaged_folder_is_told(tmp_path: Path) -> None:
    reader = model()
    for damage in ({"labels": ["a", "b", "c"]}, {"selection": {"kid": 1}}, {"words": None}, {"sizes": {"hidden": 3}}):
        saving.save(tmp_path, reader.settings() | damage, reader.state_dict())
        with pytest.raises(ValueError, match="does not have a whole Rationalizer"):
            Rationalizer.load(tmp_path)
    saving.save(tmp_path, reader.settings(), {"encoder.vectors": reader.encoder.vectors})
    with pytest.raises(ValueError, match="does not have a whole Rationalizer"):
        Rationalizer.load(tmp_path)


def test_training_finds_the_words_that_decide() -> None:
    torch.manual_seed(0)
    reviews, selection = made_up(300), Selection("k-subsets", 0.15)
    reader = Rationalizer(made_up_vectors(), ["bad", "good"], selection, Size(12, head_dropout=0.0))
    reader, best = rationale.trained(reader, reviews[:240], reviews[240:], Course(4, 1e-2))
    assert best > 0.9
    assert rationale.found(reader, reviews[240:]).f1 == best


def test_batches_mix_classes_that_stand_apart_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []
    monkeypatch.setattr(training, "trained", lambda model, batches, *rest: (seen.extend(batches), (model, 0.0))[1])
    reviews = [Review(("a", "film"), 0)] * 40 + [Review(("a", "film"), 1)] * 40
    torch.manual_seed(0)
    rationale.trained(model(), reviews, reviews, Course(1))
    assert [len(batch.labels) for batch in seen] == [16] * 5
    assert all(0 < batch.labels.sum() < 16 for batch in seen)


def test_a_transition_of_tests_alone_is_one_of_both_in_evaluation_and_none_in_training() -> None:
    review = [Review(words, 0) for words in texts() if words]
    options = {"temperature": 0.5, "test_temperature": 0.001}
    tested = model(transition=0.0, test_transition=0.7, **options)
    both, none = model(transition=0.7, temperature=0.001), model("k-subsets", temperature=0.5)
    batch = tested.vocabulary.batch(review)
    assert torch.equal(tested.weights(batch), both.weights(batch))
    assert not torch.equal(tested.weights(batch), none.weights(batch))
    assert torch.allclose(tested.train().weights(batch), none.weights(batch), atol=1e-6)


def test_overlaps_and_chance_are_those_of_counts() -> None:
    found = rationale.Found([0, 0, 1], [0, 0, 1], [[0, 1, 2], [4], [1]], [6, 8, 3], [[2, 3], [4, 5, 6, 7], None])
    assert found.overlap == pytest.approx((2 * 1 / 5 + 2 * 1 / 5) / 2)
    precision, recall = (1 / 3 + 1) / 2, (1 / 2 + 1 / 4) / 2
    assert found.overlap_of_means == pytest.approx(2 * precision * recall / (precision + recall))
    # All ways to take as many words, counted.
    ways = [list(combinations(range(6), 3)), list(combinations(range(8), 1))]
    marked = [{2, 3}, {4, 5, 6, 7}]
    hits = [sum(len(m & set(way)) for way in each) / len(each) for m, each in zip(marked, ways, strict=True)]
    assert found.chance == pytest.approx((2 * hits[0] / 5 + 2 * hits[1] / 5) / 2)
    precision, recall = (hits[0] / 3 + hits[1]) / 2, (hits[0] / 2 + hits[1] / 4) / 2
    assert found.chance_of_means == pytest.approx(2 * precision * recall / (precision + recall))


def test_ratings_are_learned_saved_and_explained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reviews = [Review(("the", "film", "was", *["good"] * count, *["bad"] * (4 - count)), count) for count in range(5)]
    classes = model("k-subsets", budget=4)
    rater = Rationalizer(classes.vocabulary, [], classes.selection, Size(4, head_dropout=0.0), trainable=True)
    rater, reached = rationale.trained(rater, reviews * 20, reviews, Course(40, 2e-2))
    error = rationale.found(rater, reviews).error
    assert error < 0.3  # the variance of the ratings is 2
    assert reached == pytest.approx(1 / (1 + error))
    rater.save(tmp_path)
    again = Rationalizer.load(tmp_path)
    best, worst = (again.explain(" ".join(reviews[row].words)) for row in (4, 0))
    assert float(best.label) > float(worst.label) + 2
    assert best.probabilities == {}
    assert best.label in highlights.page([best])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "argmax"}, "kind must be one of"),
        ({"budget": 0.0}, "budget must be"),
        ({"budget": 1.5}, "budget must be"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive"),
        ({"transition": float("nan")}, "transition must be finite"),
        ({"transition": float("inf")}, "transition must be finite"),
        ({"test_transition": float("nan")}, "test_transition must be finite"),
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
        ("a.jsonl", '{"text": "", "label": ["good"]}\n', "line 1: the label must be a string or a number"),
        ("a.jsonl", '{"text": "a \\ud800 film"}\n', "line 1: half of a surrogate pair"),
        ("a.csv", "", "must end in one of"),
    ],
)
def test_damaged_files_are_told(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        labelled.read(tmp_path / name)


def test_labels_have_no_blanks_around_them_and_blank_ones_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("good \tA fine film.\n\tA film.\n")
    (tmp_path / "a.jsonl").write_text('{"text": "A fine film.", "label": " good"}\n{"text": "A film.", "label": ""}\n')
    for name in ("a.tsv", "a.jsonl"):
        assert [each.label for each in labelled.read(tmp_path / name)] == ["good", None]


def test_vectors_are_read_and_damaged_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("the 0.5 1\nfilm -1 2\n")
    found = labelled.given_vectors(path, [], 10)
    assert found.rows == {"the": 0, "film": 1}
    assert found.vectors.tolist() == [[0, 0], [0.5, 1], [-1, 2]]
    (tmp_path / "vectors.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="has no word vectors"):
        labelled.given_vectors(tmp_path / "vectors.npz", [], 10)
    for text, words in (
        ("a b\n", "line 1: not a word"),
        ("a 1 2\nb 1 nan\n", "line 2: not a word"),
        ("a 1 2\nb 1\n", "line 2: 1 numbers"),
        ("", "no vectors"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            labelled.given_vectors(path, [], 10)


@pytest.mark.parametrize("counts", [(0, 2), (2, 0)])
def test_nothing_to_train_or_to_validate_with_is_told(counts: tuple[int, int]) -> None:
    train, valid = ([Review(("good", "film"), 1)] * count for count in counts)
    with pytest.raises(ValueError, match=f"train and to validate with, got {counts[0]} and {counts[1]}"):
        rationale.trained(model(), train, valid, Course(1))

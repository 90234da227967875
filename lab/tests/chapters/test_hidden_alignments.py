"""Alignments in a hidden layer: pairs that are what they say, attention that keeps its structure, finished runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel_lab.chapters import hidden_alignments
from fenchel_lab.chapters.hidden_alignments import KINDS, made_up, same_word
from fenchel_lab.models import pairs
from fenchel_lab.models.pairs import PAD, Judge, Kind, Size, Vocabulary
from fenchel_lab.report import Context, Run
from fenchel_lab.report.records import Record, Records

CAPTIONS = [(("ein", "hund"), ("a", "dog")), (("eine", "katze"), ("a", "cat")), (("zwei",), ("two",))]


def test_false_pairs_have_the_caption_that_is_most_like_the_true_one() -> None:
    made = pairs.pairs_of(CAPTIONS, 0, tried=3, longest=5)
    assert [pair.true for pair in made] == [True, False] * 3
    assert made[1].first == ("ein", "hund")
    assert made[1].second == ("a", "cat")  # it shares a word with the true one; “two” does not
    assert made[3].second == ("a", "dog")


def test_long_sentences_are_left_out() -> None:
    assert {pair.first for pair in pairs.pairs_of(CAPTIONS, 0, tried=3, longest=1)} <= {("zwei",)}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_keeps_its_structure_and_ignores_padding(kind: Kind) -> None:
    torch.manual_seed(0)
    made = pairs.pairs_of(made_up(6), 0, tried=3, longest=14)
    vocabulary = Vocabulary(made)
    judge = Judge(vocabulary, kind, Size(8, dropout=0.0)).eval()
    batch = vocabulary.batch(made)
    weights = judge.weights(batch)
    assert (weights.transpose(1, 2)[batch.first == PAD] == 0).all()
    if kind == "matching":
        assert weights.sum(1).max() < 1 + 1e-5
        assert weights.sum(2).max() < 1 + 1e-5
    else:
        torch.testing.assert_close(weights.sum(2)[batch.second != PAD], torch.ones(int((batch.second != PAD).sum())))
    for row, pair in enumerate(made):
        torch.testing.assert_close(judge(batch)[row], judge(vocabulary.batch([pair]))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_passes_through_the_alignment(kind: Kind) -> None:
    torch.manual_seed(0)
    made = pairs.pairs_of(made_up(2), 0, tried=2, longest=14)
    vocabulary = Vocabulary(made, least=1)
    judge = Judge(vocabulary, kind, Size(4, dropout=0.0)).double()
    batch = vocabulary.batch(made)
    judge(batch).sum().backward()
    word = int(batch.first[0, 0])
    found = judge.first.weight.grad
    assert found is not None
    step = 1e-6
    with torch.no_grad():
        for place in range(4):
            values = []
            for sign in (1, -1):
                judge.first.weight[word, place] += sign * step
                values.append(float(judge(batch).sum()))
                judge.first.weight[word, place] -= sign * step
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(found[word, place]), abs=1e-5)


def test_made_up_sentences_have_a_word_for_each_english_one() -> None:
    for foreign, english in made_up(20):
        assert sorted(foreign) == sorted(word[::-1] for word in english)
    assert same_word("god", "dog")


def test_finished_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(hidden_alignments.TOY, captions=30, course=replace(hidden_alignments.TOY.course, epochs=1))
    monkeypatch.setattr(hidden_alignments, "TOY", toy)
    monkeypatch.setattr(hidden_alignments, "TOY_TESTS", 20)
    whole = hidden_alignments.hidden_alignments(Context(data=None, records=Records(tmp_path)))
    again = hidden_alignments.hidden_alignments(Context(data=None, records=Records(tmp_path, minutes=0)))
    assert whole.tables[0].rows == again.tables[0].rows
    (tmp_path / "matching.seed-0.json").unlink()
    part = hidden_alignments.hidden_alignments(Context(data=None, records=Records(tmp_path, minutes=0)))
    assert "3 of 4 runs are finished" in part.summary
    assert [row[0] for row in part.tables[0].rows] == ["softmax", "sparsemax", "sequence"]
    assert [axes.get_title() for axes in part.figures[0].drawing.axes][3] == "matching: no run is finished"


def test_a_claim_compares_the_same_seeds() -> None:
    def group(kind: str, scores: list[float]) -> list[Record]:
        return [
            Record({"attention": kind}, seed, {}, {"test": score}, 0.0, "", "", None)
            for seed, score in enumerate(scores)
        ]

    scores: dict[Kind, list[float]] = {
        "softmax": [0.5, 0.6, 0.7],
        "sparsemax": [0.4, 0.4, 0.4, 0.4],
        "sequence": [0.4, 0.4, 0.4],
        "matching": [0.51, 0.61, 0.71, 0.0],
    }
    claim = hidden_alignments._claim({kind: group(kind, values) for kind, values in scores.items()})
    assert "matching 61.0 ± 24.8" in claim.ours
    assert "(3 runs each)" in claim.ours
    assert claim.holds == "yes"


@pytest.mark.slow
def test_a_dictionary_is_learned_by_the_way(chapter: Callable[[str], Run]) -> None:
    result = chapter("hidden_alignments").result
    assert result is not None
    (table,) = result.tables
    assert [row[0] for row in table.rows] == list(KINDS)
    assert all(float(str(row[3])) > 85 for row in table.rows)
    softmax, sparsemax, sequence, matching = (float(str(row[6])) for row in table.rows)
    assert min(softmax, sparsemax) > 40  # one word in seven is the right one by chance
    assert matching > 90
    assert sequence > softmax
    assert table.rows[3][5] == "1.00"

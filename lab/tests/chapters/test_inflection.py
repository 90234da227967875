"""Inflection: the sparse model's beams are exact more often than not, its lists end; and the drawings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel.seq2seq import STOP, Beam, Choice, Hypothesis, Training, Vocabulary
from fenchel_lab.chapters import inflection
from fenchel_lab.chapters.inflection import FULL, PAPER, SCALED, gains, plurals
from fenchel_lab.data import sigmorphon2018
from fenchel_lab.data.sigmorphon2018 import Inflection
from fenchel_lab.drawing import hypotheses, style
from fenchel_lab.models import inflecting
from fenchel_lab.report import Context, Run, find, run
from fenchel_lab.report.records import Record, Records


@pytest.mark.slow
def test_only_the_sparse_model_has_exact_beams(chapter: Callable[[str], Run]) -> None:
    result = chapter("inflection").result
    assert result is not None
    dense, sparse = (dict(zip(result.tables[1].header, row, strict=True)) for row in result.tables[1].rows)
    assert (dense["output"], dense["single form"], dense["exact beam"]) == ("softmax", "0.0", "0.0")
    assert all(float(str(row[3])) > 40 for row in result.tables[0].rows)
    assert float(str(sparse["exact beam"])) > 50
    assert float(str(sparse["single form"])) <= float(str(sparse["exact beam"])) <= float(str(sparse["proved best"]))
    assert float(str(sparse["letters"])) > float(str(sparse["whole words"]))


@pytest.mark.slow
def test_lists_of_forms_end_with_all_the_probability(chapter: Callable[[str], Run]) -> None:
    result = chapter("inflection").result
    assert result is not None
    assert result.tables[2].rows
    for *_, listed in result.tables[2].rows:
        shares = [float(each.split()[-2]) for each in str(listed).split(", ")]
        assert sum(shares) == pytest.approx(100, abs=0.3)
        assert shares == sorted(shares, reverse=True)


def test_the_papers_table_is_in_the_right_order() -> None:
    assert PAPER["high", 1.0, 1.0] == (93.15, 94.20)
    assert PAPER["medium", 1.0, 2.0] == (83.13, 85.65)
    assert PAPER["medium", 1.5, 1.0] == (84.88, 86.38)
    assert PAPER["high", 2.0, 1.5] == (94.47, 95.01)
    assert FULL.hidden > SCALED.hidden
    assert FULL.high.epochs > SCALED.high.epochs


def test_plurals_are_the_same_every_time_and_none_is_asked_that_was_learned() -> None:
    corpus = plurals(50, 10, 20)
    assert corpus == plurals(50, 10, 20)
    asked = {pair.source for pair in (*corpus.validation, *corpus.test)}
    assert len(asked) == 30
    assert not asked & {pair.source for pair in corpus.train}


def test_finished_runs_are_not_run_again_and_tables_come_from_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [Inflection(lemma, lemma + "en", ("V", "INF")) for lemma in ("ab", "ba", "bab", "abba", "baab", "aab")]
    monkeypatch.setattr(sigmorphon2018, "load", lambda language, split, folder: words)
    monkeypatch.setattr(inflection, "LANGUAGES", ("english",))
    monkeypatch.setattr(inflection, "FEW", ("english",))
    how = Training(epochs=1, batch=3)
    tiny = replace(SCALED, high=how, medium=how, embedding=4, hidden=4, runs=1)
    monkeypatch.setattr(inflection, "SCALED", tiny)
    folders = {"checkpoints": tmp_path / "checkpoints"}
    none = run(find("inflection"), Context(data=tmp_path, records=Records(tmp_path / "runs", 0), **folders))
    assert none.result is not None, none.error
    assert not none.result.tables
    whole = run(find("inflection"), Context(data=tmp_path, records=Records(tmp_path / "runs"), **folders))
    assert whole.result is not None, whole.error
    cells, curve, ensembles = 3 * 6, 5, 3 * 6  # Spanish and English, high, and English, medium
    assert Records(tmp_path / "runs").count == cells + curve + ensembles
    accuracies = whole.result.tables[0]
    assert tuple(accuracies.rows[0][:2]) == ("softmax", "softmax")
    assert set(accuracies.header) >= {"Spanish", "English"}
    assert len(whole.result.claims) == 3
    monkeypatch.setattr(inflecting, "fitted", None)  # nothing is trained again
    for minutes in (0.0, 9.0):
        again = run(find("inflection"), Context(data=tmp_path, records=Records(tmp_path / "runs", minutes), **folders))
        assert again.result is not None, again.error
        assert again.result.tables == whole.result.tables


def test_gains_are_of_pairs_that_differ_in_one_side_alone() -> None:
    def record(output: str, attention: str, seed: int, test: float) -> Record:
        cell = {"language": "a", "words": "high", "output": output, "attention": attention, "models": "one"}
        return Record(cell, seed, {}, {"test": test}, 1.0, "", "", None)

    records = [record("softmax", "softmax", 0, 0.5), record("1.5-entmax", "softmax", 0, 0.75)]
    records += [record("softmax", "softmax", 1, 0.5), record("1.5-entmax", "1.5-entmax", 1, 0.75)]
    assert gains(records, "output", 1.5, 1.0, "high") == [25.0]
    assert gains(records, "attention", 1.5, 1.0, "high") == []


def texts(drawing: object) -> list[str]:
    (axes,) = drawing.axes  # type: ignore[attr-defined]
    return [text.get_text() for text in axes.texts]


def test_a_tree_shares_beginnings_and_ends_with_probabilities() -> None:
    letters = Vocabulary("abc")
    strings = [("ab", 0.6), ("ac", 0.3), ("a", 0.1)]
    found = [Hypothesis(tuple(letters.encode(s)), torch.tensor(p).log().item(), 0.0) for s, p in strings]
    drawn = texts(hypotheses.tree(Beam(tuple(found), True, True, 3, 1.0), letters, "ab"))
    assert sorted(drawn) == ["10.0%", "30.0%", "60.0%", "a", "b", "c"]


def test_probabilities_stand_on_lines_of_their_own_and_the_right_one_is_in_colour() -> None:
    letters = Vocabulary("abc")
    strings = [
        ("a", 0.4),
        ("aa", 0.1),
        ("ab", 0.3),
        ("ac", 0.2),
    ]  # the middle one of those that go on stands at its height
    found = [Hypothesis(tuple(letters.encode(s)), torch.tensor(p).log().item(), 0.0) for s, p in strings]
    (axes,) = hypotheses.tree(Beam(tuple(found), True, True, 4, 1.0), letters, "ab").axes
    shares = {text.get_text(): text for text in axes.texts if "%" in text.get_text()}
    assert len({text.get_position()[1] for text in shares.values()}) == 4
    colours = {share: text.get_color() for share, text in shares.items()}
    assert [share for share in colours if colours[share] == style.PALETTE[0]] == ["30.0%"]


def test_alternatives_stand_under_the_symbol_that_was_taken() -> None:
    letters = Vocabulary("ab")
    choices = [Choice(2, 0.7, ((2, 0.7), (3, 0.3))), Choice(STOP, 1.0, ((STOP, 1.0),))]
    assert texts(hypotheses.alternatives(choices, letters)) == ["a", "b", "▪"]
    impossible = [Choice(3, 0.0, ((2, 1.0),)), Choice(0, 1.0, ((0, 1.0),))]
    assert texts(hypotheses.alternatives(impossible, letters)) == ["b", "a", "▪"]  # what the model would have written


def test_attention_leaves_zero_blank() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    drawing = hypotheses.attention([("", weights)], ["<PL>", "a"], ["b"])
    (axes,) = drawing.axes
    (image,) = axes.get_images()
    assert image.get_array().mask.tolist() == [[False, True], [False, False]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["PL", "a"]

"""The study of highlights, on made-up reviews: every selection is measured, and transitions in tests find phrases."""

from __future__ import annotations

import pytest

from fenchel_lab.chapters.document_classification import BAD, GOOD
from fenchel_lab.chapters.text_highlights import HARD, SEQUENTIAL, SOFT, _chosen, _rows, made_up
from fenchel_lab.report import find, run
from fenchel_lab.report.records import Record
from fenchel_lab.report.registry import Context


def test_made_up_reviews_are_marked_where_they_tell_their_class() -> None:
    for review in made_up(50):
        first, middle, last = review.rationale
        assert (middle - first, last - middle) == (1, 1)
        assert review.words[middle] in (GOOD if review.label else BAD)
        assert sum(word in (*GOOD, *BAD) for word in review.words) == 1


@pytest.mark.slow
def test_the_study_measures_every_selection_and_transitions_give_phrases() -> None:
    done = run(find("text_highlights"), Context(data=None))
    assert done.result is not None, done.error
    (table,), (figure,) = done.result.tables, done.result.figures
    names = ["softmax", "softmax, top words", "sparsemax", "entmax", "fusedmax", SOFT, HARD, f"{SEQUENTIAL}, 0.5"]
    assert [str(row[0]) for row in table.rows] == names
    rows = {str(row[0]): [_number(cell) for cell in row[3:]] for row in table.rows}
    measured = {name: dict(zip(table.header[3:], row, strict=True)) for name, row in rows.items()}
    for name, (f1, *_) in rows.items():
        assert f1 > 0.9, name
    assert measured["softmax"]["selected"] == 100
    plain, sequential = measured[HARD], measured[f"{SEQUENTIAL}, 0.5"]
    for row in (measured["softmax, top words"], plain, sequential):
        assert row["selected"] == pytest.approx(15, abs=1)
    assert sequential["runs per text"] < plain["runs per text"]
    assert sequential["words per run"] > plain["words per run"]
    assert sequential["overlap"] > plain["overlap"]
    assert len(figure.drawing.axes) == 2


def record(seed: int, validation: dict[str, float], test: float) -> Record:
    tried = {
        f"{SEQUENTIAL}, {transition}": {"validation": {"overlap": overlap}, "test": {"overlap": test}}
        for transition, overlap in validation.items()
    }
    return Record({"corpus": "ERASER"}, seed, {}, {"tried": tried}, 1.0, "", "", None)


def test_the_transition_is_chosen_by_the_mean_over_seeds_on_validation_reviews() -> None:
    records = [record(0, {"0.1": 0.5, "0.2": 0.4}, 0.1), record(1, {"0.1": 0.1, "0.2": 0.4}, 0.9)]
    rows = _rows(records)
    assert list(rows) == [SEQUENTIAL]
    assert _chosen(rows[SEQUENTIAL]) == "0.2"
    assert rows[SEQUENTIAL].values("overlap") == [0.1, 0.9]


def _number(cell: object) -> float:
    return float(str(cell).rstrip("%"))

"""The study of highlights, on made-up reviews: every selection is measured, and phrases are found by transitions."""

from __future__ import annotations

import pytest

from fenchel_lab.chapters.document_classification import BAD, GOOD
from fenchel_lab.chapters.text_highlights import METHODS, made_up
from fenchel_lab.report import find, run
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
    assert [str(row[0]) for row in table.rows] == ["softmax", "softmax, top words", *METHODS[1:]]
    measured = {str(row[0]): dict(zip(table.header[2:], map(_number, row[2:]), strict=True)) for row in table.rows}
    for row in measured.values():
        assert row["F₁"] > 0.9
        assert 0 <= row["by chance"] <= 1
    assert measured["softmax"]["selected"] == 100
    assert measured["softmax, top words"]["selected"] == pytest.approx(15, abs=1)
    plain, sequential = measured["k-subsets"], measured["sequential k-subsets"]
    assert sequential["runs"] < plain["runs"]
    assert sequential["words a run"] > plain["words a run"]
    assert any("fewer runs" in paragraph for paragraph in done.result.paragraphs)
    assert len(figure.drawing.axes) == 2


def _number(cell: object) -> float:
    return float(str(cell).rstrip("%"))

"""Attention to places and to ellipses: made-up pictures, what is asked, and the study on files as real ones are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Ellipse

from fenchel_lab.chapters import visual_questions
from fenchel_lab.chapters.visual_questions import COLOURS, METHODS, PAPER, Protocol, chosen, kind, made_up
from fenchel_lab.models.pictures import Size, boxes, pixels
from fenchel_lab.models.training import Course
from fenchel_lab.report import Context, Run, find, run
from fenchel_lab.report.records import Records


def test_made_up_pictures_show_what_their_answers_say() -> None:
    data = made_up(40, 3)
    again = made_up(40, 3)
    np.testing.assert_array_equal(data.images, again.images)
    inside = boxes(pixels(data.images)).numpy()
    for number in range(40):
        shape, colour, yes, no = data.answers[4 * number : 4 * number + 4]
        assert (yes, no) == ("yes", "no")
        seen = (data.images[number] == COLOURS[colour]).all(-1)
        assert seen.sum() > 15
        assert not (seen & ~inside[number]).any()
        full = seen.sum() / inside[number].sum()  # a rectangle fills its box, a circle π/4 of it, a triangle half
        assert shape == ("rectangle" if full > 0.95 else "circle" if full > 0.65 else "triangle"), (shape, full)
        assert f" {colour} " in data.questions[4 * number + 2]
        assert f" {colour} " not in data.questions[4 * number + 3]


def test_chosen_images_take_their_questions_along_in_their_order() -> None:
    data = made_up(6, 0)
    mixed = np.random.default_rng(0).permutation(24)
    shuffled = visual_questions.Questions(
        data.images, [data.questions[i] for i in mixed], [data.answers[i] for i in mixed], data.image[mixed]
    )
    part = chosen(shuffled, 2, 5)
    np.testing.assert_array_equal(part.images, data.images[2:5])
    assert part.image.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for image in range(3):
        rows = slice(4 * image, 4 * image + 4)
        asked = set(zip(part.questions[rows], part.answers[rows], strict=True))
        rows = slice(4 * image + 8, 4 * image + 12)
        assert asked == set(zip(data.questions[rows], data.answers[rows], strict=True))


def test_answers_tell_what_was_asked_for() -> None:
    assert [kind(answer) for answer in ("yes", "no", "gray", "triangle")] == ["yes or no"] * 2 + ["colour", "shape"]


@pytest.mark.slow
def test_every_attention_answers_far_better_than_chance(chapter: Callable[[str], Run]) -> None:
    result = chapter("visual_questions").result
    assert result is not None
    [table] = result.tables
    assert [row[0] for row in table.rows] == list(METHODS)
    assert [row[1] for row in table.rows] == ["65.83", "–", "65.96", "65.79"]
    assert min(float(str(row[3])) for row in table.rows) > 60
    assert min(float(str(row[6])) for row in table.rows) > 60  # of four colours


@pytest.mark.slow
def test_ellipses_are_on_the_images_of_densities_alone(chapter: Callable[[str], Run]) -> None:
    result = chapter("visual_questions").result
    assert result is not None
    drawing = result.figures[0].drawing
    counts = [sum(isinstance(patch, Ellipse) for patch in axes.patches) for axes in drawing.axes]
    assert counts == [0, 0, 1, 1] * (len(counts) // 4)
    assert len(counts) == 12
    for axes in drawing.axes:
        image, shade = (np.asarray(each.get_array()) for each in axes.images)
        assert image.shape[:2] == shade.shape[:2] == (32, 32)
        assert shade[..., 3].max() == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize("full", [False, True])
def test_the_study_reads_the_files_of_easy_vqa(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCHEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "easy_vqa").mkdir()
    for split, count in (("train", 20), ("test", 10)):
        data = made_up(count, count, side=16)
        np.savez(
            tmp_path / "easy_vqa" / f"{split}.npz",
            images=data.images,
            questions=np.array(data.questions),
            answers=np.array(data.answers),
            image_id=data.image,
        )
    size = Size(channels=(4, 6), strides=(2, 2), places=4, width=5, functions=4, batch=8)
    few = Protocol(size, Course(1, 1e-2), images=None if full else (12, 4), runs=2)
    monkeypatch.setattr(visual_questions, "FULL" if full else "SCALED", few)
    records = Records(tmp_path / "runs")
    outcome = run(find("visual_questions"), Context(data=tmp_path, full=full, records=records))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    text = " ".join(outcome.result.paragraphs)
    assert ("12 of easy-VQA's 4,000 training images" in text) is not full
    [table] = outcome.result.tables
    assert {str(row[0]): float(str(row[1])) for row in table.rows if row[1] != "–"} == PAPER
    assert "40 test questions" in table.caption
    assert [row[2] for row in table.rows] == [2] * 4
    assert records.count == 8
    tabulated = Context(data=tmp_path, full=full, records=Records(tmp_path / "runs", minutes=0))
    again = run(find("visual_questions"), tabulated).result
    assert again is not None
    assert [list(row) for row in again.tables[0].rows] == [list(row) for row in table.rows]
    assert again.claims == outcome.result.claims

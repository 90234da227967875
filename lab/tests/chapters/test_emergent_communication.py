"""Emergent communication: the talk's table and its arithmetic, and a chapter that is computed from records."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fenchel_lab.chapters import emergent_communication
from fenchel_lab.chapters.emergent_communication import FULL, PAPER, REAL, TOY, Protocol, collapses
from fenchel_lab.data import images
from fenchel_lab.data.images import Images
from fenchel_lab.models.agents import CHANNELS, Setting
from fenchel_lab.report import Context, Run, find, run
from fenchel_lab.report.records import Record, Records

SMALL = Setting(symbols=20, candidates=4, width=8, hidden=8, batch=16, updates=3)


def noise(folder: Path | None, halved: bool) -> Images:
    torch.manual_seed(5)
    side = 4 if halved else 6
    return Images(*(torch.rand(count, side, side) for count in (64, 20, 20)))


def test_the_talks_table_is_there() -> None:
    assert PAPER.keys() == CHANNELS.keys()
    assert PAPER["Gaussian-Sparsemax"] == ((80.88, 0.5), (1.57, 0.02))
    assert PAPER["K-D Hard Concrete"] == ((76.07, 7.76), (21.43, 17.56))


def test_protocols_have_the_authors_game_and_number_of_runs() -> None:
    for protocol in (FULL, REAL, TOY):
        assert (protocol.setting.symbols, protocol.setting.candidates) == (256, 16)
        assert protocol.setting.batch >= protocol.setting.candidates
    assert FULL.setting == REAL.setting == Setting()
    assert (FULL.runs, REAL.runs) == (10, 10)
    assert (Setting().width, Setting().hidden, Setting().batch, Setting().updates) == (256, 512, 64, 50_000)


@pytest.mark.parametrize(("method", "k"), [("Gumbel-Softmax", 1), ("Gumbel-Softmax ST", 3), ("K-D Hard Concrete", 1)])
def test_standard_errors_of_the_talk_follow_from_collapsed_runs(method: str, k: int) -> None:
    (mean, error), _ = PAPER[method]
    number, others, following = collapses(mean, error, 1 / 16)
    runs = np.array([6.25] * k + [others] * (10 - k))
    assert number == k
    assert runs.mean() == pytest.approx(mean)
    assert runs.std(ddof=1) / math.sqrt(10) == pytest.approx(following)
    assert following == pytest.approx(error, abs=0.05)


@pytest.mark.slow
def test_the_chapter_beats_guessing_and_its_codes_are_as_sparse_as_they_should(chapter: Callable[[str], Run]) -> None:
    result = chapter("emergent_communication").result
    assert result is not None
    (table,) = result.tables
    success = {str(row[0]): float(str(row[2]).split()[0]) for row in table.rows}
    nonzeros = {str(row[0]): float(str(row[7]).split()[0]) for row in table.rows}
    assert list(success) == list(PAPER)
    assert min(success.values()) > 3 * 6.25
    assert nonzeros["Gumbel-Softmax ST"] == 1
    assert nonzeros["Gumbel-Softmax"] > 200
    assert 1 < nonzeros["Gaussian-Sparsemax"] < 4
    assert len(result.figures) == 4


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_tables_are_computed_from_records_and_no_run_is_done_twice(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "load", noise)
    monkeypatch.setattr(emergent_communication, "REAL", Protocol(SMALL, runs=3))
    monkeypatch.setattr(emergent_communication, "FULL", Protocol(SMALL, (False, True), runs=2))
    told: list[float] = []
    records = Records(tmp_path / "runs")
    context = Context(tmp_path, 4, full, lambda part, note="": told.append(part), records=records)
    first = run(find("emergent_communication"), context)
    assert first.error is None, first.error
    assert first.result is not None
    assert records.count == (16 if full else 12)
    assert [table.caption[:5] for table in first.result.tables] == (["6 × 6", "4 × 4"] if full else ["6 × 6"])
    assert first.result.tables[0].rows[3][3] == "80.88 ± 0.50"
    assert told == sorted(told)
    again = run(find("emergent_communication"), replace(context, records=Records(tmp_path / "runs", minutes=0)))
    assert again.result is not None
    assert [table.rows for table in again.result.tables] == [table.rows for table in first.result.tables]


def record(method: str, seed: int, success: float) -> Record:
    figures = {"last": {"test": success, "validation": success, "nonzeros": 1.5}}
    return Record({"method": method, "image": "28 × 28"}, seed, {}, figures, 1.0, "", "", None)


def found(collapsed: dict[str, int], runs: int) -> dict[str, list[Record]]:
    return {
        name: [record(name, seed, 0.0625 if seed < k else 0.8) for seed in range(runs)] for name, k in collapsed.items()
    }


@pytest.mark.parametrize(
    ("collapsed", "runs", "holds"),
    [
        ((2, 2, 2, 0), 2, "too few runs"),
        ((2, 2, 2, 0), 3, "not shown"),  # of 12 runs 6 fail: that three others do not is chance in one case of 11
        ((4, 5, 4, 0), 10, "yes"),
        ((1, 3, 1, 0), 10, "not shown"),  # the talk's own figures
        ((4, 5, 4, 1), 10, "no"),
    ],
)
def test_robustness_is_shown_by_what_chance_does_not_explain(collapsed: tuple[int, ...], runs: int, holds: str) -> None:
    groups = found(dict(zip(CHANNELS, collapsed, strict=True)), runs)
    claim = emergent_communication._claims(groups, Setting(), "28 × 28")[1]
    assert claim.holds == holds
    assert f"of {runs}: Gaussian-Sparsemax {collapsed[3]}, Gumbel-Softmax {collapsed[0]}" in claim.ours


def test_what_is_not_finished_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "load", noise)
    outcome = run(find("emergent_communication"), Context(tmp_path, records=Records(tmp_path / "runs", minutes=0)))
    assert outcome.result is not None, outcome.error
    assert outcome.result.paragraphs[-2].startswith("0 of 40 runs are finished")
    assert not outcome.result.tables

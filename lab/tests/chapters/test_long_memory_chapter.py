"""Long memory: the study on tiny sequences."""

from pathlib import Path

import pytest

from fenchel_lab.chapters import long_memory
from fenchel_lab.chapters.long_memory import FULL, SCALED, Protocol
from fenchel_lab.models.sorting import KINDS, Setting
from fenchel_lab.report import Context, find, run

TOY = Protocol(Setting(chunk=32, memory=8, width=8, heads=2, batch=2), lengths=(60, 90), steps=(2, 1), test=3)


def test_protocols_have_the_papers_task() -> None:
    assert SCALED.lengths == (4000, 16000)
    assert FULL.lengths == (4000, 8000, 16000)
    assert (FULL.setting.chunk, 2 * FULL.setting.memory, FULL.setting.layers) == (1024, 2048, 3)
    assert SCALED.setting.tokens == FULL.setting.tokens == 20


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_the_study_compares_all_memories_and_resumes(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_memory, "FULL" if full else "SCALED", TOY)
    told: list[float] = []
    context = Context(None, 3, full, lambda part, note="": told.append(part), tmp_path)
    outcome = run(find("long_memory"), context)
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    assert told == sorted(told)
    assert [row[0] for row in outcome.result.tables[0].rows] == list(KINDS)
    assert ("Scaled down" in outcome.result.summary) is not full
    assert len(list(tmp_path.iterdir())) == 2 * len(KINDS)
    told.clear()
    again = run(find("long_memory"), context).result
    assert again is not None
    assert told == []  # no step was left to do
    assert again.tables[0].rows == outcome.result.tables[0].rows
    assert not find("long_memory").tour

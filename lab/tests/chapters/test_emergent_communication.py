"""Emergent communication: the talk's table, the choice of settings, and a chapter that can be read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel_lab.chapters import emergent_communication
from fenchel_lab.chapters.emergent_communication import FULL, PAPER, SCALED, TOY, Protocol
from fenchel_lab.data import images
from fenchel_lab.data.images import Images
from fenchel_lab.models import agents
from fenchel_lab.models.agents import CHANNELS, Agents, Setting
from fenchel_lab.report import Context, Run, find, run

SMALL = Setting(symbols=20, candidates=4, width=8, hidden=8, batch=16, epochs=1)


def noise(train: int = 64, valid: int = 20, test: int = 20) -> Images:
    torch.manual_seed(5)
    return Images(*(torch.rand(count, 4, 4) for count in (train, valid, test)))


def test_the_talks_table_is_there() -> None:
    assert PAPER.keys() == CHANNELS.keys()
    assert PAPER["Gaussian-Sparsemax"] == ((80.88, 0.5), (1.57, 0.02))
    assert PAPER["K-D Hard Concrete"] == ((76.07, 7.76), (21.43, 17.56))


def test_protocols_have_the_papers_game_and_number_of_runs() -> None:
    for protocol in (FULL, SCALED, TOY):
        assert (protocol.setting.symbols, protocol.setting.candidates) == (256, 16)
        assert protocol.setting.batch >= protocol.setting.candidates
    assert FULL.runs == SCALED.runs == 10
    assert (FULL.setting.epochs, FULL.setting.batch, FULL.setting.width) == (500, 64, 256)
    assert FULL.grid
    assert not SCALED.grid


def test_the_setting_is_chosen_by_validation_games_of_the_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[float, int]] = []
    tested: list[tuple[float, int]] = []
    success = {0.1: 0.4, 0.2: 0.9, 0.3: 0.6}

    def trained(*arguments: object) -> Agents:
        setting = arguments[1]
        assert isinstance(setting, Setting)
        used.append((setting.rate, int(torch.initial_seed())))
        return Agents(16, setting, CHANNELS["Gumbel-Softmax"])

    def played(pair: Agents, shown: torch.Tensor, seed: int) -> agents.Outcome:
        tested.append((pair.setting.rate, len(shown)))
        return agents.Outcome(success[pair.setting.rate], 1.0, 1, torch.eye(1))

    monkeypatch.setattr(agents, "trained", trained)
    monkeypatch.setattr(agents, "played", played)
    protocol = Protocol(SMALL, {"rate": (0.1, 0.2, 0.3)})
    found = emergent_communication.compared("Gumbel-Softmax", noise(valid=21), protocol, [7, 8], lambda part: None)
    assert used == [(0.1, 7), (0.2, 7), (0.3, 7), (0.2, 7), (0.2, 8)]
    assert tested == [(0.1, 21), (0.2, 21), (0.3, 21), (0.2, 20), (0.2, 20)]
    assert found.setting.rate == 0.2
    assert found.success == [90.0, 90.0]


@pytest.mark.slow
def test_the_chapter_beats_guessing_and_its_codes_are_as_sparse_as_they_should(chapter: Callable[[str], Run]) -> None:
    result = chapter("emergent_communication").result
    assert result is not None
    (table,) = result.tables
    success = {str(row[0]): float(str(row[1]).split()[0]) for row in table.rows}
    nonzeros = {str(row[0]): float(str(row[4]).split()[0]) for row in table.rows}
    assert list(success) == list(PAPER)
    assert min(success.values()) > 4 * 6.25
    assert nonzeros["Gumbel-Softmax ST"] == 1
    assert nonzeros["Gumbel-Softmax"] > 200
    assert 1 < nonzeros["Gaussian-Sparsemax"] < 4
    assert len(result.figures) == 3
    assert "ImageNet" in result.summary


@pytest.mark.parametrize("full", [False, True])
def test_real_images_follow_their_protocol(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def load(folder: Path | None, halved: bool) -> Images:
        assert folder == tmp_path
        asked.append(halved)
        return noise()

    monkeypatch.setattr(images, "load", load)
    few = replace(SMALL, symbols=20)
    monkeypatch.setattr(emergent_communication, "SCALED", Protocol(few, {}, halved=True, runs=3))
    monkeypatch.setattr(emergent_communication, "FULL", Protocol(few, {"anneal": (0.2, 1.0)}, runs=2))
    told: list[float] = []
    context = Context(data=tmp_path, seed=4, full=full, progress=lambda part, note="": told.append(part))
    outcome = run(find("emergent_communication"), context)
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    assert asked == [not full]
    assert len(outcome.result.tables) == (2 if full else 1)
    assert ("3 seeds" in outcome.result.tables[0].caption) is not full
    assert outcome.result.tables[0].rows[3][2] == "80.88 ± 0.50"
    assert told == sorted(told)

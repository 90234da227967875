"""Records of runs: kept one by one, used again, and never for other settings."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from fenchel_lab.report.records import Job, Record, Records


def jobs(done: list[int], rate: float = 0.1, seeds: int = 3) -> list[Job]:
    def work(seed: int) -> Callable[[Callable[[float], None]], Mapping[str, float]]:
        def draw(progress: Callable[[float], None]) -> Mapping[str, float]:
            done.append(seed)
            progress(1.0)
            return {"drawn": torch.rand(()).item()}

        return draw

    return [Job({"method": "A b", "image": "2 × 2"}, seed, {"rate": rate}, work(seed)) for seed in range(seeds)]


def test_a_run_that_is_recorded_is_not_done_again(tmp_path: Path) -> None:
    done: list[int] = []
    first = Records(tmp_path).collect(jobs(done, seeds=2))
    told: list[tuple[float, str]] = []
    found = Records(tmp_path).collect(jobs(done), lambda part, note="": told.append((part, note)))
    assert done == [0, 1, 2]
    assert found[:2] == first
    assert found[2].figures != first[0].figures
    assert told == [(0.0, "2 of 3 runs are recorded"), (1.0, "2 of 3 runs are recorded; A b, 2 × 2, seed 2")]
    assert sorted(file.name for file in tmp_path.iterdir())[0] == "a-b.2-2.seed-0.json"


def test_the_seed_decides_what_is_drawn_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    once, again = (Records().collect(jobs([])) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [each.figures for each in once] == [each.figures for each in again]


def test_a_run_that_fails_leaves_those_before_it(tmp_path: Path) -> None:
    def fails(progress: Callable[[float], None]) -> Mapping[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Records(tmp_path).collect([*jobs([]), Job({"method": "bad"}, 0, {}, fails)])
    assert Records(tmp_path).count == 3


def test_no_run_is_begun_after_the_time(tmp_path: Path) -> None:
    done: list[int] = []
    assert Records(tmp_path, minutes=0).collect(jobs(done)) == []
    assert done == []


def test_records_of_other_settings_are_refused_until_they_are_cleared(tmp_path: Path) -> None:
    Records(tmp_path).collect(jobs([]))
    with pytest.raises(ValueError, match=r"other settings \(rate\).*--fresh"):
        Records(tmp_path).collect(jobs([], rate=0.2))
    Records(tmp_path).clear()
    assert Records(tmp_path).count == 0
    assert len(Records(tmp_path).collect(jobs([], rate=0.2))) == 3


def test_no_file_that_is_not_a_record_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ValueError, match=r"mine\.json is not the record of a run"):
        Records(tmp_path).clear()
    assert (tmp_path / "mine.json").exists()


def test_records_say_where_they_come_from(tmp_path: Path) -> None:
    (record, *_) = Records(tmp_path).collect(jobs([]))
    assert Record.read(tmp_path / jobs([])[0].name) == record
    assert record.seconds >= 0
    assert record.processor

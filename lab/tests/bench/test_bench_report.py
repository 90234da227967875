"""Reports: tables, Markdown and JSON say what was measured, where, and whether it is enough."""

import dataclasses
import json
from pathlib import Path

import pytest

from fenchel_lab.bench import (
    Contestant,
    Goal,
    Machine,
    Measured,
    Outcome,
    Report,
    Timing,
    Workload,
    insert,
    sheet,
    state,
)
from fenchel_lab.bench import report as report_module
from fenchel_lab.bench.report import show_bytes, show_ratio, show_seconds

MACHINE = Machine(
    cpu="Abacus 9",
    target="AVX2 (abacus)",
    cores=2,
    torch_threads=1,
    kernels="on",
    python="3.11.7",
    torch="2.13.0",
    numba="0.68.1",
    fenchel="0.1.0",
    entmax=None,
    system="Linux x86_64",
    date="2026-01-02T03:04:05+00:00",
)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 7)


@pytest.fixture
def outcome() -> Outcome:
    contestants = [
        Contestant("torch", lambda: None),
        Contestant("ours", lambda: None),
        Contestant("peer", None, "peer is not installed: pip install peer"),
    ]
    goals = [
        Goal("ours", 1.0, "torch"),
        Goal("ours", 1.5, "torch", "largest"),
        Goal("ours", 0.6, "torch", "largest", ("narrow",)),
        Goal("ours", 1 / 30, "peer"),
        Goal("ours", 3e8, statistic="memory", cases=("wide",)),
    ]
    measured = [
        Measured("narrow", {"torch": timing(2e-3), "ours": timing(1e-3)}, {}),
        Measured("wide", {"torch": timing(0.5), "ours": timing(1.0)}, {"torch": 6_000_000, "ours": 512_000_000}),
    ]
    return Outcome(Workload("maps", "what is done", contestants, [], goals), measured, "AVX2 (abacus)")


@pytest.fixture
def report(outcome: Outcome) -> Report:
    return Report(MACHINE, 0.5, [outcome])


def test_the_table_shows_ratios_to_the_first_and_memory(outcome: Outcome) -> None:
    table = sheet(outcome)
    assert table.title == "maps: what is done; AVX2 (abacus)"
    assert table.header == ["", "torch", "ours", "memory: torch", "memory: ours"]
    assert table.rows == [
        ["narrow", "2.00 ms", "0.50 ×", "", ""],
        ["wide", "500 ms", "2.00 ×", "6.0 MB", "512 MB"],
        ["geometric mean", "", "1.00 ×", "", ""],
    ]


def test_the_table_says_whether_each_goal_holds(outcome: Outcome) -> None:
    assert sheet(outcome).notes == [
        "✓ ours, geometric mean: 1.00 × torch (goal: ≤ 1 ×)",
        "✗ ours, largest: 2.00 × torch (goal: ≤ 1.5 ×)",
        "✓ ours, narrow: 0.50 × torch (goal: ≤ 0.6 ×)",
        "– ours, geometric mean: ≥ 30 × as fast as peer (not measured)",
        "✗ ours, wide, peak memory: 512 MB (goal: ≤ 300 MB)",
    ]


def test_a_speed_up_is_told_as_one(outcome: Outcome) -> None:
    fast = dataclasses.replace(
        outcome,
        workload=dataclasses.replace(outcome.workload, goals=[Goal("ours", 1 / 80, "torch")]),
        measured=[Measured("c", {"torch": timing(1.0), "ours": timing(0.01)}, {})],
    )
    assert sheet(fast).notes == ["✓ ours, geometric mean: 100 × as fast as torch (goal: ≥ 80 × as fast)"]
    assert state(fast.workload.goals[0]) == "ours, geometric mean: ≥ 80 × as fast as torch"


def test_the_mean_is_left_out_where_no_goal_speaks_of_it(outcome: Outcome) -> None:
    workload = dataclasses.replace(outcome.workload, goals=outcome.workload.goals[1:3])
    assert [row[0] for row in sheet(dataclasses.replace(outcome, workload=workload)).rows] == ["narrow", "wide"]


def test_markdown_holds_the_summary_the_machine_and_every_table(report: Report) -> None:
    text = report.markdown()
    summary, rest = text.split("\n\nRatios of medians")
    assert summary.splitlines() == [
        "| | against | goal | AVX2 (abacus) |",
        "| --- | --- | ---: | ---: |",
        "| maps: ours, geometric mean | torch | ≤ 1 × | 1.00 × ✓ |",
        "| maps: ours, largest | torch | ≤ 1.5 × | 2.00 × ✗ |",
        "| maps: ours, narrow | torch | ≤ 0.6 × | 0.50 × ✓ |",
        "| maps: ours, geometric mean | peer | ≥ 30 × as fast | not measured – |",
        "| maps: ours, wide, peak memory | – | ≤ 300 MB | 512 MB ✗ |",
    ]
    assert "Abacus 9, AVX2 (abacus), 2 cores, 1 torch thread; fenchel 0.1.0, torch 2.13.0, numba 0.68.1, " in rest
    assert "python 3.11.7; Linux" in rest
    assert "2026-01-02." in rest
    assert "Kernels are off" not in rest
    assert rest.count("peer is not installed: pip install peer") == 1
    assert (
        "### maps: what is done; AVX2 (abacus)\n\n| | torch | ours | memory: torch | memory: ours |\n| --- | ---: |"
        in rest
    )
    assert "| narrow | 2.00 ms | 0.50 × | | |\n" in rest
    assert "- ✓ ours, geometric mean: 1.00 × torch (goal: ≤ 1 ×)\n" in rest


def test_every_instruction_set_has_a_column_of_its_own(report: Report, outcome: Outcome) -> None:
    other = dataclasses.replace(outcome, measured=outcome.measured[:1], target="AVX-512 (abacus)")
    both = dataclasses.replace(
        report, machine=dataclasses.replace(MACHINE, target="AVX-512 (abacus)"), outcomes=[other, *report.outcomes]
    )
    assert both.summary.header == ["", "against", "goal", "AVX-512 (abacus)", "AVX2 (abacus)"]
    assert both.summary.rows[0] == ["maps: ours, geometric mean", "torch", "≤ 1 ×", "0.50 × ✓", "1.00 × ✓"]
    assert len(both.summary.rows) == 5
    assert "are missing" not in both.digest()
    assert "This machine has no AVX-512: figures for AVX-512 are missing." in report.digest()
    assert [each["target"] for each in both.record()["workloads"]] == ["AVX-512 (abacus)", "AVX2 (abacus)"]


def test_seconds_are_shown_as_such(outcome: Outcome) -> None:
    workload = dataclasses.replace(
        outcome.workload, goals=[Goal("ours", 0.9, statistic="seconds"), Goal("torch", 2.0, statistic="seconds")]
    )
    cold = dataclasses.replace(outcome, workload=dataclasses.replace(workload, stopwatch=True))
    assert sheet(cold).rows[1] == ["wide", "500 ms", "1.00 s", "6.0 MB", "512 MB"]
    assert sheet(cold).notes == ["✗ ours, largest: 1.00 s (goal: ≤ 0.9 s)", "✓ torch, largest: 500 ms (goal: ≤ 2 s)"]


def test_kernels_that_are_off_are_noted(report: Report) -> None:
    off = dataclasses.replace(report, machine=dataclasses.replace(MACHINE, kernels="off"))
    assert "Kernels are off (FENCHEL_KERNELS=off)." in off.digest()
    assert off.record()["machine"]["kernels"] == "off"


def test_a_line_of_several_workloads_comes_once(report: Report) -> None:
    twice = dataclasses.replace(report, outcomes=[*report.outcomes, *report.outcomes])
    assert twice.missing == ["peer is not installed: pip install peer"]


def test_a_workload_that_was_not_measured_has_no_table(report: Report, outcome: Outcome) -> None:
    empty = dataclasses.replace(report, outcomes=[dataclasses.replace(outcome, measured=[])])
    assert "###" not in empty.markdown()
    assert empty.markdown().count("not measured") == 5
    assert empty.record()["workloads"][0]["cases"] == []


def test_json_holds_every_number(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    record = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert (folder / "bench.md").read_text(encoding="utf-8") == report.markdown()
    assert record["machine"] == dataclasses.asdict(MACHINE)
    assert record["seconds_each"] == 0.5
    (workload,) = record["workloads"]
    assert (workload["name"], workload["title"], workload["first"]) == ("maps", "what is done", "torch")
    assert workload["missing"] == ["peer is not installed: pip install peer"]
    narrow, wide = workload["cases"]
    assert (narrow["case"], wide["case"]) == ("narrow", "wide")
    assert narrow["contestants"]["ours"] == {
        "median": 1e-3,
        "lower": 0.9 * 1e-3,
        "upper": 1.2 * 1e-3,
        "runs": 7,
        "ratio": 0.5,
        "memory": None,
    }
    assert wide["contestants"]["torch"]["memory"] == 6_000_000
    assert [goal["holds"] for goal in workload["goals"]] == [True, False, True, None, False]
    assert workload["goals"][1]["value"] == 2.0
    assert workload["goals"][1]["at_most"] == 1.5


def test_insert_replaces_what_is_between_the_marks_and_nothing_else() -> None:
    page = "# Page\n\n<!-- bench -->\nold\n<!-- /bench -->\n\nend\n"
    once = insert(page, "new | table\n")
    assert once == "# Page\n\n<!-- bench -->\nnew | table\n<!-- /bench -->\n\nend\n"
    assert insert(once, "new | table") == once


def test_a_page_is_filled_with_figures_without_goals(outcome: Outcome) -> None:
    report = Report(MACHINE, 0.1, [outcome])
    filled = report.fill("top <!-- bench --> old <!-- /bench --> end")
    assert "| | against |" in filled
    assert "old" not in filled
    assert "goal" not in filled
    assert "✗" not in filled
    assert "2.00 ×" in filled
    assert "Abacus 9" in filled


def test_the_five_rows_need_all_their_workloads(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "top <!-- bench: five rows --> old <!-- /bench --> end"
    with pytest.raises(ValueError, match=r"need the workload maps, which was not measured"):
        Report(MACHINE, 0.1, [outcome]).fill(page)
    monkeypatch.setattr(report_module, "FRONT", {(outcome.workload.name, "ours", "torch", "narrow"): "narrow rows"})
    filled = Report(MACHINE, 0.1, [outcome]).fill(page)
    assert "| narrow rows | torch | 0.50 × |" in filled


@pytest.mark.parametrize("page", ["", "<!-- bench --> only", "<!-- /bench --> wrong order <!-- bench -->"])
def test_a_page_without_both_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"marks <!-- bench --> and <!-- /bench -->"):
        insert(page, "new")


def test_figures_have_three_digits_at_every_size() -> None:
    assert [show_seconds(s) for s in (9.996e-7, 9.994e-4, 0.0999, 99.0)] == ["1.00 µs", "999 µs", "99.9 ms", "99.0 s"]
    assert [show_ratio(r) for r in (0.004, 9.994, 9.996, 99.96)] == ["0.00 ×", "9.99 ×", "10.0 ×", "100 ×"]
    assert [show_bytes(b) for b in (0, 9.94e6, 1e7, 3.2e9)] == ["0.0 MB", "9.9 MB", "10 MB", "3200 MB"]

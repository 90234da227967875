"""Running a study: reproducible, contained, and saved with how to do it again."""

import csv
import importlib.metadata
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Run, Study, Table, origin, run


def drawn(context: Context) -> Result:
    return Result("", tables=[Table(["x"], [[torch.rand(()).item()]], caption="")])


DRAWN = Study("drawn", "Drawn at random", "", 1, drawn)


def number(outcome: Run) -> object:
    assert outcome.result is not None
    return outcome.result.tables[0].rows[0][0]


def test_the_seed_alone_decides_what_is_random() -> None:
    once = number(run(DRAWN, Context(seed=3)))
    torch.rand(7)
    assert number(run(DRAWN, Context(seed=3))) == once
    assert number(run(DRAWN, Context(seed=4))) != once


def test_a_run_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    run(DRAWN, Context(seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_is_recorded_not_raised(broken: Study) -> None:
    outcome = run(broken, Context())
    assert outcome.result is None
    assert isinstance(outcome.error, RuntimeError)
    with pytest.raises(ValueError, match="broken failed"):
        outcome.save(Path("nowhere"))


def test_a_figure_that_cannot_be_drawn_fails_its_study() -> None:
    def undrawable(context: Context) -> Result:
        drawing, (axes,) = style.panels(1, 1)
        axes.set_title(r"$\nosuchcommand$")
        return Result("", figures=[Figure(drawing, caption="", alt="")])

    outcome = run(Study("undrawable", "", "", 1, undrawable), Context())
    assert outcome.result is None
    assert outcome.error is not None


def test_the_record_round_trips(small: Study, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on the way"
    outcome = run(small, Context(data=None, seed=5))
    outcome.save(folder)
    record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert outcome.result is not None
    assert record["study"] == "small"
    assert record["title"] == small.title
    assert record["source"] == small.source
    assert record["seed"] == 5
    assert record["data"] == []
    assert record["command"] == "fenchel study run small --seed 5"
    assert record["version"] == importlib.metadata.version("fenchel")
    assert record["commit"] == origin.commit()
    assert record["seconds"] == pytest.approx(outcome.seconds, abs=1e-3)
    assert record["summary"] == outcome.result.paragraphs
    [figure] = record["figures"]
    assert figure["paper"] == "The paper's rises too"
    assert (folder / figure["file"]).read_bytes().startswith(b"\x89PNG\r\n")
    [table] = record["tables"]
    assert table["header"] == ["name", "value"]
    assert table["rows"] == [["a, b", 0.5], ["<c>", "inf"]]
    with (folder / table["file"]).open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["name", "value"], ["a, b", "0.5"], ["<c>", "inf"]]


def test_the_command_names_every_choice(small: Study) -> None:
    outcome = Run(small, Context(data=None, seed=2, full=True), 0.0, None)
    assert shlex.split(outcome.command) == ["fenchel", "study", "run", "small", "--seed", "2", "--full"]


def test_a_record_tells_which_data_and_not_where_it_lay(small: Study, tmp_path: Path) -> None:
    outcome = run(replace(small, data=("mnist", "ner")), Context(data=tmp_path / "secret", seed=2))
    assert outcome.command == "FENCHEL_DATA=… fenchel study run small --seed 2"
    outcome.save(tmp_path / "out")
    text = (tmp_path / "out" / "result.json").read_text(encoding="utf-8")
    assert json.loads(text)["data"] == ["mnist", "ner"]
    assert str(tmp_path) not in text


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_package_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "runs.py"
    module.write_text("")
    monkeypatch.setattr(origin, "__file__", str(module))
    assert origin.commit() is None
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "somebody else's")
    assert origin.commit() is None
    git(tmp_path, "add", "runs.py")
    git(tmp_path, "commit", "-m", "ours")
    assert origin.commit() == git(tmp_path, "rev-parse", "HEAD")
    results = tmp_path / "docs" / "results" / "a.json"
    results.parent.mkdir(parents=True)
    results.write_text("{}")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a result")
    results.write_text("written anew")
    assert origin.commit() == git(tmp_path, "rev-parse", "HEAD")
    module.write_text("changed")
    assert origin.commit() == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


def test_a_study_on_data_says_what_its_long_protocol_leaves_out(small: Study, tmp_path: Path) -> None:
    long = replace(small, full="With `--full` all. What differs: the data.", data=("mnist",))
    for context, told in (
        (Context(data=tmp_path), True),
        (Context(data=tmp_path, full=True), True),
        (Context(None), False),
    ):
        result = run(long, context).result
        assert result is not None
        assert (result.paragraphs[-1] == long.full) == told
    result = run(replace(long, data=()), Context(None)).result  # it needs none, and has one short protocol
    assert result is not None
    assert result.paragraphs[-1] == long.full

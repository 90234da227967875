"""The command line: what it says, what it writes, what it returns."""

import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fenchel.studies
from fenchel import cli
from fenchel.studies import Context, Result, Study, Table, registry, studies

runner = CliRunner()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Study]:
    """Two small studies in place of the real ones."""
    studies()  # the real ones are registered on import: let that happen before

    def echo(context: Context) -> Result:
        context.progress(0.5, "half [way]")
        row = [context.seed, str(context.data), str(context.full)]
        return Result("Echoed [text].", tables=[Table(["seed", "data", "full"], [row], caption="What was asked")])

    def broken(context: Context) -> Result:
        raise RuntimeError("out of luck")

    known = {"broken": Study("broken", "A broken study", "Nobody", 1, broken)}
    known["echo"] = Study("echo", "An echo", "Somebody (2020)", 2, echo)
    monkeypatch.setattr(registry, "_STUDIES", known)
    monkeypatch.delenv("FENCHEL_DATA", raising=False)
    return known


def run(*words: str) -> tuple[int, str]:
    """Exit code and all that was printed, unwrapped."""
    result = runner.invoke(cli.app, list(words))
    return result.exit_code, " ".join(result.output.split())


def test_help_teaches_the_first_commands() -> None:
    code, text = run("--help")
    assert code == 0
    for words in ("instead of softmax", "fenchel tour", "fenchel study list", "fenchel study run paths", "--version"):
        assert words in text


def test_version_is_the_packages() -> None:
    assert run("--version") == (0, f"fenchel {metadata.version('fenchel')}")


def test_list_shows_every_study_and_its_paper(registered: dict[str, Study]) -> None:
    code, text = run("study", "list")
    assert code == 0
    assert "broken A broken study Nobody echo An echo Somebody (2020)" in text


def test_run_saves_where_it_is_told(registered: dict[str, Study], tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    code, text = run("study", "run", "echo", "--data", str(data), "--seed", "7", "--out", str(out), "--full")
    assert code == 0
    assert "Echoed [text]." in text
    assert "What was asked" in text
    record = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert record["tables"][0]["rows"] == [[7, str(data), "True"]]
    assert record["command"] == f"fenchel study run echo --seed 7 --data {data} --full"


def test_run_saves_under_the_studys_name_by_default(
    registered: dict[str, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run("study", "run", "echo")
    assert code == 0
    assert str(Path("report") / "echo") in text
    assert (tmp_path / "report" / "echo" / "table-1.csv").read_text() == "seed,data,full\n0,None,False\n"


def test_data_may_come_from_the_environment(
    registered: dict[str, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCHEL_DATA", str(tmp_path))
    assert run("study", "run", "echo", "--out", str(tmp_path / "out"))[0] == 0
    record = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert record["tables"][0]["rows"][0][1] == str(tmp_path)


def test_a_data_folder_that_is_not_there_is_refused(registered: dict[str, Study], tmp_path: Path) -> None:
    code, text = run("study", "run", "echo", "--data", str(tmp_path / "absent"))
    assert code == 2
    assert "'--data'" in text


def test_an_unknown_study_exits_2_with_suggestions(registered: dict[str, Study]) -> None:
    code, text = run("study", "run", "eco")
    assert code == 2
    assert text == "There is no study called 'eco'. Did you mean echo? Studies: broken, echo."


def test_a_study_that_fails_exits_1_and_says_why(registered: dict[str, Study], tmp_path: Path) -> None:
    code, text = run("study", "run", "broken", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "broken failed" in text
    assert "RuntimeError: out of luck" in text
    assert not (tmp_path / "out").exists()


def test_the_tour_survives_a_failing_study(registered: dict[str, Study], tmp_path: Path) -> None:
    code, text = run("tour", "--out", str(tmp_path), "--seed", "3")
    assert code == 1
    assert "RuntimeError: out of luck" in text
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "1 of 2 chapters failed" in page
    assert "Echoed [text]." in page
    assert "fenchel study run echo --seed 3" in page


def test_the_tour_keeps_to_embedded_data(
    registered: dict[str, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del registered["broken"]
    monkeypatch.setenv("FENCHEL_DATA", str(tmp_path))
    assert run("tour", "--out", str(tmp_path))[0] == 0
    assert "<td>None</td>" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("absent", ["typer", "rich", "matplotlib", "jinja2"])
def test_without_the_extra_the_command_says_what_to_install(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second import replaces the package's attributes too: have them put back.
    monkeypatch.setattr(fenchel, "studies", fenchel.studies)
    monkeypatch.setattr(fenchel, "cli", cli)
    for name in list(sys.modules):
        if name == absent or name.startswith((f"{absent}.", "fenchel.studies", "fenchel.cli")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SystemExit, match=rf"needs {absent}: pip install 'fenchel\[studies\]'"):
        importlib.import_module("fenchel.cli")


def test_the_library_does_not_pull_in_the_studies_and_these_not_pyplot() -> None:
    code = """
import sys, fenchel
assert not {"matplotlib", "typer", "rich", "jinja2"} & set(sys.modules)
import fenchel.cli
fenchel.cli.studies.studies()
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)

"""The command line: what it says, what it writes, what it returns."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fenchel
from fenchel_lab import bench, cli, data
from fenchel_lab.bench import Case, Contestant, Goal, Target, Workload, targets
from fenchel_lab.report import Context, Result, Study, Table, registry, studies

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
    known["echo"] = Study("echo", "An echo", "Somebody (2020)", 2, echo, data=("mnist",), full="The echo is louder.")
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
    for words in (
        "instead of softmax",
        "fenchel tour",
        "fenchel study list",
        "fenchel study run paths",
        "fenchel bench",
    ):
        assert words in text


def test_version_is_the_packages() -> None:
    assert run("--version") == (0, f"fenchel {metadata.version('fenchel')}")


def test_list_shows_every_study_and_its_paper(registered: dict[str, Study]) -> None:
    code, text = run("study", "list")
    assert code == 0
    assert "broken A broken study Nobody echo An echo Somebody (2020)" in text


def test_run_saves_where_it_is_told(registered: dict[str, Study], tmp_path: Path) -> None:
    folder, out = tmp_path / "data", tmp_path / "out"
    folder.mkdir()
    code, text = run("study", "run", "echo", "--data", str(folder), "--seed", "7", "--out", str(out), "--full")
    assert code == 0
    assert "Echoed [text]." in text
    assert "What was asked" in text
    record = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert record["tables"][0]["rows"] == [[7, str(folder), "True"]]
    assert record["command"] == "FENCHEL_DATA=… fenchel study run echo --seed 7 --full"


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


def test_a_study_refuses_options_that_would_change_nothing(
    registered: dict[str, Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", str(tmp_path / "out"))
    assert run("study", "run", "broken", "--data", str(tmp_path), *out) == (
        2,
        "broken reads no data: leave --data out.",
    )
    code, text = run("study", "run", "broken", "--full", *out)
    assert (code, text) == (2, "broken has one protocol, and always follows it: leave --full out.")
    code, text = run("study", "run", "broken", "--checkpoints", str(tmp_path / "kept"), *out)
    assert (code, text) == (2, "broken writes no checkpoints: leave --checkpoints out.")
    code, text = run("study", "run", "echo", "--full", *out)
    assert (code, text) == (2, "echo needs data for --full (mnist): give --data, or FENCHEL_DATA.")
    registered["plain"] = replace(registered["echo"], name="plain", data=())
    monkeypatch.setenv("FENCHEL_DATA", str(tmp_path))  # meant for others: no reason to refuse
    assert run("study", "run", "plain", *out)[0] == 0
    assert (
        json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))["tables"][0]["rows"][0][1] == "None"
    )


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


def test_missing_data_is_told_without_a_traceback(registered: dict[str, Study], tmp_path: Path) -> None:
    def reader(context: Context) -> Result:
        data.mnist.load("test", context.data)
        return Result("")

    registered["reader"] = replace(registered["echo"], name="reader", function=reader)
    code, text = run("study", "run", "reader", "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 2
    assert "t10k-images-idx3-ubyte" in text
    assert "fenchel data fetch mnist" in text
    assert "Traceback" not in text


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


def test_the_tour_ends_with_its_page_and_what_to_try_next(registered: dict[str, Study], tmp_path: Path) -> None:
    del registered["broken"]
    text = run("tour", "--out", str(tmp_path))[1]
    assert "1 of 1 chapters" in text
    wrote, suggested = text[text.index("Wrote ") :].split("Three things to try next:")
    assert wrote.split()[1] == f"{tmp_path / 'index.html'}:"
    for command in ("python -c ", "fenchel study run ", "fenchel inflect --help"):
        assert command in suggested


def test_the_tour_leaves_out_what_is_not_part_of_it(registered: dict[str, Study], tmp_path: Path) -> None:
    registered["broken"] = replace(registered["broken"], tour=False)
    assert run("tour", "--out", str(tmp_path))[0] == 0
    assert "A broken study" not in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "A broken study" in run("study", "list")[1]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data, and a cache, empty too."""
    monkeypatch.setenv("FENCHEL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FENCHEL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_data_list_counts_what_is_here(folders: Path) -> None:
    code, text = run("data", "list")
    assert code == 0
    assert all(name in text for name in data.SETS)
    assert "of 4" not in text
    (folders / "data" / "mnist").mkdir(parents=True)
    (folders / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    assert "1 of 4" in run("data", "list")[1]


def test_data_where_tells_folders_and_files(folders: Path) -> None:
    assert run("data", "where") == (0, f"{folders / 'data'} {folders / 'cache'}")
    code, text = run("data", "where", "mnist")
    assert code == 2
    assert "fenchel data fetch mnist" in text
    file = folders / "cache" / "mnist" / "train-labels-idx1-ubyte.gz"
    file.parent.mkdir(parents=True)
    file.touch()
    assert run("data", "where", "mnist") == (0, str(file))
    assert run("data", "where", "minst") == (
        2,
        f"There is no data set called 'minst'. Data sets: {', '.join(data.SETS)}.",
    )


def test_data_fetch_keeps_what_it_gets_and_says_what_it_cannot(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = folders / "there"
    there.write_bytes(b"content")
    known = data.DataSet("small", "A small set", "do as you like", [data.Source("file", there.as_uri())])
    lost = data.DataSet("lost", "A lost set", "", [data.Source("file", (folders / "absent").as_uri())])
    monkeypatch.setattr(data, "SETS", {"small": known, "lost": lost})
    code, text = run("data", "fetch", "small")
    assert code == 0
    assert f"Fetched 1 files into {folders / 'cache' / 'small'}. Terms: do as you like." in text
    assert (folders / "cache" / "small" / "file").read_bytes() == b"content"
    assert "Nothing to fetch" in run("data", "fetch", "small")[1]
    code, text = run("data", "fetch", "lost")
    assert code == 2
    assert f"could not download {(folders / 'absent').as_uri()}" in text


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, Workload]:
    """Two small workloads in place of the real ones, and no kernels to compile."""

    def scores() -> tuple[Tensor, ...]:
        return (torch.ones(2, 3),)

    def broken(scores: Tensor) -> Tensor:
        raise RuntimeError("out of luck")

    torchs = Contestant("torch", lambda s: s.softmax(-1))
    ours = Contestant("ours [1]", lambda s: s.softmax(-1) * 1)
    absent = Contestant("peer", None, "peer is not installed: pip install 'fenchel-lab[bench]'")
    goals = [Goal("ours [1]", 1e9, "torch"), Goal("ours [1]", 1e-9, "torch", "largest"), Goal("ours [1]", 0.01, "peer")]
    known = {
        "maps": Workload("maps", "maps [of rows]", [torchs, ours, absent], [Case("2 × 3", scores)], goals),
        "loss": Workload("loss", "losses", [torchs, ours, absent], [Case("2 × 3", scores)], []),
        "alone": Workload("alone", "nobody else", [torchs, absent], [Case("2 × 3", scores)], []),
        "broken": Workload("broken", "bad", [torchs, Contestant("b", broken)], [Case("2 × 3", scores)], []),
    }
    monkeypatch.setattr(sys.modules["fenchel_lab.bench.workloads"], "workloads", lambda: list(known.values()))
    monkeypatch.setattr(fenchel, "warmup", lambda progress: "Compiled 3 kernels [all].")
    monkeypatch.setattr(targets, "own_target", lambda: Target("AVX2 (abacus)"))
    monkeypatch.delenv("FENCHEL_KERNELS", raising=False)
    return known


def test_bench_shows_ratios_and_goals_and_saves_them(tiny: dict[str, Workload], tmp_path: Path) -> None:
    code, text = run("bench", "maps", "loss", "--seconds", "0.001", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "maps: maps [of rows]; AVX2 (abacus)" in text
    assert "loss: losses; AVX2 (abacus)" in text
    assert "This machine has no AVX-512: figures for AVX-512 are missing." in text
    assert "✓ ours [1], geometric mean:" in text
    assert "✗ ours [1], largest:" in text
    assert "– ours [1], geometric mean: ≥ 100 × as fast as peer (not measured)" in text
    assert text.count("peer is not installed: pip install 'fenchel-lab[bench]'") == 1
    assert "torch thread" in text
    assert "Kernels are off" not in text
    record = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in record["workloads"]] == ["maps", "loss"]
    assert record["seconds_each"] == 0.001
    assert record["workloads"][0]["cases"][0]["contestants"]["ours [1]"]["runs"] >= 3
    assert "### maps: maps [of rows]" in (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")


def test_bench_lists_workloads_and_their_goals(tiny: dict[str, Workload], tmp_path: Path) -> None:
    code, text = run("bench", "--list", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "maps maps [of rows] ours [1], geometric mean: ≤ 1e+09 × torch" in text
    assert "loss losses" in text
    assert not (tmp_path / "out").exists()


def test_bench_tells_that_kernels_are_off(
    tiny: dict[str, Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCHEL_KERNELS", "off")
    code, text = run("bench", "maps", "--seconds", "0", "--out", str(tmp_path))
    assert code == 0
    assert "Kernels are off (FENCHEL_KERNELS=off)." in text
    assert "Kernels are off" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_bench_skips_a_workload_without_rivals_and_says_why(tiny: dict[str, Workload], tmp_path: Path) -> None:
    code, text = run("bench", "alone", "--seconds", "0", "--out", str(tmp_path))
    assert code == 0
    assert "peer is not installed" in text
    assert "alone: nobody else" not in text


def test_bench_writes_the_figures_into_a_page(tiny: dict[str, Workload], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n", encoding="utf-8")
    code, _ = run("bench", "maps", "--seconds", "0", "--out", str(tmp_path / "out"), "--readme", str(page))
    assert code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{bench.BEGIN}\n| | against | AVX2 (abacus) |\n")
    assert text.endswith(f"\n{bench.END}\nafter\n")
    assert "old" not in text


def test_bench_keeps_the_figures_of_an_earlier_run(tiny: dict[str, Workload], tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text(f"{bench.BEGIN}{bench.END}", encoding="utf-8")
    options = ("--seconds", "0", "--out", str(out), "--readme", str(page))
    code, text = run("bench", "loss", "--keep", *options)
    assert code == 2
    assert "there is no earlier benchmark" in text
    run("bench", "maps", *options)
    record = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    record["machine"]["date"] = "2020-01-02T03:04:05+00:00"
    (out / "bench.json").write_text(json.dumps(record), encoding="utf-8")
    code, _ = run("bench", "loss", "--keep", *options)
    assert code == 0
    kept = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in kept["workloads"]] == ["maps", "loss"]
    assert kept["workloads"][0] == record["workloads"][0]
    text = page.read_text(encoding="utf-8")
    assert "| maps: ours" in text
    assert "; 2020-01-02 to 20" in text
    kept["machine"]["cpu"] = "another"
    (out / "bench.json").write_text(json.dumps(kept), encoding="utf-8")
    code, text = run("bench", "loss", "--keep", *options)
    assert code == 2
    assert "--keep needs the same machine and versions" in text


def test_bench_refuses_five_rows_of_some_workloads_before_it_measures(
    tiny: dict[str, Workload], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{bench.SHORT}{bench.END}", encoding="utf-8")
    code, text = run("bench", "maps", "--out", str(tmp_path / "out"), "--readme", str(page))
    assert code == 2
    assert "page.md shows five rows; they need the workloads attention, linear, loss, tagging too" in text


def test_bench_refuses_a_page_without_marks_before_it_measures(tiny: dict[str, Workload], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for content, words in ((None, "No such file"), ("no marks", "must hold the marks")):
        if content:
            page.write_text(content, encoding="utf-8")
        code, text = run("bench", "broken", "--out", str(tmp_path / "out"), "--readme", str(page))
        assert code == 2
        assert words in text
    assert page.read_text(encoding="utf-8") == "no marks"


def test_an_unknown_workload_exits_2_with_suggestions(tiny: dict[str, Workload]) -> None:
    code, text = run("bench", "map")
    assert code == 2
    assert text == "There is no workload called 'map'. Did you mean maps? Workloads: maps, loss, alone, broken."


def test_bench_survives_a_failing_workload(tiny: dict[str, Workload], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{bench.BEGIN}{bench.END}", encoding="utf-8")
    code, text = run("bench", "broken", "maps", "--seconds", "0", "--out", str(tmp_path / "out"), "--readme", str(page))
    assert code == 1
    assert "broken, AVX2 (abacus) failed" in text
    assert "RuntimeError: out of luck" in text
    record = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in record["workloads"]] == ["maps"]
    assert page.read_text(encoding="utf-8") == f"{bench.BEGIN}{bench.END}"  # half a table would mislead


def test_bench_refuses_a_target_that_is_not_known(tiny: dict[str, Workload], tmp_path: Path) -> None:
    code, text = run("bench", "maps", "--target", "avx1", "--out", str(tmp_path / "out"))
    assert (code, text) == (2, "--target must be both, own or avx2, got 'avx1'")
    assert not (tmp_path / "out").exists()


def test_warmup_tells_what_it_did(tiny: dict[str, Workload]) -> None:
    code, text = run("warmup")
    assert code == 0
    assert "Compiled 3 kernels [all]." in text


def test_the_library_does_not_pull_in_the_studies_and_these_not_pyplot() -> None:
    code = """
import sys, fenchel
assert not {"matplotlib", "typer", "rich", "jinja2"} & set(sys.modules)
import fenchel_lab.cli
fenchel_lab.cli.report.studies()
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRITERS = {
    "study": ("study", "run", "echo", "--out"),
    "tour": ("tour", "--out"),
    "bench": ("bench", "maps", "--seconds", "0", "--out"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "name", ["figure-1.png", "table-7.csv", "result.json", "index.html", "bench.json", "notes.txt"]
)
def test_a_folder_with_files_of_its_user_is_left_alone_unless_forced(
    writer: str, name: str, registered: dict[str, Study], tiny: dict[str, Workload], tmp_path: Path
) -> None:
    del registered["broken"]
    (tmp_path / name).write_text('{"study": "mine"}', encoding="utf-8")
    before = contents(tmp_path)
    code, text = run(*WRITERS[writer], str(tmp_path))
    assert code == 2
    assert f"such as {name}: choose another folder, or add --force" in text
    assert "Traceback" not in text
    assert contents(tmp_path) == before
    assert run(*WRITERS[writer], str(tmp_path), "--force")[0] == 0
    own = {"study": "result.json", "tour": "index.html", "bench": "bench.json"}[writer]
    assert own in contents(tmp_path)
    if name != own:
        assert contents(tmp_path)[name] == before[name]  # forced to write, not to remove


def test_a_study_removes_only_what_its_record_lists(registered: dict[str, Study], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("study", "run", "echo", "--out", str(out))[0] == 0
    record = json.loads((out / "result.json").read_text(encoding="utf-8"))
    (out / "table-2.csv").touch()
    (tmp_path / "precious.txt").write_text("mine", encoding="utf-8")
    record["tables"] += [{"file": "table-2.csv"}, {"file": "../precious.txt"}, {"file": 3}]
    (out / "result.json").write_text(json.dumps(record), encoding="utf-8")
    assert run("study", "run", "echo", "--out", str(out))[0] == 0
    assert set(contents(out)) == {"result.json", "table-1.csv"}
    assert (tmp_path / "precious.txt").read_text(encoding="utf-8") == "mine"
    registered["other"] = replace(registered["echo"], name="other")
    code, text = run("study", "run", "other", "--out", str(out))
    assert (code, "did not write" in text) == (2, True)
    assert run("study", "run", "other", "--out", str(out), "--force")[0] == 0


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    writer: str,
    registered: dict[str, Study],
    tiny: dict[str, Workload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked = []
    monkeypatch.setattr(cli.report, "run", lambda *_: worked.append("study"))
    monkeypatch.setattr(cli.bench, "run_for", lambda *_: worked.append("bench"))
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    below = tmp_path / "taken" / "below"
    assert run(*WRITERS[writer], str(below)) == (2, f"{below} cannot be written: Not a directory")
    taken = below.parent
    assert run(*WRITERS[writer], str(taken)) == (2, f"{taken} cannot be written: Is a file and not a folder")
    assert not worked


def test_data_are_not_downloaded_where_they_cannot_be_kept(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "fetch", lambda *_: pytest.fail("nothing should be fetched"))
    (folders / "taken").write_text("a file", encoding="utf-8")
    code, text = run("data", "fetch", "mnist", "--into", str(folders / "taken"))
    assert (code, text) == (2, f"{folders / 'taken' / 'mnist'} cannot be written: Not a directory")


def test_an_interrupted_tour_keeps_the_chapters_that_are_done(registered: dict[str, Study], tmp_path: Path) -> None:
    def interrupted(context: Context) -> Result:
        raise KeyboardInterrupt

    registered["slow"] = replace(registered["echo"], name="slow", order=3, function=interrupted)
    code, text = run("tour", "--out", str(tmp_path / "out"))
    assert code == 130
    assert "Interrupted. 2 of 3 chapters are done." in text
    assert "Traceback (most recent call last): File" not in text.split("broken failed")[0]
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Echoed [text]." in page
    assert "The tour was interrupted: 2 of 3 chapters are here." in page
    registered["slow"] = replace(registered["slow"], order=0)
    assert run("tour", "--out", str(tmp_path / "none"))[0] == 130
    assert not (tmp_path / "none").exists()  # there is nothing to show
    code, text = run("study", "run", "slow", "--out", str(tmp_path / "none"))
    assert (code, "slow was not done" in text) == (130, True)
    assert not (tmp_path / "none").exists()
    del registered["slow"]
    run("tour", "--out", str(tmp_path / "out"))
    assert "interrupted" not in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_an_interrupted_benchmark_keeps_what_was_measured(
    tiny: dict[str, Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = bench.run_for

    def interrupted(workload: Workload, *options: Any) -> Any:
        if workload.name == "loss":
            raise KeyboardInterrupt
        return measure(workload, *options)

    monkeypatch.setattr(cli.bench, "run_for", interrupted)
    code, text = run("bench", "maps", "loss", "--seconds", "0", "--out", str(tmp_path))
    assert code == 130
    assert f"1 of 2 workloads are done; what was measured before is in {tmp_path}." in text
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in record["workloads"]] == ["maps"]

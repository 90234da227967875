"""`fenchel inflect`: trains, resumes, predicts, draws; and says what is wrong with a table, and where."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fenchel import cli
from fenchel.seq2seq import Seq2Seq

runner = CliRunner()
TABLE = "".join(f"{word}\t{word}s\tN;PL\n{word}\t{word}\tN;SG\n" for word in ("dog", "cat", "cow", "hen", "pig", "bee"))


def run(*words: str) -> tuple[int, str, str]:
    result = runner.invoke(cli.app, ["inflect", *words])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inflect")
    (folder / "words.tsv").write_text(TABLE, encoding="utf-8")
    options = ["--hidden", "16", "--epochs", "3", "--batch", "4", "--validation", str(folder / "words.tsv")]
    code, text, errors = run("train", str(folder / "words.tsv"), "--out", str(folder / "model"), *options)
    assert code == 0, errors
    assert "of 12 held-out forms right" in " ".join(text.split())
    return folder / "model"


def test_the_same_command_again_has_nothing_left_to_do(model: Path) -> None:
    words = str(model.parent / "words.tsv")
    options = ["--hidden", "16", "--epochs", "3", "--batch", "4", "--validation", words]
    before = (model / "model.safetensors").read_bytes()
    assert run("train", words, "--out", str(model), *options)[0] == 0
    assert (model / "model.safetensors").read_bytes() == before
    code, _, errors = run("train", words, "--out", str(model), "--hidden", "32", *options[2:])
    assert code == 2
    assert "the checkpoint of another run" in errors


def test_predictions_are_a_table_with_probabilities(model: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.tsv"
    asked.write_text("dog\tN;PL\n\nhen\tN;SG\r\n", encoding="utf-8")
    code, text, errors = run("predict", str(asked), "--model", str(model))
    assert code == 0
    rows = [line.split("\t") for line in text.splitlines()]
    assert [(row[0], row[2]) for row in rows] == [("dog", "N;PL"), ("hen", "N;SG")]
    assert all(0 <= float(row[3]) <= 1 and row[4] in ("exact", "best", "") for row in rows)
    assert not errors


def test_forms_that_are_known_are_counted_and_strangers_told(model: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.tsv"
    asked.write_text("dög\tdögs\tN;PL\n", encoding="utf-8")
    code, text, errors = run("predict", str(asked), "--model", str(model), "--model", str(model), "--n-best", "2")
    assert code == 0
    assert 1 <= len(text.splitlines()) <= 2
    assert errors == "Never seen in training, read as unknown: ö 0 of 1 right, 0.0%."


def test_explain_draws_three_pictures(model: Path, tmp_path: Path) -> None:
    code, text, errors = run("explain", "cow", "N;PL", "--model", str(model), "--out", str(tmp_path), "--form", "cows")
    assert code == 0, errors
    assert "%" in text
    for name in ("tree", "attention", "alternatives"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_transformer_trains_too(tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text(TABLE, encoding="utf-8")
    options = ["--kind", "transformer", "--hidden", "8", "--epochs", "1", "--alpha", "2"]
    code, text, _ = run("train", str(tmp_path / "words.tsv"), "--out", str(tmp_path / "model"), *options)
    assert code == 0
    assert "of 1 held-out forms" in " ".join(text.split())
    assert type(Seq2Seq.load(tmp_path / "model")).__name__ == "Transformer"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dog\tdogs\tN;PL\ndog\tdogs\n", "line 2: 2 columns between tabs, not lemma, form, tags: 'dog\\tdogs'"),
        ("\n\n\tdogs\tN;PL\n", "line 3: the lemma must not be empty"),
        ("dog\t\tN;PL\n", "line 1: the form must not be empty"),
        ("dog\tdogs\tN;;PL\n", "line 1: a tag must not be empty: 'N;;PL'"),
        ("", "has no lines"),
        ("dog\tdogs\tN;PL\n", "at least two inflections"),
    ],
)
def test_a_bad_table_is_refused_with_the_number_of_the_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text(text, encoding="utf-8")
    code, _, errors = run("train", str(tmp_path / "words.tsv"), "--out", str(tmp_path / "model"))
    assert code == 2
    assert words in errors
    assert "Traceback" not in errors


def test_files_and_folders_that_are_not_there_are_told(model: Path, tmp_path: Path) -> None:
    assert "cannot be read" in run("predict", str(tmp_path / "absent"), "--model", str(model))[2]
    (tmp_path / "latin").write_bytes(b"\xe4\tx\n")
    assert "cannot be read" in run("predict", str(tmp_path / "latin"), "--model", str(model))[2]
    assert "no model.json" in run("explain", "dog", "N;PL", "--model", str(tmp_path))[2]
    code, _, errors = run("explain", "", "N;PL", "--model", str(model))
    assert (code, errors) == (2, "LEMMA TAGS, line 1: the lemma must not be empty: '\\tN;PL'")

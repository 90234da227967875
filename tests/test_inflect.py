"""`fenchel inflect`: trains, resumes, predicts, draws; and says what is wrong with a table, and where."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fenchel import cli, inflect
from fenchel.seq2seq import UNKNOWN, Beam, Choice, Hypothesis, Inflected, Seq2Seq, Stepper, force

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


def test_explain_tells_what_was_never_seen_and_claims_no_more_than_is_proved(model: Path, tmp_path: Path) -> None:
    code, text, errors = run("explain", "cöw", "DU", "--model", str(model), "--out", str(tmp_path), "--form", "cößs")
    assert code == 0
    assert errors == "Never seen in training, read as unknown: DU ö ß"
    others = ("There are others, none more probable than the first.", "There are others.")
    assert text.splitlines()[-2] in ("All forms of any probability.", *others)


def test_only_the_first_of_several_forms_is_called_the_best(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pruned(*_: object, **options: object) -> list[Inflected]:
        beam = Beam((Hypothesis((2,), -0.7, -0.7),), exact=False, optimal=True, seen=2, mass=0.6)
        return [Inflected((("a", 0.5), ("b", 0.1)), beam)]

    monkeypatch.setattr(inflect, "inflect", pruned)
    (tmp_path / "asked.tsv").write_text("dog\tN;PL\n", encoding="utf-8")
    _, text, _ = run("predict", str(tmp_path / "asked.tsv"), "--model", str(model), "--n-best", "3")
    assert text == "dog\ta\tN;PL\t0.5000\tbest\ndog\tb\tN;PL\t0.1000\t\n"


def test_explain_follows_an_unknown_letter_that_the_model_writes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []

    def unknowing(*_: object, **options: object) -> list[Inflected]:
        beam = Beam((Hypothesis((UNKNOWN, 2), 0.0, 0.0),), exact=True, optimal=True, seen=1, mass=1.0)
        return [Inflected((("<unk>d", 1.0),), beam)]

    def follow(stepper: Stepper, source: tuple[str, ...], tokens: list[int]) -> list[Choice]:
        followed.append(tuple(tokens))
        return force(stepper, source, tokens)

    monkeypatch.setattr(inflect, "inflect", unknowing)
    monkeypatch.setattr(inflect, "force", follow)
    assert run("explain", "cow", "N;PL", "--model", str(model), "--out", str(tmp_path))[0] == 0
    assert followed == [(UNKNOWN, 2)]


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hidden", "9"], "hidden must be even, got 9"),
        (["--hidden", "10", "--kind", "transformer"], "width must be a multiple of heads, 4, got 10"),
        (["--rate", "0"], "rate must be positive and finite, got 0.0"),
        (["--out", "taken"], "taken"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_line(options: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    options = [str(tmp_path / word) if word == "taken" else word for word in options]
    train = ["train", str(tmp_path / "words.tsv"), "--out", str(tmp_path / "model"), "--hidden", "8", "--epochs", "1"]
    code, _, errors = run(*train, *options)
    assert code == 2
    assert words in errors


def test_a_tag_that_stands_for_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text(TABLE + "ox\toxen\tunk\n" * 20, encoding="utf-8")
    code, _, errors = run("train", str(tmp_path / "words.tsv"), "--out", str(tmp_path / "model"))
    assert code == 2
    assert "none of </s>, <unk>" in errors


def test_files_and_folders_that_are_not_there_are_told(model: Path, tmp_path: Path) -> None:
    assert "cannot be read" in run("predict", str(tmp_path / "absent"), "--model", str(model))[2]
    (tmp_path / "latin").write_bytes(b"\xe4\tx\n")
    assert "cannot be read" in run("predict", str(tmp_path / "latin"), "--model", str(model))[2]
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    asked = ["explain", "dog", "N;PL", "--model", str(model)]
    assert run(*asked, "--out", str(tmp_path / "taken"))[0] == 2
    assert "no model.json" in run("explain", "dog", "N;PL", "--model", str(tmp_path))[2]
    code, _, errors = run("explain", "", "N;PL", "--model", str(model))
    assert (code, errors) == (2, "LEMMA TAGS, line 1: the lemma must not be empty: '\\tN;PL'")

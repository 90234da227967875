"""`fenchel inflect`: trains, resumes, predicts, draws; and says what is wrong with a table, and where."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fenchel.seq2seq import STOP, UNKNOWN, Beam, Choice, Hypothesis, Seq2Seq, Stepper, force, training
from fenchel_lab import cli, inflect
from fenchel_lab.models.inflection import Inflected, spelled

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
        (["--hidden", "10", "--kind", "transformer"], "width must be a multiple of num_heads, 4, got 10"),
        (["--rate", "0"], "rate must satisfy 0 < rate < inf, got 0.0"),
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


SMALL = ("--hidden", "8", "--epochs", "3", "--batch", "4")


def test_a_lemma_with_a_tab_or_a_line_break_is_refused(model: Path, tmp_path: Path) -> None:
    for lemma, tags in (("cow\tcows", "N;PL"), ("cow", "cows\tN;PL"), ("cow\nhen", "N;PL"), ("cow", "N;PL\n\nhen\tN")):
        code, text, errors = run("explain", lemma, tags, "--model", str(model), "--out", str(tmp_path))
        assert code == 2
        assert "must not have tabs or line breaks" in errors
        assert not text
    for form in ("co\tws", "cows\r", "co\nws"):
        code, text, errors = run(
            "explain", "cow", "N;PL", "--form", form, "--model", str(model), "--out", str(tmp_path)
        )
        assert (code, text) == (2, "")
        assert "--form must not have tabs or line breaks" in errors
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("strange", ["x" * 201, "co\udcffw"])  # the second: bytes that are not UTF-8
def test_what_cannot_be_drawn_is_refused_before_the_search(strange: str, model: Path, tmp_path: Path) -> None:
    out = ("--model", str(model), "--out", str(tmp_path))
    for name, words in (
        ("LEMMA", (strange, "N;PL")),
        ("TAGS", ("cow", strange)),
        ("--form", ("cow", "N;PL", "--form", strange)),
    ):
        code, text, errors = run("explain", *words, *out)
        assert (code, text, errors.count("\n")) == (2, "", 0)
        assert errors.startswith(f"{name} must be text of at most 200 characters, got {len(strange)}")
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def endless(model: Path) -> Path:
    """A model that never ends a form."""
    changed = Seq2Seq.load(model)
    with torch.no_grad():
        changed.output.bias[STOP] = -1e4
        changed.output.bias[UNKNOWN] = -1e4
    changed.save(model.parent / "endless")
    return model.parent / "endless"


def test_a_form_that_was_cut_is_marked_and_never_right(endless: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.tsv"
    asked.write_text("dog\tN;PL\n", encoding="utf-8")
    code, text, _ = run("predict", str(asked), "--beam", "1", "--model", str(endless))
    assert code == 0
    (row,) = (line.split("\t") for line in text.splitlines())
    assert row[4] == "cut"
    assert row[1].endswith("…")
    assert len(row[1]) == 61
    asked.write_text(f"dog\t{row[1][:-1]}\tN;PL\n", encoding="utf-8")  # the letters that were cut, as if they were all
    assert "0 of 1 right" in run("predict", str(asked), "--beam", "1", "--model", str(endless))[2]
    code, text, errors = run("explain", "dog", "N;PL", "--beam", "1", "--model", str(endless), "--out", str(tmp_path))
    assert code == 0, errors
    assert f"{row[1]} (cut at 60 letters, before its end)" in " ".join(text.split())


def test_predictions_are_written_as_lines_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflect, "WINDOW", 4)
    asked, answer = tmp_path / "asked.tsv", inflect.inflect
    lines = [f"{word}\tN;{tag}\n" for word in ("dog", "cöw", "hen", "böß") for tag in ("PL", "SG", "DU")]
    asked.write_text("\ufeff" + "".join(lines), encoding="utf-8")
    counts: list[int] = []

    def counted(model: Seq2Seq, sources: list[tuple[str, ...]], *rest: Any, **options: Any) -> list[Inflected]:
        counts.append(len(sources))
        return answer(model, sources, *rest, **options)

    monkeypatch.setattr(inflect, "inflect", counted)
    code, text, errors = run("predict", str(asked), "--model", str(model), "--beam", "2")
    assert code == 0
    assert counts == [4, 4, 4]
    assert [line.split("\t")[0] for line in text.splitlines()] == [line.split("\t")[0] for line in lines]
    told = "Never seen in training, read as unknown: "
    assert errors == f"{told}DU ö {told}ß"  # each once, when it is met
    result = runner.invoke(
        cli.app, ["inflect", "predict", "-", "--model", str(model), "--beam", "2"], input="".join(lines).encode()
    )
    assert (result.exit_code, result.stdout) == (0, text)
    for end, words in (("dog\n", "line 13: 1 columns"), (b"\xe4\tN\n", "cannot be read")):
        asked.write_bytes("".join(lines).encode() + (end.encode() if isinstance(end, str) else end))
        code, before, errors = run("predict", str(asked), "--model", str(model), "--beam", "2")
        assert code == 2
        assert words in errors
        assert text.startswith(before)
        assert len(before.splitlines()) >= 4  # what was answered before stays


@pytest.mark.parametrize("rate", ["3e37", "1e300"])
def test_a_training_that_diverges_stops_and_saves_nothing(rate: str, tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text(TABLE, encoding="utf-8")
    code, _, errors = run(
        "train", str(tmp_path / "words.tsv"), "--out", str(tmp_path / "model"), *SMALL, "--rate", rate
    )
    assert code == 1
    assert "so training stopped" in errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "model").iterdir())


@pytest.mark.parametrize("rate", ["inf", "nan", "-1", "-inf"])
def test_rates_that_are_none_are_refused(rate: str, tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text(TABLE, encoding="utf-8")
    code, _, errors = run("train", str(tmp_path / "words.tsv"), "--out", str(tmp_path / "model"), f"--rate={rate}")
    assert (code, errors) == (2, f"rate must satisfy 0 < rate < inf, got {float(rate)}")


def test_a_training_that_was_interrupted_goes_on_to_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.tsv").write_text(TABLE, encoding="utf-8")
    train = ("train", str(tmp_path / "words.tsv"), *SMALL, "--out")
    assert run(*train, str(tmp_path / "straight"))[0] == 0
    with monkeypatch.context() as patch:
        count, epoch = iter(range(9)), training._epoch

        def interrupted(*rest: Any) -> Any:
            if next(count) == 2:
                raise KeyboardInterrupt
            return epoch(*rest)

        patch.setattr(training, "_epoch", interrupted)
        code, _, errors = run(*train, str(tmp_path / "model"))
    assert code == 130
    assert "The same command goes on" in errors
    assert run(*train, str(tmp_path / "model"))[0] == 0
    for name in ("model.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_folder_with_another_model_or_files_of_its_user_is_left_alone_unless_forced(
    endless: Path, tmp_path: Path
) -> None:
    (tmp_path / "words.tsv").write_text(TABLE, encoding="utf-8")
    out = tmp_path / "model"
    train = ("train", str(tmp_path / "words.tsv"), "--out", str(out), *SMALL[:2], "--epochs", "1")
    out.mkdir()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    assert "did not write, such as notes.txt" in run(*train)[2]
    (out / "notes.txt").unlink()
    for name in ("model.json", "model.safetensors"):  # a model that was saved, not trained here
        (out / name).write_bytes((endless / name).read_bytes())
    code, _, errors = run(*train)
    assert code == 2
    assert "did not write, such as model.json" in errors
    assert (out / "model.safetensors").read_bytes() == (endless / "model.safetensors").read_bytes()
    assert run(*train, "--force")[0] == 0
    assert (out / "model.safetensors").read_bytes() != (endless / "model.safetensors").read_bytes()
    assert run(*train)[0] == 0  # its own: there is nothing left to do
    assert "the checkpoint of another run" in run(*train, "--seed", "3")[2]
    assert run(*train, "--seed", "3", "--force")[0] == 0


def test_drawings_of_others_are_not_overwritten(model: Path, tmp_path: Path) -> None:
    explain = ("explain", "cow", "N;PL", "--model", str(model), "--out", str(tmp_path))
    (tmp_path / "tree.png").write_bytes(b"a photograph of a tree")
    (tmp_path / "notes.txt").touch()
    code, text, errors = run(*explain)
    assert code == 2
    assert "tree.png was not written by `fenchel inflect explain`" in errors
    assert not text
    assert run(*explain, "--force")[0] == 0
    assert run(*explain)[0] == 0  # its own


def test_a_model_that_was_tampered_with_is_told_in_one_line(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    settings = json.loads((broken / "model.json").read_text(encoding="utf-8"))
    (tmp_path / "asked.tsv").write_text("dog\tN;PL\n", encoding="utf-8")
    for change in ({"model": ["Recurrent"]}, {"sizes": {**settings["sizes"], "layers": 10**9}}, {"output": [[]]}):
        (broken / "model.json").write_text(json.dumps({**settings, **change}), encoding="utf-8")
        for words in (["predict", str(tmp_path / "asked.tsv")], ["explain", "dog", "N;PL", "--out", str(tmp_path)]):
            result = runner.invoke(cli.app, ["inflect", *words, "--model", str(broken)])
            assert result.exit_code == 2
            assert str(broken) in result.stderr
            assert result.stderr.count("\n") == 1


def test_tags_are_a_sequence_of_tags() -> None:
    with pytest.raises(TypeError, match=r"tags must be a sequence of tags, such as \['N', 'PL'\], got 'N;PL'"):
        spelled("dog", "N;PL")

"""`fenchel rationale`: trains on a table or on objects, writes a page; says what is wrong with a file, and where."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fenchel import seq2seq
from fenchel_lab import cli
from fenchel_lab.models import rationale
from fenchel_lab.models.rationale import Rationalizer

runner = CliRunner()
TEXTS = [
    (label, f"{first} {word} {last}.")
    for label, words in (("good", ["fine", "lovely", "great"]), ("bad", ["dull", "poor", "tedious"]))
    for word in words
    for first in ("A", "Such a", "It is a")
    for last in ("film", "story, I’d say")
]
SMALL = ("--hidden", "4", "--epochs", "2")


def run(*words: str) -> tuple[int, str]:
    """Exit code and all that was printed, unwrapped."""
    result = runner.invoke(cli.app, ["rationale", *words])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rationale")
    (folder / "texts.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in TEXTS), encoding="utf-8")
    code, text = run("train", str(folder / "texts.tsv"), "--out", str(folder / "model"), *SMALL)
    assert code == 0, text
    assert "on 3 held-out texts" in text
    assert f"Saved to {folder / 'model'}." in text
    return folder / "model"


def test_objects_give_the_model_that_a_table_gives(model: Path, tmp_path: Path) -> None:
    objects = "".join(json.dumps({"text": text, "label": label}) + "\n" for label, text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(objects, encoding="utf-8")
    code, text = run("train", str(tmp_path / "texts.jsonl"), "--out", str(tmp_path / "model"), *SMALL)
    assert code == 0, text
    for name in ("model.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (model / name).read_bytes()


def test_selections_vectors_and_files_to_validate_with_are_the_users(tmp_path: Path) -> None:
    table = "".join(f"{label}\t{text}\n" for label, text in TEXTS)
    (tmp_path / "texts.tsv").write_text(table, encoding="utf-8")
    (tmp_path / "vectors.txt").write_text("a 1 0\nfilm 0.5 1\nfine 1 1\ndull -1 1\n", encoding="utf-8")
    options = ["--selection", "k-subsets", "--budget", "2", "--reads", "states", "--longest", "4"]
    options += ["--vectors", str(tmp_path / "vectors.txt"), "--validation", str(tmp_path / "texts.tsv")]
    code, text = run("train", str(tmp_path / "texts.tsv"), "--out", str(tmp_path / "model"), *SMALL, *options)
    assert code == 0, text
    assert f"on {len(TEXTS)} held-out texts" in text
    reader = Rationalizer.load(tmp_path / "model")
    assert (reader.selection.kind, reader.selection.budget, reader.reads) == ("k-subsets", 2, "states")
    assert reader.encoder.vectors.tolist() == [[0, 0], [1, 0], [0.5, 1], [1, 1], [-1, 1]]
    assert reader.vocabulary.longest == 4


def test_explain_writes_a_page_with_every_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("A dull film.\nNobody's <story>, a lovely one\n", encoding="utf-8")
    code, text = run("explain", str(model), str(tmp_path / "new.txt"), "--out", str(tmp_path / "pages" / "new.html"))
    assert code == 0, text
    page = (tmp_path / "pages" / "new.html").read_text(encoding="utf-8")
    assert page.count("<article>") == 2
    assert "<mark" in page
    assert "<story>" not in page
    assert "unknown: nobody, &#x27;s, &lt;, &gt;, one" in page
    assert text.count("“") >= 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 of 0 words in 0 spans"),  # a class, and nothing highlighted
        (" \n ", "0 of 0 words in 0 spans"),
        ("film", "1 of 1 words in 1 spans"),  # shorter than the budget: all of it
        ("qwe zyx", "; unknown: qwe, zyx"),
    ],
)
def test_texts_with_few_words_or_unknown_ones_are_explained(model: Path, tmp_path: Path, text: str, words: str) -> None:
    code, told = run("explain", str(model), "--text", text, "--out", str(tmp_path / "page.html"))
    assert code == 0, told
    assert "good: " in told or "bad: " in told
    assert words in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.tsv", "good\tA fine film.\nbad\tA dull\tfilm.\n", "line 2: 3 columns, not a label, a tab and a text"),
        ("a.tsv", "label\ttext\n\nA fine film.\n", "line 3: a text without a label"),
        ("a.jsonl", '{"text": "A fine film.", "label": "good"}\n{"text": "A dull film."}\n', "line 2: a text without"),
        ("a.jsonl", '{"text": "A fine film.", "label": "good"}\n{"label": "bad"}\n', "line 2: must be an object with"),
        ("a.jsonl", "A fine film.\n", "line 1: not an object"),
        ("a.jsonl", "[" * 100_000, "line 1: not an object"),
        ("a.jsonl", '{"text": "A fine film.", "label": ' + "9" * 5000 + "}", "line 1: not an object"),
        ("a.tsv", "good\tA fine film.\ngood\tA lovely film.\n", "texts with words of two labels"),
        ("a.tsv", "bad\t\ngood\t \n", "texts with words of two labels"),
        ("a.tsv", "", "texts with words of two labels"),
        ("a.csv", "good,A fine film.\n", "must end in one of"),
    ],
)
def test_a_bad_file_is_refused_with_the_number_of_the_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, told = run("train", str(tmp_path / name), "--out", str(tmp_path / "model"), *SMALL)
    assert code == 2
    assert words in told
    assert not (tmp_path / "model").exists()


def test_files_folders_and_options_that_do_not_fit_are_told(model: Path, tmp_path: Path) -> None:
    texts, out = str(model.parent / "texts.tsv"), ("--out", str(tmp_path / "model"))
    assert run("train", str(tmp_path / "absent.tsv"), *out)[0] == 2
    (tmp_path / "latin.tsv").write_bytes(b"bad\tg\xe4hn\n")
    assert "latin.tsv cannot be read" in run("train", str(tmp_path / "latin.tsv"), *out)[1]
    (tmp_path / "other.tsv").write_text("mixed\tA film.\n", encoding="utf-8")
    assert "no text of the label 'mixed'" in run("train", texts, *out, "--validation", str(tmp_path / "other.tsv"))[1]
    assert "kind must be one of" in run("train", texts, *out, "--selection", "argmax")[1]
    assert "budget must be" in run("train", texts, *out, "--budget", "0")[1]
    assert "a whole number" in run("train", texts, *out, "--budget", "2.5")[1]
    assert "a whole number" in run("train", texts, *out, "--budget", "inf")[1]
    assert "rate must satisfy 0 < rate" in run("train", texts, *out, "--rate=-1")[1]
    (tmp_path / "blank.tsv").write_text("good\t \n", encoding="utf-8")
    assert "no text with words" in run("train", texts, *out, "--validation", str(tmp_path / "blank.tsv"))[1]
    (tmp_path / "two.tsv").write_text("good\tA film.\nbad\tA film.\n", encoding="utf-8")
    assert "alone, besides 1 that are held out" in run("train", str(tmp_path / "two.tsv"), *out)[1]
    assert "no model.json" in run("explain", str(tmp_path), "--text", "A film.")[1]
    assert "and not both" in run("explain", str(model), texts, "--text", "A film.")[1]
    (tmp_path / "empty.tsv").write_text("\n", encoding="utf-8")
    assert "has no lines" in run("explain", str(model), str(tmp_path / "empty.tsv"))[1]


def table(folder: Path, labels: Sequence[str] = ()) -> str:
    """A file of texts, whose labels may be told one by one."""
    rows = zip(itertools.cycle(labels or [label for label, _ in TEXTS]), [text for _, text in TEXTS], strict=False)
    (folder / "texts.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in rows), encoding="utf-8")
    return str(folder / "texts.tsv")


def test_a_training_that_was_interrupted_goes_on_to_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", table(tmp_path), "--hidden", "4", "--epochs", "4", "--out")
    assert run(*train, str(tmp_path / "straight"))[0] == 0
    for stop in (1, 2):  # epochs that are whole before it
        with monkeypatch.context() as patch:
            count, judge = itertools.count(), rationale.found

            def interrupted(*rest: Any, count: Any = count, stop: int = stop, judge: Any = judge) -> Any:
                if next(count) == stop:
                    raise KeyboardInterrupt
                return judge(*rest)

            patch.setattr(rationale, "found", interrupted)
            code, text = run(*train, str(tmp_path / "model"))
        assert code == 130
        assert "The same command goes on" in text
    assert Rationalizer.load(tmp_path / "model").labels == ("bad", "good")  # the best so far is there
    code, text = run(*train, str(tmp_path / "model"))
    assert code == 0, text
    for name in ("model.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert run(*train, str(tmp_path / "model")) == (code, text)  # there is nothing left to do
    code, text = run(*train, str(tmp_path / "model"), "--rate", "0.1")
    assert code == 2
    assert "the checkpoint of another run: its training has rate 0.003, this one 0.1" in text
    assert run(*train, str(tmp_path / "model"), "--rate", "0.1", "--force")[0] == 0


@pytest.mark.parametrize("other", ["model.json", "model.safetensors", "notes.txt", "Recurrent"])
def test_a_folder_with_another_model_or_files_of_its_user_is_left_alone_unless_forced(
    other: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if other == "Recurrent":
        letters = seq2seq.Vocabulary("ab")
        pairs = [seq2seq.Pair(("a",), ("b",))]
        how = seq2seq.Training(epochs=1)
        small = seq2seq.Recurrent(letters, letters, embedding=2, hidden=2, layers=1)
        seq2seq.train(small, pairs, pairs, training=how, folder=out)
    else:
        out.mkdir()
        (out / other).write_text("mine", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    train = ("train", table(tmp_path), "--out", str(out), "--hidden", "4", "--epochs", "1")
    code, text = run(*train)
    assert code == 2
    assert "`fenchel rationale train` did not write" in text
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert run(*train, "--force")[0] == 0
    assert Rationalizer.load(out).labels == ("bad", "good")


def test_where_a_model_goes_is_tried_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rationale, "trained", lambda *_: pytest.fail("nothing should be trained"))
    (tmp_path / "taken").touch()
    below = tmp_path / "taken" / "model"
    code, text = run("train", table(tmp_path), "--out", str(below), *SMALL)
    assert (code, text) == (2, f"{below} cannot be written: Not a directory")


def test_labels_that_are_numbers_are_told_and_refused_if_they_are_many(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "model"), "--hidden", "4", "--epochs", "1")
    code, text = run("train", table(tmp_path, ["0.1", "0.2", "0.5"]), *out)
    assert code == 0
    assert "the 3 labels are numbers (0.1, 0.2, 0.5), and each is a class of its own: add --ratings" in text
    code, text = run("train", table(tmp_path, [f"{rating / 10:g}" for rating in range(30)]), *out, "--force")
    assert code == 2
    assert "the 30 labels are numbers (0, 0.1, 0.2, 0.3, 0.4, …)" in text
    assert "At most 20 different numbers are taken as classes" in text
    code, text = run("train", table(tmp_path, ["1", "2", "1.0"]), *out, "--force")
    assert code == 2
    assert "the labels '1' and '1.0' are one number" in text
    assert "labels are numbers" not in run("train", table(tmp_path, ["1", "2", "bad"]), *out, "--force")[1]


def test_ratings_are_predicted_as_numbers(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "model"), "--hidden", "4", "--epochs", "1", "--ratings")
    code, text = run("train", table(tmp_path, [f"{rating / 10:g}" for rating in range(30)]), *out)
    assert code == 0, text
    assert "Mean squared error" in text
    assert Rationalizer.load(tmp_path / "model").labels == ()
    code, text = run("train", table(tmp_path, ["1", "2", "good"]), *out, "--force")
    assert (code, "labels must be finite numbers, got 'good'" in text) == (2, True)


@pytest.mark.parametrize("rate", ["3e37", "1e300"])
def test_a_training_that_diverges_stops_and_saves_nothing(rate: str, tmp_path: Path) -> None:
    code, text = run("train", table(tmp_path), "--out", str(tmp_path / "model"), *SMALL, "--rate", rate)
    assert code == 1
    assert "so training stopped" in text
    assert "Traceback" not in text
    assert not list((tmp_path / "model").iterdir())


@pytest.mark.parametrize("rate", ["inf", "nan", "0", "-1"])
def test_rates_that_are_none_are_refused(rate: str, tmp_path: Path) -> None:
    code, text = run("train", table(tmp_path), "--out", str(tmp_path / "model"), *SMALL, f"--rate={rate}")
    assert (code, text) == (2, f"rate must satisfy 0 < rate < inf, got {float(rate)}")


def test_a_page_of_somebody_else_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "page[1].html"
    explain = ("explain", str(model), "--text", "A fine film", "--out", str(out))
    out.write_text("<title>My page</title>", encoding="utf-8")
    code, text = run(*explain)
    assert code == 2
    assert "page[1].html was not written by `fenchel rationale explain`" in text
    assert out.read_text(encoding="utf-8") == "<title>My page</title>"
    assert run(*explain, "--force")[0] == 0
    assert run(*explain)[0] == 0  # its own
    (tmp_path / "taken").touch()
    code, text = run(*explain[:4], "--out", str(tmp_path / "taken" / "page.html"))
    assert (code, text) == (2, f"{tmp_path / 'taken'} cannot be written: Is a file and not a folder")
    code, text = run(*explain[:4], "--out", str(tmp_path))
    assert (code, text) == (2, f"{tmp_path} is a folder, where `fenchel rationale explain` would write a file")


def test_a_text_that_no_page_can_hold_is_refused_and_the_page_kept(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert run("explain", str(model), "--text", "A fine film", "--out", str(out))[0] == 0
    before = out.read_bytes()
    code, text = run("explain", str(model), "--text", "A fine \udcff film", "--out", str(out))  # not UTF-8
    assert (code, text) == (2, "--text must be text in UTF-8, got 'A fine \\udcff film'")
    assert out.read_bytes() == before


def test_a_model_that_was_tampered_with_is_told_in_one_line(model: Path, tmp_path: Path) -> None:
    settings = json.loads((model / "model.json").read_text(encoding="utf-8"))
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    for change in ({"labels": "ab"}, {"longest": "many"}, {"words": {"a": 10**9}}, {"sizes": {"hidden": 10**9}}):
        (broken / "model.json").write_text(json.dumps({**settings, **change}), encoding="utf-8")
        result = runner.invoke(
            cli.app, ["rationale", "explain", str(broken), "--text", "A film", "--out", str(tmp_path / "page.html")]
        )
        assert result.exit_code == 2
        assert str(broken) in result.stderr
        assert result.stderr.count("\n") == 1

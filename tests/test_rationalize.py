"""`fenchel rationale`: trains on a table or on objects, writes a page; says what is wrong with a file, and where."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fenchel import cli
from fenchel.studies.rationale import Rationalizer

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
    assert "rate must be positive" in run("train", texts, *out, "--rate=-1")[1]
    (tmp_path / "blank.tsv").write_text("good\t \n", encoding="utf-8")
    assert "no text with words" in run("train", texts, *out, "--validation", str(tmp_path / "blank.tsv"))[1]
    (tmp_path / "two.tsv").write_text("good\tA film.\nbad\tA film.\n", encoding="utf-8")
    assert "alone, besides 1 that are held out" in run("train", str(tmp_path / "two.tsv"), *out)[1]
    assert "no model.json" in run("explain", str(tmp_path), "--text", "A film.")[1]
    assert "and not both" in run("explain", str(model), texts, "--text", "A film.")[1]
    (tmp_path / "empty.tsv").write_text("\n", encoding="utf-8")
    assert "has no lines" in run("explain", str(model), str(tmp_path / "empty.tsv"))[1]

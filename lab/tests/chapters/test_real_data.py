"""Studies on a folder of real data, as the smallest files that have the formats."""

import gzip
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel_lab.chapters import named_entities, sparse_trees
from fenchel_lab.chapters.sentence_alignment import HYPOTHESIS, PREMISE
from fenchel_lab.models import tagging
from fenchel_lab.report import Context, Result, find, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FENCHEL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def result_of(name: str, folder: Path, full: bool = False) -> Result:
    outcome = run(find(name), Context(data=folder, full=full))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    return outcome.result


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_named_entities_of_both_languages(full: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("SCALED", "FULL"):
        monkeypatch.setattr(named_entities, size, replace(named_entities.TOY, epochs=4))
    monkeypatch.setattr(named_entities, "RUNS", 1)
    train, test = named_entities.made_up(60, 30)
    (folder / "ner").mkdir()
    with zipfile.ZipFile(folder / "ner" / "conll2002.zip", "w") as archive:
        for part, sentences in (("train", train), ("testa", test), ("testb", test)):
            pairs = (zip(sentence.words, sentence.tags, strict=True) for sentence in sentences)
            text = "\n\n".join("\n".join(f"{word} X {tag}" for word, tag in pair) for pair in pairs)
            archive.writestr(f"conll2002/esp.{part}", text)
            archive.writestr(f"conll2002/ned.{part}", text)
    result = result_of("named_entities", folder, full)
    rows = result.tables[0].rows
    assert [tuple(row[:4]) for row in rows] == [
        ("spanish", "Shannon (CRF)", 1, "86.68"),
        ("spanish", "Gini", 1, "85.51"),
        ("dutch", "Shannon (CRF)", 1, "87.56"),
        ("dutch", "Gini", 1, "86.58"),
    ]
    assert rows[0][4:] == rows[2][4:]  # the same sentences, the same seed
    assert ("scaled down" in result.summary) is not full


@pytest.mark.parametrize("full", [False, True])
def test_trees_of_short_sentences_and_of_all(full: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("SCALED", "FULL"):
        monkeypatch.setattr(sparse_trees, size, sparse_trees.TOY)
    monkeypatch.setattr(sparse_trees, "LONGEST", 8)
    (folder / "ud_ewt").mkdir()
    for part, sentences in zip(("train", "test"), sparse_trees.made_up(60, 40), strict=True):
        blocks = []
        for sentence in sentences:
            parts = enumerate(zip(sentence.words, sentence.tags, sentence.heads, strict=True), 1)
            rows = [f"{i}\t{word}\t_\t{tag}\t_\t_\t{head}\tdep\t_\t_" for i, (word, tag, head) in parts]
            blocks.append("\n".join(rows))
        content = "\n\n".join(blocks).encode()
        (folder / "ud_ewt" / f"en_ewt-ud-{part}.conllu.gz").write_bytes(gzip.compress(content))
    result = result_of("sparse_trees", folder, full)
    counted = sum(int(row[1]) for row in result.tables[1].rows)
    assert counted == 40 if full else 0 < counted < 40
    assert ("at most 8 words" in result.summary) is not full


def test_series_of_the_archive_beside_its_own_figures(folder: Path) -> None:
    (folder / "ucr").mkdir()
    torch.manual_seed(0)
    for name in ("ItalyPowerDemand", "GunPoint", "ArrowHead"):
        for part in ("TRAIN", "TEST"):
            rows = [",".join(f"{x:.4f}" for x in (torch.randn(9) + 3 * (i % 2)).tolist()) for i in range(6)]
            body = "\n".join(f"{row}:{i % 2}" for i, row in enumerate(rows))
            (folder / "ucr" / f"{name}_{part}.ts").write_text(f"@classLabel true 0 1\n@data\n{body}\n")
    result = result_of("alignments_of_series", folder)
    rows = [row for row in result.tables[0].rows if row[0] == "GunPoint"]
    assert [(row[1], row[3]) for row in rows] == [
        ("Euclid", "91.33"),
        ("hard", "90.67"),
        ("Shannon", "–"),
        ("Gini", "–"),
    ]
    assert all(float(row[4]) > 80 for row in rows)


def test_a_sentence_pair_with_word_vectors(folder: Path) -> None:
    (folder / "glove").mkdir()
    words = sorted({*PREMISE, *HYPOTHESIS})
    vectors = torch.eye(50)[: len(words)].tolist()
    lines = (" ".join([word, *map(str, vector)]) for word, vector in zip(words, vectors, strict=True))
    (folder / "glove" / "glove.6B.50d.txt").write_text("\n".join(lines))
    result = result_of("sentence_alignment", folder)
    weights = result.figures[0].drawing.axes[1].images[0].get_array()
    assert weights is not None
    # “a” is in both sentences, and equal to nothing but itself.
    row, columns = HYPOTHESIS.index("a"), [place for place, word in enumerate(PREMISE) if word == "a"]
    assert weights[row, columns].sum() == pytest.approx(1)


def test_missing_files_fail_a_study_with_their_name(folder: Path) -> None:
    outcome = run(find("named_entities"), Context(data=folder))
    assert "conll2002.zip" in str(outcome.error)


def test_sizes_of_the_full_protocols_are_larger() -> None:
    assert named_entities.FULL.epochs > named_entities.SCALED.epochs
    assert sparse_trees.FULL.epochs > sparse_trees.SCALED.epochs
    assert isinstance(named_entities.FULL, tagging.Size)

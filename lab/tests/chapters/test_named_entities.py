"""Named entities: the sparse model's whole distribution, and names of entities."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from fenchel_lab.chapters import named_entities
from fenchel_lab.chapters.named_entities import entities, made_up
from fenchel_lab.data.ner import Sentence
from fenchel_lab.models import tagging
from fenchel_lab.report import Context, Run
from fenchel_lab.report.records import Records


@pytest.mark.slow
def test_both_losses_tag_far_better_than_chance_and_one_is_sparse(chapter: Callable[[str], Run]) -> None:
    result = chapter("named_entities").result
    assert result is not None
    dense, sparse = result.tables[0].rows
    assert float(dense[5]) > 60
    assert float(sparse[5]) > 60
    mean, _, states = str(dense[6]).split()
    assert float(mean) == float(states)
    assert float(str(sparse[6]).split()[0]) < 2
    assert dense[7] == "0 %"


@pytest.mark.slow
def test_the_sparse_list_ends_with_all_the_probability(chapter: Callable[[str], Run]) -> None:
    result = chapter("named_entities").result
    assert result is not None
    rows = result.tables[2].rows
    sums = {str(loss): float(p) for loss, p, what in rows if what == "sum of these"}
    assert sums["Gini"] == 1.0
    assert sums["Shannon (CRF)"] < 1.0
    listed = [float(p) for loss, p, what in rows if loss == "Gini" and what != "sum of these"]
    assert sum(listed) == pytest.approx(1, abs=2e-4)
    assert 2 <= len(listed) <= named_entities.MOST_PATHS
    assert listed == sorted(listed, reverse=True)


@pytest.mark.slow
def test_blank_cells_are_those_of_the_sparse_model(chapter: Callable[[str], Run]) -> None:
    result = chapter("named_entities").result
    assert result is not None
    dense, sparse = (np.ma.filled(axes.images[0].get_array(), np.nan) for axes in result.figures[0].drawing.axes)
    assert not np.isnan(dense).any()
    assert np.isnan(sparse).mean() > 0.3
    np.testing.assert_allclose(np.nansum(sparse, 1), 1, atol=1e-5)


class Certain:
    """A tagger with a list of two sequences for every sentence, the second of which is right."""

    def __call__(self, batch: tagging.Batch) -> "Certain":
        self.batch = batch
        return self

    def top(self, k: int) -> SimpleNamespace:
        wrong = torch.where(self.batch.tags == 0, 1, 0)
        paths = torch.stack([wrong, self.batch.tags.clamp_min(0)], 1)
        return SimpleNamespace(paths=paths, probs=torch.tensor([[0.7, 0.3]]).expand(len(paths), 2))


def test_calibration_counts_sequences_that_are_right() -> None:
    sentences = [Sentence(("a", "b"), ("B-PER", "O")), Sentence(("c",), ("O",))]
    vocabulary = tagging.Vocabulary(sentences)
    groups = named_entities.calibration(cast(tagging.Tagger, Certain()), vocabulary, sentences)
    found = dict(zip(named_entities.EDGES, groups, strict=True))
    assert found[0.4] == [2, 0.6, 2]
    assert found[0.8] == [2, 1.4, 0]
    assert sum(count for count, _, _ in groups) == 4


def test_finished_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = made_up(40, 40)
    corpus = named_entities.Corpus("made up", train, test, test)
    size = replace(named_entities.TOY, epochs=1)
    monkeypatch.setattr(named_entities, "_setting", lambda context: ([corpus], size, 1, "text"))
    whole = named_entities.named_entities(Context(data=None, records=Records(tmp_path)))
    again = named_entities.named_entities(Context(data=None, records=Records(tmp_path, minutes=0)))
    assert [table.rows for table in again.tables] == [table.rows for table in whole.tables]
    (tmp_path / "made-up.gini.seed-0.json").unlink()
    part = named_entities.named_entities(Context(data=None, records=Records(tmp_path, minutes=0)))
    assert "1 of 2 runs are finished" in part.summary
    assert len(part.tables[0].rows) == 1


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O O", "none"),
        ("B-PER I-PER O", "a b (PER)"),
        ("B-PER B-PER I-LOC", "a (PER), b (PER), c (LOC)"),
        ("I-PER O I-PER", "a (PER), c (PER)"),
    ],
)
def test_entities_are_told_in_words(tags: str, found: str) -> None:
    assert entities(["a", "b", "c"], tags.split()) == found


def test_made_up_sentences_are_well_tagged_and_the_same_every_time() -> None:
    train, test = made_up(50, 20)
    assert (train, test) == made_up(50, 20)
    assert (len(train), len(test)) == (50, 20)
    for sentence in [*train, *test]:
        assert isinstance(sentence, Sentence)
        for before, tag in zip(("O", *sentence.tags), sentence.tags, strict=False):
            assert not tag.startswith("I-") or before[2:] == tag[2:]
    known = {word for sentence in train for word in sentence.words}
    assert {word for sentence in test for word in sentence.words} - known

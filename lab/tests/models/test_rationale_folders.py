"""Folders of rationalizers: what is said of one that was tampered with, and what it costs."""

from pathlib import Path

import pytest
import torch

from fenchel.seq2seq import saving
from fenchel_lab.models.documents import Vocabulary
from fenchel_lab.models.rationale import Rationalizer, Selection, Size
from tampering import refusals, told_in_one_line
from watch import Largest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocabulary = Vocabulary({"a": 0, "fine": 1, "film": 2}, torch.randn(3, 4), 5)
    Rationalizer(vocabulary, ["bad", "good"], Selection("k-subsets", 2), Size(3)).save(tmp_path)
    return tmp_path


def refused(folder: Path) -> str | None:
    """The words of the error that a folder gives, on one line that names it; None if its model loads, and works."""
    try:
        model = Rationalizer.load(folder)
    except (ValueError, FileNotFoundError) as error:
        return told_in_one_line(error, folder)
    assert model.explain("A film").label
    return None


def test_settings_that_are_missing_or_strange_are_told_in_one_line(folder: Path) -> None:
    _, told = refusals(folder, refused)
    assert told[("sizes", "hidden"), "1000000000"]


def test_tensors_that_are_missing_or_do_not_fit_are_told_in_one_line(folder: Path) -> None:
    settings, whole = saving.load(folder)
    for key, tensor in whole.items():
        for strange in (None, tensor * torch.nan, tensor.new_zeros(0), tensor.double(), tensor.to(torch.complex64)):
            tensors = {name: value for name, value in {**whole, key: strange}.items() if value is not None}
            saving.save(folder, settings, tensors)
            assert refused(folder), (key, strange)
    saving.save(folder, settings, {**whole, "another": torch.zeros(1)})
    assert "'another'" in str(refused(folder))
    saving.save(folder, settings, {key: tensor.double() for key, tensor in whole.items()})
    assert refused(folder) is None  # all in another precision are whole


def test_a_folder_of_another_model_is_refused(folder: Path) -> None:
    settings, tensors = saving.load(folder)
    saving.save(folder, {**settings, "model": "Recurrent"}, tensors)
    assert "has a Recurrent, not a Rationalizer" in str(refused(folder))


def test_sizes_that_the_file_does_not_have_take_no_memory(folder: Path) -> None:
    settings, tensors = saving.load(folder)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    settings["sizes"]["hidden"] = numbers
    saving.save(folder, settings, tensors)
    with Largest() as largest:
        assert refused(folder)
    assert 0 < largest.elements <= 4 * numbers  # a file of float32 is read as bytes


def test_a_budget_beyond_all_words_takes_no_memory(folder: Path) -> None:
    text = (folder / "model.json").read_text(encoding="utf-8")
    (folder / "model.json").write_text(text.replace('"budget": 2', '"budget": 1000000000'), encoding="utf-8")
    with Largest() as largest:
        found = Rationalizer.load(folder).explain("A fine film")
    assert found.weights == pytest.approx([1, 1, 1])
    assert largest.elements < 10_000

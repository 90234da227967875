"""Folders of models: what comes back, and what is said of a folder that is none."""

from pathlib import Path

import pytest
import torch

from fenchel import folders


def test_settings_and_tensors_come_back(tmp_path: Path) -> None:
    settings = {"format": folders.FORMAT, "model": "Model", "words": ["naïve", "日本"]}
    tensors = {"a": torch.randn(3, 4).mT, "b": torch.tensor([1, 2], dtype=torch.int64)}
    folders.save(tmp_path / "new" / "model", settings, tensors)
    folders.save(tmp_path / "new" / "model", settings, tensors)  # over what is there
    found, back = folders.load(tmp_path / "new" / "model")
    assert found == settings
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert {path.name for path in (tmp_path / "new" / "model").iterdir()} == {"model.json", "model.safetensors"}


def test_a_folder_without_a_model_or_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.json"):
        folders.load(tmp_path)
    folders.save(tmp_path, {"format": folders.FORMAT + 1}, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="of format 2; this version reads 1"):
        folders.load(tmp_path)


def test_what_to_install_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fenchel\[seq2seq\]'"):
        folders.save(tmp_path, {"format": folders.FORMAT}, {"a": torch.zeros(1)})

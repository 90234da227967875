"""Folders that models are saved to: tensors by safetensors, all else as JSON, each file whole or not there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = 1
"""Of the settings that this version writes and reads."""
SETTINGS, TENSORS = "model.json", "model.safetensors"


def safetensors() -> Any:
    """The package's functions on torch tensors, imported where they are needed."""
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "saving and loading models needs safetensors: pip install 'fenchel[seq2seq]'"
        ) from None


def save(folder: Path | str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``model.safetensors`` and ``model.json`` into a folder, made if need be.

    Args:
        folder: where to.
        settings: what the model is made of besides its tensors, as JSON can hold it; ``format`` is :data:`FORMAT`.
        tensors: of its state.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    new = folder / f"{TENSORS}.new"
    safetensors().save_file(kept, new)
    new.replace(folder / TENSORS)
    text = json.dumps(dict(settings), indent=1, ensure_ascii=False)
    new = folder / f"{SETTINGS}.new"
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(folder / SETTINGS)


def load(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the tensors that were saved to a folder."""
    folder = Path(folder)
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"{folder} has no {SETTINGS}: it is not a folder that a model was saved to")
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    if settings.get("format") != FORMAT:
        raise ValueError(f"{folder} has a model of format {settings.get('format')}; this version reads {FORMAT}")
    return settings, safetensors().load_file(folder / TENSORS)

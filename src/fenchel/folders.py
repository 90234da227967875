"""Folders that models are saved to: tensors by safetensors, all else as JSON, each file whole or not there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = 1
"""Of the settings that this version writes and reads."""
SETTINGS, TENSORS = "model.json", "model.safetensors"

_SAVED = "what a model was saved to"


def safetensors() -> Any:
    """The package's functions on torch tensors, imported where they are needed."""
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "saving and loading models needs safetensors: pip install 'fenchel[seq2seq]'"
        ) from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, and put there once it is whole."""
    new = path.with_name(f"{path.name}.new")
    write(new)
    new.replace(path)


def read_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and the words that stand beside them; an error that names the file, and what it is not."""
    safetensors()  # says what to install
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not {what}: {error}") from None


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
    write_whole(folder / TENSORS, lambda path: safetensors().save_file(kept, path))
    text = json.dumps(dict(settings), indent=1, ensure_ascii=False)
    write_whole(folder / SETTINGS, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def load(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the tensors that were saved to a folder."""
    folder = Path(folder)
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"{folder} has no {SETTINGS}: it is not a folder that a model was saved to")
    try:
        settings = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / SETTINGS} is not {_SAVED}: {error}") from None
    if settings.get("format") != FORMAT:
        raise ValueError(f"{folder} has a model of format {settings.get('format')}; this version reads {FORMAT}")
    return settings, read_tensors(folder / TENSORS, _SAVED)[0]


@contextmanager
def whole(folder: Path | str, name: str) -> Iterator[None]:
    """Within it a model is made of what was loaded: what is missing there, or does not fit, is told as a ValueError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{folder} does not have a whole {name}: there is no {error}") from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{folder} does not have a whole {name}: {error}") from None

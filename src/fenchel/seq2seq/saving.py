"""Folders of saved models: tensors in safetensors files, everything else in JSON. Files are written atomically.

Files may be truncated or manipulated: errors are one line that names the folder, and no model is built that is larger
than the files.
"""

from __future__ import annotations

import importlib
import json
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fenchel._checks import is_number

__all__ = [
    "FORMAT",
    "SETTINGS",
    "TENSORS",
    "build",
    "check_names",
    "check_strings",
    "load",
    "save",
    "short",
    "whole",
    "write_whole",
]

FORMAT = 1
"""The version of the format of settings that is written and read."""
SETTINGS, TENSORS = "model.json", "model.safetensors"
"""The names of the files in a folder."""
LARGEST_SETTINGS = 1 << 28
"""The largest size of a settings file in bytes: names, sizes and a vocabulary. A larger file is not read."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes that parameters may have."""

_SAVED = "a file of a saved model"

Model = TypeVar("Model", bound=nn.Module)


def safetensors() -> Any:
    """The module ``safetensors.torch``, imported when it is needed."""
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "saving and loading models needs safetensors: pip install 'fenchel[seq2seq]'"
        ) from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a hidden name in the same folder, and rename it when it is complete.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder) / "a.txt", lambda path: path.write_text("text"))
        ...     (Path(folder) / "a.txt").read_text()
        'text'
    """
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_tensors(
    path: Path, what: str, names: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a file and its metadata; errors name the file and what it should be.

    Args:
        path: the file.
        what: a description of the file, for errors.
        names: the tensors to read; all by default.
    """
    safetensors()  # its error names the package to install
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: it is not there, or not a file")
    try:
        with safe_open(path, framework="pt") as opened:
            wanted = [name for name in opened.keys() if names is None or name in names]  # noqa: SIM118
            return {name: opened.get_tensor(name) for name in wanted}, opened.metadata() or {}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not {what}: {short(error)}") from None


def parse_settings(text: str, path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON object; errors name the file and what it should be."""
    try:
        settings = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is not {what}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not {what}: {short(error)}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not {what}: it holds a {type(settings).__name__}, not an object")
    return settings


def save(folder: Path | str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``model.safetensors`` and ``model.json`` into a folder, which is created if necessary.

    Args:
        folder: the path of the folder.
        settings: everything but the tensors, for JSON; ``format`` is :data:`FORMAT`.
        tensors: the state dict.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, {"format": FORMAT, "model": "Linear"}, {"weight": torch.ones(2)})
        ...     settings, tensors = load(folder)
        >>> settings["model"], tensors["weight"]
        ('Linear', tensor([1., 1.]))
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_whole(folder / TENSORS, lambda path: safetensors().save_file(kept, path))
    text = json.dumps(dict(settings), indent=1, ensure_ascii=False)
    write_whole(folder / SETTINGS, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def load(folder: Path | str, kinds: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load the settings and the tensors of a folder.

    Args:
        folder: the folder that was given to ``save``.
        kinds: the allowed values of ``settings["model"]``; any by default.

    Example:
        >>> load("no such folder")
        Traceback (most recent call last):
            ...
        FileNotFoundError: no such folder has no model.json: it is not the folder of a saved model
    """
    folder = Path(folder)
    file = folder / SETTINGS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {SETTINGS}: it is not the folder of a saved model")
    if (size := file.stat().st_size) > LARGEST_SETTINGS:
        raise ValueError(f"{file} is not {_SAVED}: it has {size} bytes, more than {LARGEST_SETTINGS}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not {_SAVED}: {error}") from None
    settings = parse_settings(text, file, _SAVED)
    found = settings.get("format")
    if type(found) is not int or found != FORMAT:
        raise ValueError(f"{folder} has a model of format {short(found)}; this version reads {FORMAT}")
    if not isinstance(settings.get("model"), str):
        raise ValueError(f"{folder} has a model of no known kind: model is {short(settings.get('model'))}")
    if kinds and settings["model"] not in kinds:
        name = short(settings["model"]).strip("'")
        raise ValueError(f"{folder} has a {name}, not a {' or '.join(kinds)}")
    return settings, read_tensors(folder / TENSORS, _SAVED)[0]


@contextmanager
def whole(place: Path | str, name: str) -> Iterator[None]:
    """A context for building an object from loaded data: any error becomes a ValueError that names the place.

    Example:
        >>> with whole("models/a", "model"):
        ...     {}["weight"]
        Traceback (most recent call last):
            ...
        ValueError: models/a does not have a whole model: there is no 'weight'
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{place} does not have a whole {name}: there is no {short(error)}") from error
    except Exception as error:
        raise ValueError(f"{place} does not have a whole {name}: {short(error, 200)}") from error


def build(folder: Path | str, name: str, tensors: Mapping[str, Tensor], make: Callable[[], Model]) -> Model:
    """Build a model with loaded tensors, in evaluation mode.

    It is first built on the meta device and compared with the tensors, because the sizes in a file may be too large.

    Args:
        folder: of the files, for errors.
        name: of the class, for errors.
        tensors: the state dict.
        make: a function that builds the model, with any parameters.

    Example:
        >>> build("folder", "Linear", {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, lambda: nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """
    with whole(folder, name):
        with torch.device("meta"):
            expected = make().state_dict()
        check_tensors(expected, tensors)
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
        model = make().to(dtype)
        model.load_state_dict(dict(tensors))
    return model.eval()


def check_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Check the names, shapes, dtypes and values of tensors; floating-point ones must be finite and of one dtype."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ValueError(f"the tensor {short(missing[0])} is missing")
    if strange := sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"there is a tensor {short(strange[0])}, which the model does not have")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(expected[name].shape)}")
    floats = {name: tensor for name, tensor in tensors.items() if expected[name].is_floating_point()}
    first = next(iter(floats.values())).dtype
    for name, tensor in tensors.items():
        right = tensor.dtype == (first if name in floats else expected[name].dtype)
        if not right or (name in floats and tensor.dtype not in FLOATS):
            raise ValueError(f"{name} has dtype {tensor.dtype}; parameters must have one floating-point dtype")
        if name in floats and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite")


def check_names(names: Collection[str], given: Mapping[str, Any]) -> None:
    """Raise a ValueError if names are missing.

    Example:
        >>> check_names(["hidden", "layers"], {"hidden": 8})
        Traceback (most recent call last):
            ...
        ValueError: there is no layers
    """
    if missing := sorted(set(names) - given.keys()):
        raise ValueError(f"there is no {missing[0]}")


def check_sizes(sizes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError for sizes that are larger than the tensors allow; a layer has at least one tensor."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    for name, size in sizes.items():
        most = len(tensors) if name == "layers" else numbers
        if not is_number(size):
            raise ValueError(f"{name} must be a number, got {short(size)}")
        if not size <= most:
            raise ValueError(f"{name} is {size}, too large for the tensors of the file")
        if size <= 0 and name != "dropout":
            raise ValueError(f"{name} must be positive, got {size}")


def check_strings(strings: object, name: str) -> list[str]:
    """Check that a loaded object is a list of strings.

    Example:
        >>> check_strings(["a", "b"], "symbols")
        ['a', 'b']
    """
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise ValueError(f"{name} must be a list of strings, got {short(strings)}")
    return strings


def short(value: object, most: int = 60) -> str:
    """A value or the message of an error, shortened to one line.

    Example:
        >>> short("abc"), short(ValueError("two\\n  lines")), len(short("a" * 10**6))
        ("'abc'", 'two lines', 30)
    """
    text = " ".join(str(value).split()) if isinstance(value, Exception) else reprlib.repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"

"""Descriptions of Ω, and of what it is made of, by dictionaries, lists, numbers and strings, for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Config = dict[str, Any]
T = TypeVar("T")

_DEEPEST = 16
"""The largest number of objects nested in each other."""


class _UnknownError(Exception):
    """Something that cannot be written."""


@dataclass(frozen=True)
class _Kind:
    """A class whose objects can be described: the arguments they were made with, and how to make them again."""

    cls: type
    arguments: Callable[[Any], Config]
    make: Callable[..., Any]


_kinds: dict[str, _Kind] = {}


def register_kind(cls: type, arguments: Callable[[Any], Config], make: Callable[..., Any]) -> None:
    """Register a class, without its subclasses; ``make(**arguments(object))`` must return an equal object."""
    _kinds[cls.__name__] = _Kind(cls, arguments, make)


def written_by(*names: str) -> Callable[[type[T]], type[T]]:
    """Register a class whose objects are described by these arguments of its constructor, which are also attributes."""

    def register(cls: type[T]) -> type[T]:
        def make(**given: Any) -> T:
            if missing := set(names) - given.keys():  # a default may not be what was written
                raise TypeError(f"there is no {min(missing)}")
            return cls(**given)

        register_kind(cls, lambda given: {name: getattr(given, name) for name in names}, make)
        return cls

    return register


def to_config(given: object) -> Config | None:
    """Describe an object; None if it, or something in it, is not of a registered class."""
    try:
        written = _write(given)
    except _UnknownError:
        return None
    return dict(written)


def from_config(config: Mapping[str, Any], expected: type[T]) -> T:
    """Make the object that was described. A ValueError says what is wrong, or that it is not of the expected class."""
    found = _read(config, 0)
    if not isinstance(found, expected):
        kind = type(found).__name__
        raise ValueError(f"config must be that of a {expected.__name__}, got {kind}")
    return found


def _write(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_write(each) for each in value]
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"values": value.detach().tolist(), "dtype": dtype, "trained": isinstance(value, nn.Parameter)}
    kind = _kinds.get(type(value).__name__)
    if kind is None or kind.cls is not type(value):
        raise _UnknownError
    return {"kind": type(value).__name__} | {name: _write(each) for name, each in kind.arguments(value).items()}


def _read(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"config must not be nested more than {_DEEPEST} times")
    if isinstance(value, Mapping) and "values" in value:
        return _tensor(value)
    if not isinstance(value, Mapping):
        return value
    kind = _kinds.get(str(value.get("kind")))
    if kind is None:
        raise ValueError(f"config must have a kind among {', '.join(sorted(_kinds))}, got {value.get('kind')!r}")
    arguments = {str(name): _read(each, depth + 1) for name, each in value.items() if name != "kind"}
    try:
        return kind.make(**arguments)
    except TypeError as error:  # too many arguments, too few, or of the wrong type
        raise ValueError(f"config of {value['kind']} does not fit: {error}") from None


def _tensor(value: Mapping[str, Any]) -> Tensor:
    if "trained" not in value:
        raise ValueError("config must say of a tensor whether it is trained")
    dtype = getattr(torch, str(value.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"config must have the name of a dtype, got {value.get('dtype')!r}")
    try:
        tensor = torch.tensor(value["values"], dtype=dtype, device="cpu")
        return nn.Parameter(tensor) if value["trained"] else tensor
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"config must have lists of numbers as values of a tensor: {error}") from None

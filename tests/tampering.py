"""Folders of saved models that were tampered with."""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
STRANGE = ["two\nlines", "a" * 10**5, -1, 10**9, 1e308, float("nan"), None, True, [], {}, DEEP]


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in an object, but of no more than two items of a list."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


def refusals(
    folder: Path, refused: Callable[[Path], str | None]
) -> tuple[dict[str, Any], dict[tuple[tuple[Any, ...], str], str | None]]:
    """A folder's settings, and what ``refused`` says of each path with each strange value, or "missing", in its place.

    Whatever the model: no setting can be left out or be a list of lists, and format, model and sizes have no second
    spelling.
    """
    file = folder / "model.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    told = {}
    for path in places(whole):
        for value in ("missing", *STRANGE):
            settings = copy.deepcopy(whole)
            parent = functools.reduce(lambda part, key: part[key], path[:-1], settings)
            if value == "missing":
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            file.write_text(json.dumps(settings), encoding="utf-8")
            told[path, repr(value)[:20]] = refused(folder)
    for key in whole:
        assert told[(key,), "'missing'"], key
        assert told[(key,), repr(DEEP)[:20]], key
    for key in ("format", "model", "sizes"):
        assert all(told[(key,), repr(value)[:20]] for value in STRANGE if value is not True), key
    return whole, told


def told_in_one_line(error: Exception, folder: Path) -> str:
    """The words of an error, which names the folder and is short."""
    told = str(error)
    assert str(folder) in told
    assert "\n" not in told
    assert len(told) < 300 + len(str(folder))
    return told

"""The public surface: every room is listed, and no attribute of a package hides a module of the same name."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import fenchel

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(fenchel.__path__, "fenchel.")
    if not module.name.endswith(".__main__")
)
ROOMS = [name for name in MODULES if name.count(".") == 1 and not name.startswith("fenchel._")]


def test_the_library_lists_every_room() -> None:
    rooms = {name.partition(".")[2] for name in ROOMS}
    listed = {name for name in fenchel.__all__ if isinstance(getattr(fenchel, name), ModuleType)}
    assert listed == rooms


@pytest.mark.parametrize("room", ["fenchel", *ROOMS])
def test_every_name_that_a_room_lists_exists_once(room: str) -> None:
    module = importlib.import_module(room)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert not name.startswith("_")
        assert hasattr(module, name)


def test_no_attribute_hides_a_module() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        package, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(package), last) is module, name

"""The laboratory uses public names of the library only: each is in the `__all__` of the module that has it."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fenchel_lab

ROOT = Path(fenchel_lab.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def members(path: list[str]) -> Iterator[str]:
    """What is wrong with a path from the library downwards, such as fenchel.nn.Entmax.forward."""
    value: object = importlib.import_module("fenchel")
    for depth, name in enumerate(path[1:], 1):
        if not isinstance(value, ModuleType):
            return
        if name not in getattr(value, "__all__", ()):
            yield f"{'.'.join(path[: depth + 1])} is not in {value.__name__}.__all__"
            return
        value = getattr(value, name)


def chain(node: ast.AST) -> list[str] | None:
    """The names of ``a.b.c``; None if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := chain(node.value)) is not None:
        return [*before, node.attr]
    return None


def faults(source: str) -> set[str]:
    """What a module's text takes from the library that is not public."""
    tree = ast.parse(source)
    bound: dict[str, list[str]] = {}
    found: set[str] = set()
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                path = each.name.split(".")
                if path[0] == "fenchel":
                    bound[each.asname or "fenchel"] = path if each.asname else ["fenchel"]
                    found.update(members(path))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fenchel":
            for each in node.names:
                path = [*node.module.split("."), each.name]
                bound[each.asname or each.name] = path
                found.update(members(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = chain(node) or []
            if path and path[0] in bound:
                found.update(members([*bound[path[0]], *path[1:]]))
            if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own:
                found.add(f"{node.attr} is private, and not defined here")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_uses_public_names_only(file: Path) -> None:
    assert not faults(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import fenchel._torch", "fenchel._torch is not in"),
        ("import fenchel\nfenchel._checks.check_count", "fenchel._checks is not in"),
        ("import fenchel.seq2seq as s\ns.lstm", "fenchel.seq2seq.lstm is not in"),
        ("from fenchel import lean", "fenchel.lean is not in"),
        ("from fenchel._warmup import warmup", "fenchel._warmup is not in"),
        ("from fenchel.seq2seq.batches import Batch", "fenchel.seq2seq.batches is not in"),
        ("from fenchel.seq2seq import saving as s\ns.read_tensors", "fenchel.seq2seq.saving.read_tensors is not in"),
        ("from fenchel.nn import MultiheadAttention as A\nA(4, 2)._project", "_project is private"),
    ],
)
def test_what_is_not_public_is_found(source: str, fault: str) -> None:
    assert any(each.startswith(fault) for each in faults(source)), faults(source)


def test_what_is_public_is_let_through() -> None:
    assert not faults(
        "import fenchel\nfrom fenchel.seq2seq import saving\nfrom fenchel import nn, dp as d\n"
        "fenchel.nn.Entmax(1.5).alpha\nsaving.load('x')\nd.LinearChain.map\nnn.Entmax.forward\nfenchel.entmax"
    )

"""The reference: one page per room of the library, written to ``reference/rooms`` from what each lists in ``__all__``.

A name that is added to the library is on its page at the next build; a room that is added gets a page of its own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fenchel

if TYPE_CHECKING:  # the list of names is tested without the site's packages
    from sphinx.application import Sphinx

TITLES = {
    "maps": ("Maps", "Functions from scores to a choice. Each is `argmax` of one [Ω](../../concepts/omega.md)."),
    "omega": ("Regularizers Ω", "Modules with `argmax`, `max`, `loss` and `margin`. `gamma * omega` is the same at another temperature."),
    "losses": ("Losses", "[Fenchel-Young losses](../../concepts/fenchel-young-loss.md), with the arguments of `F.cross_entropy`."),
    "attention": ("Attention", "Attention with any Ω, and the plan by which it computes."),
    "nn": ("Modules: fenchel.nn", "In place of those of `torch.nn`."),
    "structures": ("Structures: fenchel.structures", "Sets of structures with a MAP oracle; `SparseMAP` chooses among them."),
    "factors": ("Factor graphs: fenchel.factors", "Variables, and factors that say what they may be together."),
    "dp": ("Dynamic programs: fenchel.dp", "Chains, alignments, lattices and trees with any Ω."),
    "hopfield": ("Memories: fenchel.hopfield", "Associative memories, their certificates, and Hopfield layers."),
    "continuous": ("Continuous attention: fenchel.continuous", "Densities over the line and the plane; long memory."),
    "mixed": ("Mixed distributions: fenchel.mixed", "Random vectors on the whole simplex, faces included."),
    "seq2seq": ("Sequence to sequence: fenchel.seq2seq", "Encoder-decoders, exact search, sampling and metrics."),
    "integrations": ("Integrations: fenchel.integrations", "Other libraries; imported when you import the module."),
    "kernels": ("Kernels: fenchel.kernels", "Which compiled loop serves which call; compiling ahead."),
    "progress": ("Progress: fenchel.progress", "How long computations report progress."),
}
"""Headings and introductions, in the order of the pages; a room that is missing here comes last with its own words."""


def pages() -> dict[str, list[str]]:
    """The full names of everything public, by page. Each object stands once, under its shortest name."""
    rooms = {name: importlib.import_module(f"fenchel.{name}") for name in fenchel.__all__ if _is_module(name)}
    inside = {name: list(_names(module)) for name, module in rooms.items()}
    maps = inside.pop("regularizers")
    found = {
        "maps": [name for name in maps if inspect.isfunction(_find(name))],
        "omega": [name for name in maps if inspect.isclass(_find(name))],
        "losses": [*inside.pop("losses"), "fenchel.linear_entmax_loss"],
        "attention": ["fenchel.attention", *inside.pop("streaming")],
        **inside,
    }
    found["kernels"] = ["fenchel.warmup", *found["kernels"]]
    found["omega"] += ["fenchel.SparseMAP", "fenchel.LPSparseMAP"]
    seen: set[str] = set()
    for page, names in found.items():
        found[page] = [name for name in names if not (name in seen or seen.add(name))]  # type: ignore[func-returns-value]
    order = [*TITLES, *sorted(set(found) - set(TITLES))]
    return {page: found[page] for page in order}


def _is_module(name: str) -> bool:
    return isinstance(getattr(fenchel, name), ModuleType)


def _names(module: ModuleType) -> Iterator[str]:
    """The full names of what a room lists, and, if it lists nothing, what its modules list."""
    if not module.__all__ and hasattr(module, "__path__"):
        for each in pkgutil.iter_modules(module.__path__, f"{module.__name__}."):
            yield from _names(importlib.import_module(each.name))
    for name in module.__all__:
        short = getattr(fenchel, name, None) is getattr(module, name) and name in fenchel.__all__
        yield f"fenchel.{name}" if short else f"{module.__name__}.{name}"


def _find(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


GROUPS: dict[str, Callable[[Any], bool]] = {
    "Classes": inspect.isclass,
    "Functions": inspect.isroutine,
    "Modules": inspect.ismodule,
    "Constants": lambda value: not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)),
}


def page(key: str, names: list[str]) -> str:
    """The text of a page: a table of names for each kind, whose entries have pages of their own."""
    title, words = TITLES.get(key, ("", ""))
    if not title:
        room = importlib.import_module(f"fenchel.{key}")
        title, words = f"{key.capitalize()}: fenchel.{key}", (room.__doc__ or "").partition("\n")[0]
    parts = [f"# {title}", words]
    groups = {kind: [name for name in names if test(_find(name))] for kind, test in GROUPS.items()}
    shown = {kind: group for kind, group in groups.items() if group}
    for kind, group in shown.items():
        entries = "\n".join(f"   {name}" for name in group)
        heading = [f"## {kind}"] if len(shown) > 1 else []
        table = f"```{{eval-rst}}\n.. autosummary::\n   :toctree: names\n   :nosignatures:\n\n{entries}\n```"
        parts += [*heading, table]
    return "\n\n".join(parts) + "\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before sources are listed."""
    folder = Path(app.srcdir) / "reference" / "rooms"
    folder.mkdir(parents=True, exist_ok=True)
    for key, names in pages().items():
        file, text = folder / f"{key}.md", page(key, names)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8", newline="\n")
    lines = "\n".join(f"rooms/{key}" for key in pages())
    (folder / "list.txt").write_text(f"```{{toctree}}\n:hidden:\n\n{lines}\n```\n", encoding="utf-8", newline="\n")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Write explorer.js: the modules of src as one classic script, because browsers load no modules from a file.

    python docs/explorer/tools/build.py

Every module becomes a function that returns its exports, in the order in which they need each other. A test compares
explorer.js with what this script writes.
"""

from __future__ import annotations

import re
from pathlib import Path

EXPLORER = Path(__file__).resolve().parent.parent
SCRIPT = EXPLORER / "explorer.js"

IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?:class|const|function\*?) (\w+)", re.MULTILINE)


def built(main: str = "main") -> str:
    """The text of explorer.js."""
    parts = [_wrapped(name) for name in _ordered(main)]
    first = "// Written by tools/build.py from the modules in src: change those, and run it again.\n"
    return first + '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _source(name: str) -> str:
    return (EXPLORER / "src" / f"{name}.js").read_text(encoding="utf-8")


def _ordered(name: str, seen: tuple[str, ...] = ()) -> list[str]:
    """A module after all that it imports, each once."""
    if name in seen:
        raise ValueError(f"modules import each other: {' → '.join((*seen, name))}")
    order: list[str] = []
    for _, needed in IMPORT.findall(_source(name)):
        order += [each for each in _ordered(needed, (*seen, name)) if each not in order]
    return [*order, name]


def _wrapped(name: str) -> str:
    """A module as a function that is called at once and returns what the module exports."""
    source = _source(name)
    exported = ", ".join(EXPORT.findall(source))
    body = IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};\n", source)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise ValueError(f"src/{name}.js has an import or export that this script does not know")
    return f"const module_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


if __name__ == "__main__":
    SCRIPT.write_text(built(), encoding="utf-8")

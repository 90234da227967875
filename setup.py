"""The long description: README.md with links and pictures that work outside of the repository.

Everything else is in pyproject.toml. If its ``urls`` name a ``Repository``, relative links become links to it; while they do
not, links become plain text and pictures are left out, so that nothing on the package index is dead.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def describe(text: str, repository: str) -> str:
    """README.md as the package index shows it.

    Example:
        >>> describe("[a](docs/a.md), [b](https://b.example), [c](#c)", "https://host.example/me/it")
        '[a](https://host.example/me/it/blob/HEAD/docs/a.md), [b](https://b.example), [c](#c)'
        >>> describe("[a](docs/a.md)", "")
        'a'
    """
    relative = r"(?!https?:|mailto:|#)([^)\s\"]+)"
    if not repository:
        text = re.sub(r"<picture>.*?</picture>\n*", "", text, flags=re.DOTALL)
        return re.sub(rf"(?<!!)\[([^\]]*)\]\({relative}\)", r"\1", text)
    root = repository.rstrip("/")
    text = re.sub(rf"(?<!!)\[([^\]]*)\]\({relative}\)", rf"[\1]({root}/blob/HEAD/\2)", text)
    return re.sub(rf"(src|srcset)=\"{relative}\"", rf"\1=\"{root}/raw/HEAD/\2\"", text)


if __name__ == "__main__":
    urls = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=describe(readme, urls.get("Repository", "")),
        long_description_content_type="text/markdown",
    )

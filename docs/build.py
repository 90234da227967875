"""Build the site: build/html/VERSION, a list of all versions there, and pages that lead to the newest one.

    python docs/build.py            # warnings are errors
    python docs/build.py --quick    # only what changed since the last build

A folder of another version that already lies in build/html is kept, listed and linked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HTML = HERE.parent / "build" / "html"
FORWARD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Fenchel</title><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url={to}"><link rel="canonical" href="{to}"></head>
<body><p><a href="{to}">The documentation of Fenchel {version}</a></p></body></html>
"""


def main() -> int:
    """Build, then write what leads from version to version."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="keep the pages that did not change")
    quick = parser.parse_args().quick
    os.environ.setdefault("FENCHEL_KERNELS", "wait")
    from sphinx.cmd.build import main as sphinx

    import fenchel

    version, start = fenchel.__version__, time.perf_counter()
    target, trees = HTML / version, HERE.parent / "build" / "doctrees"
    if not quick:
        for folder in (target, trees, HERE / "reference" / "rooms", HERE / "gallery" / "pages"):
            shutil.rmtree(folder, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    status = sphinx(["-b", "html", "-W", "--keep-going", "-q", "-d", str(trees), str(HERE), str(target)])
    if status:
        return status
    if (HERE / "explorer" / "index.html").exists():  # plain files that need no build
        shutil.copytree(HERE / "explorer", target / "explorer", dirs_exist_ok=True)
    for page in (target / "_modules").rglob(
        "*.html"
    ):  # Sphinx guesses where to lead back to; not all guesses are right
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'<a class="viewcode-back".*?</a>', "", text), encoding="utf-8")
    link_versions(HTML)
    print(f"Built the site in {time.perf_counter() - start:.0f} s: {HTML / 'index.html'}")
    return 0


def link_versions(html: Path) -> None:
    """List the versions in a folder, and let its front page and ``latest`` lead to the newest."""
    versions = sorted(
        (each.name for each in html.iterdir() if (each / "searchindex.js").exists()), key=_key, reverse=True
    )
    (html / "versions.js").write_text(f"window.FENCHEL_VERSIONS = {json.dumps(versions)};\n", encoding="utf-8")
    (html / "latest").mkdir(exist_ok=True)
    newest = versions[0]
    (html / "index.html").write_text(FORWARD.format(to=f"{newest}/index.html", version=newest), encoding="utf-8")
    to_latest = FORWARD.format(to=f"../{newest}/index.html", version=newest)
    (html / "latest" / "index.html").write_text(to_latest, encoding="utf-8")


def _key(version: str) -> list[tuple[int, str]]:
    """0.10 comes after 0.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+]|(?<=\d)(?=[a-z])", version)]


if __name__ == "__main__":
    sys.exit(main())

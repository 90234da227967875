"""Check the site and the packages: links, `twine check`, and a walk through the site in headless Chromium.

    python docs/check.py             # builds site and packages first
    python docs/check.py --built     # the site that lies in build/html; no packages

Chromium is the system's (``CHROMIUM`` names another); nothing is downloaded. Screenshots are left in build/screenshots.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "build" / "html"
SCREENS = ROOT / "build" / "screenshots"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = {"wide": 1300, "phone": 390}
PAGES = [
    "index",
    "start",
    "tutorials/replace-softmax",
    "tutorials/memory",
    "concepts/margin",
    "guide/maps",
    "gallery/index",
    "gallery/pages/paths",
    "reference/index",
    "reference/masks",
    "reference/rooms/names/fenchel.attention",
    "reference/rooms/names/fenchel.nn.CRF",
    "speed",
    "results/README",
    "changelog",
    "explorer",
    "explorer/index",  # looked at if it is part of the build
]
WALKS = {
    "how to install": (["Install"], "pip install"),
    "how to replace softmax in attention": (["Replace softmax"], "fenchel.nn.MultiheadAttention"),
    "what a margin is": (["Concepts", "Margin"], "the lead at which the choice becomes one-hot"),
    "the signature of attention": (["fenchel.attention(q, k, v)"], "is_causal: bool = False"),
    "how fast it is on one's machine": (["Speed"], "fenchel bench attention maps"),
    "how to cite it": (["How to cite"], "@software"),
    "what is not supported": (["What is not supported"], "Compiled kernels exist for the CPU"),
}
"""Questions of a stranger on the front page: what they click, and what they must then see."""


class Page(HTMLParser):
    """The links, sources and targets of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ``href``, ``src`` and ``id``."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            if value and name in ("id", "name"):
                self.targets.add(value)


def dead_links(html: Path) -> Iterator[str]:
    """Links between pages of a folder that lead nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in html.rglob("*.html")}
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(html)}: {link} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].targets:
                yield f"{path.relative_to(html)}: {link} has no such place"


def check_packages() -> Iterator[str]:
    """Build source distributions and wheels of library and laboratory, and let twine judge them."""
    with tempfile.TemporaryDirectory() as folder:
        for source in (ROOT, ROOT / "lab"):
            command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                yield f"{source.name}: {done.stdout[-500:]}{done.stderr[-500:]}"
        files = sorted(map(str, Path(folder).iterdir()))
        done = subprocess.run(
            [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True
        )
        print(f"twine check of {len(files)} files: {'passed' if not done.returncode else done.stdout}")
        if done.returncode or len(files) != 4:
            yield f"twine check: {done.stdout}{done.stderr}"


class Quiet(SimpleHTTPRequestHandler):
    """A server that says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Visit:
    """A browser window in which everything that goes wrong is noted."""

    def __init__(self, browser, address: str, width: int, mode: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=mode)
        self.page, self.address, self.troubles = self.context.new_page(), address, []
        self.page.on("console", lambda each: each.type in ("error", "warning") and self.note(f"console: {each.text}"))
        self.page.on("pageerror", lambda error: self.note(f"error: {error}"))
        self.page.on("requestfailed", self.note_request)
        self.page.on("response", lambda answer: answer.status >= 400 and self.note(f"{answer.status}: {answer.url}"))
        self.page.on(
            "request",
            lambda asked: (
                asked.url.startswith(("http", "ws"))
                and not asked.url.startswith(address)
                and self.note(f"network: {asked.url}")
            ),
        )

    def note_request(self, request) -> None:
        """Note a request that failed, unless the browser gave it up because another page was asked for."""
        if request.failure != "net::ERR_ABORTED":
            self.note(f"request failed: {request.url}: {request.failure}")

    def note(self, trouble: str) -> None:
        """Remember what went wrong, and where."""
        self.troubles.append(f"{self.page.url}: {trouble}")

    def look(self, name: str) -> None:
        """Check the page that is shown, and take its picture."""
        self.page.wait_for_load_state("load")
        self.page.evaluate("document.querySelectorAll('img').forEach(each => { each.loading = 'eager' })")
        wide = self.page.evaluate("[document.scrollingElement.scrollWidth, window.innerWidth]")
        if wide[0] > wide[1] + 1:
            self.note(f"wider than the window: {wide[0]} > {wide[1]}")
        broken = "Array.from(document.images).filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        for source in self.page.evaluate(broken):
            self.note(f"broken image: {source}")
        SCREENS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENS / f"{name}.png")


def chromium() -> str | None:
    """The path of the system's Chromium, or of the browser that ``CHROMIUM`` names."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def walk(version: str) -> Iterator[str]:
    """Click through the site at two widths, in light and dark mode; what went wrong."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        for width, mode in ((w, m) for w in WIDTHS for m in ("light", "dark")):
            visit = Visit(browser, address, WIDTHS[width], mode)
            for name in PAGES:
                if (HTML / version / f"{name}.html").exists():
                    visit.page.goto(f"{address}{version}/{name}.html")
                    visit.look(f"{name.replace('/', '-')}-{width}-{mode}")
            yield from visit.troubles
            visit.context.close()
        for width in WIDTHS:
            visit = Visit(browser, address, WIDTHS[width], "light")
            try:
                yield from _clicks(visit, version, width)
            except Exception as error:
                yield f"the walk at {width} stopped at {visit.page.url}: {error}"
            yield from visit.troubles
            visit.context.close()
        browser.close()
    server.shutdown()


def _clicks(visit: Visit, version: str, width: str) -> Iterator[str]:
    page = visit.page
    for question, (links, answer) in WALKS.items():
        page.goto(visit.address)  # the front page of all versions leads on to the newest
        page.wait_for_url(f"**/{version}/index.html")
        for text in links:
            card = page.locator(".sd-card", has=page.get_by_text(text, exact=True))
            link = page.locator("article").get_by_role("link", name=text, exact=True)
            (card if card.count() else link).first.click(timeout=10_000)
            page.wait_for_load_state("load")
        if answer not in " ".join(page.inner_text("article").split()):
            yield f"{question}: {' → '.join(links)} leads to {page.url}, which does not say {answer!r}"
    page.goto(f"{visit.address}{version}/index.html")
    if width == "phone":
        page.locator("label.nav-overlay-icon:visible, .mobile-header label:visible").first.click()
        page.wait_for_timeout(400)
        visit.look("menu-phone")
    page.get_by_placeholder("Search").fill("margin")
    page.get_by_placeholder("Search").press("Enter")
    try:
        page.wait_for_selector("#search-results li a", timeout=15_000)
    except Exception:
        yield "the search for 'margin' finds nothing"
    page.wait_for_timeout(500)
    found = page.locator("#search-results li a").all_inner_texts()
    if not any("Margin" in each for each in found):
        yield f"the search for 'margin' does not find its page, but {found[:5]}"
    visit.look(f"search-{width}")
    versions = page.locator("#version-switcher option").all_inner_texts()
    if not any(version in each for each in versions):
        yield f"the list of versions is {versions}"
    page.goto(f"{visit.address}{version}/start.html")
    before = page.evaluate("document.body.dataset.theme")
    page.locator("button.theme-toggle:visible").first.click()
    if page.evaluate("document.body.dataset.theme") == before:
        yield "the button for light and dark does nothing"


def main() -> int:
    """Run all checks and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--built", action="store_true", help="check the site that is there, and no packages")
    built = parser.parse_args().built
    if chromium() is None:
        print(
            "There is no chromium: install the system's package (apt-get install chromium), or set CHROMIUM to a path."
        )
        return 1
    if shutil.which("node") is None:
        print("There is no node: install the system's packages nodejs and npm (version 20 or newer).")
        return 1
    if not built and subprocess.run([sys.executable, str(ROOT / "docs" / "build.py")]).returncode:
        return 1
    version = re.search(r'"([^"]+)"', (HTML / "versions.js").read_text(encoding="utf-8")).group(1)
    troubles = [*dead_links(HTML), *walk(version), *([] if built else check_packages())]
    print("\n".join(troubles) or f"Nothing to complain about; look at {SCREENS}")
    return bool(troubles)


if __name__ == "__main__":
    sys.exit(main())

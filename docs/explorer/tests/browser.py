"""Use the explorer in Chromium: drag, press keys, touch, and compare what the page shows with the library.

    python docs/explorer/tests/browser.py [--shots FOLDER]

needs playwright (its Python package only; the browser is the system's, /usr/bin/chromium or $CHROMIUM). Opened as a
file and served, at the width of a phone and of a desktop, light and dark. Prints the time that handlers took.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from fenchel import Capped, Fused, Gini, Hard, KSubsets, Norm, Oscar, Regularizer, Shannon, Tsallis
from fenchel.dp import Alignment
from fenchel.hopfield import Memory

EXPLORER = Path(__file__).resolve().parent.parent
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
WIDTHS = {"phone": 390, "desktop": 1280}
LIMIT = 8.0
"""Milliseconds of script per event."""


@contextmanager
def served() -> Iterator[str]:
    """The address of the folder on a server that runs meanwhile."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(EXPLORER))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@contextmanager
def opened(browser: Browser, address: str, width: int, scheme: str = "light", calm: bool = False) -> Iterator[Page]:
    """The page; nothing may be loaded from elsewhere, and nothing may be written to the console."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        reduced_motion="reduce" if calm else "no-preference",
        has_touch=True,
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    folder = address.rsplit("/", 1)[0]
    page.on("request", lambda request: request.url.startswith((folder, "data:")) or said.append(request.url))
    page.goto(address)
    page.wait_for_selector("html[data-ready=true]")
    yield page
    assert not said, said
    context.close()


def drag(page: Page, element: Locator, by: tuple[float, float], start: tuple[float, float] = (0.5, 0.5)) -> None:
    """Hold the mouse down on an element and move it, in pixels, in several steps."""
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None
    x, y = box["x"] + start[0] * box["width"], box["y"] + start[1] * box["height"]
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(1, 13):
        page.mouse.move(x + by[0] * step / 12, y + by[1] * step / 12)
    page.mouse.up()


def value(element: Locator) -> float:
    """Of a bar or a cell."""
    return float(str(element.get_attribute("aria-valuenow")))


def close(ours: list[float], theirs: list[float], tolerance: float, what: str) -> None:
    """Numbers of the page are those of the library, up to a tolerance."""
    assert len(ours) == len(theirs), what
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one - other) <= tolerance, f"{what}: the page has {ours}, the library {theirs}"


def knob(page: Page, name: str) -> float:
    """The value of a slider."""
    return float(page.locator(f"#{name}").input_value())


def check_choices(page: Page) -> None:
    """Every card has the library's weights, support, gradient and loss for the scores that the bars show."""
    scores = torch.tensor([value(bar) for bar in page.locator("#scores .track").all()], dtype=torch.float64)
    marked = [box.is_checked() for box in page.locator("#scores input").all()]
    alpha, strength, cap = knob(page, "alpha"), knob(page, "strength"), knob(page, "cap")
    omegas: dict[str, Regularizer] = {
        "softmax": Shannon(),
        "entmax": Tsallis(alpha),
        "sparsemax": Gini(),
        "argmax": Hard(),
        "normmax": Norm(alpha),
        "ksubsets": KSubsets(int(knob(page, "k"))),
        "fusedmax": Fused(strength),
        "oscarmax": Oscar(strength),
        "constrained_sparsemax": Capped(cap),
        "constrained_softmax": Capped(cap, Shannon()),
    }
    assert page.locator(".card").count() == len(omegas)
    for name, base in omegas.items():
        card = page.locator(f"#card-{name}")
        omega = knob(page, "temperature") * base
        p = omega.argmax(scores)
        weights = [float(str(each.get_attribute("data-weight"))) for each in card.locator(".option").all()]
        close(weights, p.tolist(), 2e-6, f"weights of {name}")
        assert card.locator("[data-name=kept]").inner_text() == f"{int((p > 0).sum())} of {len(p)}", name
        share = float(base.mass(len(scores))) / max(sum(marked), 1)
        loss = card.locator("[data-name=loss]").inner_text()
        if not any(marked) or share > (cap if name.startswith("constrained") else 1.0) + 1e-12:
            assert "mark" in loss, (name, loss)
            continue
        target = share * torch.tensor(marked, dtype=torch.float64)
        gradient = [float(str(each.get_attribute("data-gradient"))) for each in card.locator(".option").all()]
        close(gradient, (p - target).tolist(), 2e-6, f"gradient of {name}")
        close([float(loss)], [omega.loss(scores, target).item()], 6e-4, f"loss of {name}")


def use_choices(page: Page) -> None:
    """Drag scores, press keys, turn every knob, mark right answers, choose examples."""
    check_choices(page)
    bar = page.locator("#scores .track").nth(2)
    before = value(bar)
    drag(page, bar, (40, 0))
    assert value(bar) != before
    check_choices(page)
    bar.focus()
    before = value(bar)
    for key, change in (("ArrowRight", 0.05), ("ArrowUp", 0.05), ("ArrowLeft", -0.05), ("Shift+ArrowRight", 0.25)):
        page.keyboard.press(key)
        assert abs(value(bar) - before - change) < 1e-9, key
        before = value(bar)
    page.keyboard.press("Home")
    assert value(bar) == -3
    for name, keys in {"temperature": 7, "alpha": 12, "strength": 20, "k": 1, "cap": 9}.items():
        page.locator(f"#{name}").focus()
        before = knob(page, name)
        for _ in range(keys):
            page.keyboard.press("ArrowRight")
        assert knob(page, name) > before
        check_choices(page)
    for i in (1, 3):
        page.locator("#scores input").nth(i).check()
    check_choices(page)
    for i in (0, 1, 3):
        page.locator("#scores input").nth(i).uncheck()
    check_choices(page)
    page.locator("#scores input").nth(0).check()
    for button in page.locator("#examples button").all():
        button.click()
        check_choices(page)


def touch_choices(page: Page) -> None:
    """A finger that moves sideways changes a score."""
    bar = page.locator("#scores .track").nth(1)
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    assert box is not None
    before, y = value(bar), box["y"] + box["height"] / 2
    client = page.context.new_cdp_session(page)
    points = [box["x"] + share * box["width"] for share in (0.6, 0.65, 0.7, 0.75, 0.8, 0.9)]
    client.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": points[0], "y": y}]})
    for x in points[1:]:
        client.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x, "y": y}]})
    client.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert value(bar) != before
    assert abs(value(bar) - 2.4) <= 0.051, value(bar)


def settled(page: Page) -> None:
    """Wait until the plane is drawn."""
    page.wait_for_function(
        """() => {
          const times = explorerTimings["field slice"].length + explorerTimings["thumbnail slice"].length;
          const same = globalThis.sliceCount === times;
          globalThis.sliceCount = times;
          return same;
        }""",
        polling=300,
        timeout=120_000,
    )


def numbers(text: str | None) -> list[float]:
    """The two numbers of a label such as "Query at −0.10, 0.30; …"."""
    pair = str(text).split(" at ")[1].split(";")[0].replace("−", "-")
    return [float(each) for each in pair.split(", ")]


def check_memories(page: Page, omega: Regularizer) -> None:
    """The weights in which the query ends are those of the library's memory; labels have two digits only."""
    patterns = [numbers(each.get_attribute("aria-label")) for each in page.locator(".memory").all()]
    memory = Memory(torch.tensor(patterns, dtype=torch.float64), omega, knob(page, "beta"))
    query = torch.tensor(numbers(page.locator(".query").get_attribute("aria-label")), dtype=torch.float64)
    found = memory.retrieve(query, max_steps=1000)
    weights = [float(each.inner_text()) for each in page.locator("#weights .number").all()]
    close(weights, found.weights.tolist(), 0.02, f"weights of {omega}")
    whole = bool((found.weights - found.weights.round()).abs().max() < 1e-6)
    assert page.locator("#ending").get_attribute("data-exact") == str(whole).lower(), omega
    close(
        [float(page.locator("#energy").inner_text().replace("−", "-"))],
        [memory.energy(found.state).item()],
        0.02,
        "energy",
    )


def use_memories(page: Page) -> None:
    """Choose every map, place queries, move memories with mouse and keys, turn knobs."""
    plane = page.locator("#plane")
    settled(page)
    check_memories(page, Tsallis(1.5))
    family: dict[str, Regularizer] = {
        "softmax": Shannon(),
        "sparsemax": Gini(),
        "normmax": Norm(1.5),
        "argmax": Hard(),
        "ksubsets": KSubsets(2),
        "fusedmax": Fused(0.1),
        "oscarmax": Oscar(0.1),
        "entmax": Tsallis(1.5),
    }
    for name, omega in family.items():
        page.locator(f"#omega-{name}").click()
        assert page.locator(f"#omega-{name}").get_attribute("aria-pressed") == "true"
        check_memories(page, omega)
    drag(page, plane, (30, 40), start=(0.3, 0.45))
    check_memories(page, Tsallis(1.5))
    before = numbers(page.locator(".memory").nth(2).get_attribute("aria-label"))
    drag(page, page.locator(".memory").nth(2), (25, 12))
    after = numbers(page.locator(".memory").nth(2).get_attribute("aria-label"))
    assert after[0] > before[0]
    assert after[1] < before[1]
    check_memories(page, Tsallis(1.5))
    page.locator(".memory").nth(2).focus()
    page.keyboard.press("ArrowUp")
    assert abs(numbers(page.locator(".memory").nth(2).get_attribute("aria-label"))[1] - after[1] - 0.02) < 0.011
    page.locator(".query").focus()
    before = numbers(page.locator(".query").get_attribute("aria-label"))
    page.keyboard.press("Shift+ArrowLeft")
    assert abs(numbers(page.locator(".query").get_attribute("aria-label"))[0] - before[0] + 0.1) < 0.011
    for name in ("beta", "memory-alpha"):
        page.locator(f"#{name}").focus()
        for _ in range(5):
            page.keyboard.press("ArrowLeft")
    check_memories(page, Tsallis(knob(page, "memory-alpha")))
    settled(page)


def check_alignments(page: Page) -> None:
    """Marginals and value are those of the library's program."""
    cells = page.locator("#grid .cell").all()
    columns = len(page.locator("#grid .heading:not(.side)").all())
    scores = torch.tensor([value(cell) for cell in cells], dtype=torch.float64).reshape(-1, columns)
    base = Gini() if page.locator("input[value=gini]").is_checked() else Shannon()
    program = Alignment(-scores.unsqueeze(0), omega=knob(page, "gamma") * base)
    shown = [float(str(cell.get_attribute("data-marginal"))) for cell in cells]
    close(shown, program.marginals.flatten().tolist(), 2e-6, "marginals")
    close([float(page.locator("#alignment-value").inner_text())], [-program.value.item()], 6e-3, "value")


def use_alignments(page: Page) -> None:
    """Drag a cell, press keys, change the smoothing, and start anew."""
    check_alignments(page)
    cell = page.locator("#grid .cell").nth(16)
    before = value(cell)
    drag(page, cell, (0, -70))
    assert value(cell) > before
    check_alignments(page)
    before = value(cell)
    cell.focus()
    page.keyboard.press("ArrowDown")
    assert abs(value(cell) - before + 0.1) < 1e-9
    page.locator("input[value=shannon]").check()
    check_alignments(page)
    page.locator("#gamma").focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    check_alignments(page)
    page.locator("#reset").click()
    check_alignments(page)


def use_trees(page: Page, calm: bool) -> None:
    """Move the slider and play the frames; with less motion a click moves on by five of them."""
    page.locator("#frame").focus()
    page.keyboard.press("Home")
    weights = [float(each.inner_text()) for each in page.locator("#trees .number").all()]
    assert abs(sum(weights) - 1) < 0.02, weights
    page.locator("#play").click()
    page.wait_for_timeout(100 if calm else 1000)
    assert knob(page, "frame") >= (5 if calm else 2)
    if not calm:
        page.locator("#play").click()


def check_width(page: Page) -> None:
    """Nothing reaches beyond the page but explanations that are hidden."""
    outside = page.evaluate(
        """() => [...document.querySelectorAll("body *:not(.tip)")].filter((each) => {
          const { left, right, width } = each.getBoundingClientRect();
          return width && (right > innerWidth + 1 || left < -1) && !each.closest("svg");
        }).map((each) => each.outerHTML.slice(0, 80))"""
    )
    assert not outside, outside


def report(page: Page) -> None:
    """Print the time of every handler: median, 95 % and longest, in milliseconds."""
    timings: dict[str, list[float]] = page.evaluate("explorerTimings")
    for name, spent in sorted(timings.items()):
        if spent:
            ordered = sorted(spent)
            median, most, longest = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1]
            times = f"median {median:5.2f}  95 % {most:5.2f}  longest {longest:5.2f} ms"
            print(f"  {name:<18}{len(spent):>5} calls  {times}")
            assert median <= LIMIT, f"{name} takes {median:.1f} ms"


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shots", type=Path, help="folder for pictures of the page")
    shots: Path | None = parser.parse_args().shots
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, served() as address:
        executable = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        for where in ((EXPLORER / "index.html").as_uri(), address):
            for name, width in WIDTHS.items():
                calm = where == address
                with opened(browser, where, width, calm=calm) as page:
                    check_width(page)
                    use_choices(page)
                    touch_choices(page)
                    use_memories(page)
                    use_alignments(page)
                    use_trees(page, calm)
                    print(f"{where.split(':')[0]}, {name}, {width} pixels: as the library says")
                    report(page)
        for name, width in WIDTHS.items():
            for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 31)")):
                with opened(browser, (EXPLORER / "index.html").as_uri(), width, scheme) as page:
                    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
                    settled(page)
                    if shots:
                        for each in ("choices", "memories", "alignments", "parses"):
                            page.locator(f"#{each}").screenshot(path=shots / f"{each}-{name}-{scheme}.png")
        browser.close()
    print("The explorer works.")


if __name__ == "__main__":
    main()

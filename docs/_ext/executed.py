"""Run every Python block of a page when the page is read, and show below it what it printed and drew.

The blocks of a page run in order in one namespace, so that each sees the names of those before it. An error stops the
build. A block with the class ``folded`` (the line ``{.folded}`` above it) is shown closed, as the code of its figure. The
MyST comment directly above a block (``% A curve that …``) describes its figure to those who cannot see it.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from typing import Any

import matplotlib
from docutils import nodes
from matplotlib import pyplot
from matplotlib.colors import LinearSegmentedColormap
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from fenchel_lab.drawing import style
from fenchel_lab.report import Figure
from fenchel_lab.report.page import embed

LOG = logging.getLogger(__name__)
SHADES = LinearSegmentedColormap.from_list("shades", [(0.16, 0.55, 0.8, 0.0), (0.16, 0.55, 0.8, 1.0)])
"""How pages draw tables of weights: zero is transparent, so that it is the colour of the page in either mode."""
matplotlib.colormaps.register(SHADES)


class Execution(SphinxTransform):
    """Replace each Python block of a page by the block, its output and its figures."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Run the blocks of this page."""
        blocks = [block for block in self.document.findall(nodes.literal_block) if block.get("language") == "python"]
        if not blocks or self.env.docname.startswith("reference/rooms/"):
            return
        import torch

        start, names = time.perf_counter(), {"__name__": "__page__"}
        with style.applied(), torch.random.fork_rng(devices=[]):
            matplotlib.use("agg")
            matplotlib.rcParams["image.cmap"] = SHADES.name
            torch.manual_seed(0)
            for number, block in enumerate(blocks, 1):
                self._run(block, names, f"{re.sub('[^a-z]', '-', self.env.docname)}-{number}")
        LOG.info(" %.1f s of examples", time.perf_counter() - start, nonl=True)

    def _run(self, block: nodes.literal_block, names: dict[str, Any], name: str) -> None:
        printed = io.StringIO()
        where = f"{self.env.doc2path(self.env.docname)}:{block.line}"
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(block.astext(), where, "exec"), names)
        except Exception as error:
            raise ExtensionError(f"{where}: the block raised {type(error).__name__}: {error}", error) from error
        shown = [_folded(block) if "folded" in block["classes"] else block.deepcopy()]
        if text := printed.getvalue().rstrip():
            output = nodes.literal_block(text, text, language="text", classes=["output"])
            shown.append(output)
        for number in pyplot.get_fignums():
            drawing = Figure(pyplot.figure(number), caption="", alt=_description(block))
            if not drawing.alt:
                raise ExtensionError(f"{where}: the figure needs a description, a comment (%) above the block")
            shown.append(nodes.raw("", f'<figure class="drawn">{embed(drawing, f"{name}-{number}")}</figure>', format="html"))
        pyplot.close("all")
        if "folded" in block["classes"]:  # the figure first, its code below
            shown = [*shown[1:], shown[0]]
        block.replace_self(shown)


def _description(block: nodes.Node) -> str:
    place = block.parent.index(block)
    before = block.parent[place - 1] if place else None
    return " ".join(before.astext().split()) if isinstance(before, nodes.comment) else ""


def _folded(block: nodes.literal_block) -> nodes.container:
    opened, closed = '<details class="folded"><summary>Code of this figure</summary>', "</details>"
    inner = block.deepcopy()
    return nodes.container("", nodes.raw("", opened, format="html"), inner, nodes.raw("", closed, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform."""
    app.add_transform(Execution)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}

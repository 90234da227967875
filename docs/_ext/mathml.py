"""Formulas as MathML, written at build: browsers draw it themselves, without a script and without a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

LOG = logging.getLogger(__name__)
SPELLINGS = {r"\big(": "(", r"\big)": ")", r"\big\|": r"\|", r"\tfrac": r"\frac", r"\dfrac": r"\frac"}
"""What the converter does not know, and what it does."""


def _mathml(node: nodes.Node, display: str) -> str:
    text = node.astext()
    for old, new in SPELLINGS.items():
        text = text.replace(old, new)
    try:
        return convert(text, display=display)
    except Exception as error:
        LOG.warning("cannot convert the formula %r: %s", text, error, location=node)
        return ""


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(f'<span class="math">{_mathml(node, "inline")}</span>')
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    parts = [part for part in re.split(r"\n\s*\n", node.astext()) if part.strip()]
    formulas = "".join(_mathml(nodes.math_block(part, part), "block") for part in parts)
    self.body.append(f'<div class="math">{formulas}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer; ``html_math_renderer`` chooses it."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""The site: Sphinx reads this. `make docs` builds it, `make check-site` clicks through it."""

import os
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
# The build waits for kernels, so that every page shows what the compiled library answers.
os.environ.setdefault("FENCHEL_KERNELS", "wait")
os.environ.setdefault("FENCHEL_QUIET", "1")

from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import fenchel  # noqa: E402
from fenchel_lab.drawing.style import THEME  # noqa: E402

# One signature per function: that of the implementation, not those of its overloads.
_analyze = ModuleAnalyzer.analyze
ModuleAnalyzer.analyze = lambda self: (_analyze(self), setattr(self, "overloads", {}))[0]

METADATA = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Fenchel"
author = "The Fenchel developers"
copyright = author
release = version = fenchel.__version__

extensions = [
    "executed",
    "gallery",
    "mathml",
    "myst_parser",
    "reference",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_ext", "explorer"]
templates_path = ["_templates"]
if (HERE / "explorer" / "index.html").exists():
    tags.add("explorer")  # noqa: F821 - Sphinx provides it
nitpicky = False
root_doc = "index"
html_math_renderer = "mathml"

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header", "config.cache"]

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_default_options = {"show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "code"
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"Fenchel {release}"
html_short_title = "Fenchel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("../../versions.js", {"defer": "defer"}), ("switcher.js", {"defer": "defer"})]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {
    "light_css_variables": {name: light for name, (light, _) in THEME.items()},
    "dark_css_variables": {name: dark for name, (_, dark) in THEME.items()},
    "navigation_with_keys": True,
    "footer_icons": [],
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Where the project is hosted, once `urls` in pyproject.toml says so.
REPOSITORY = METADATA.get("urls", {}).get("Repository", "")
if REPOSITORY:
    html_theme_options |= {"source_repository": REPOSITORY, "source_branch": "HEAD", "source_directory": "docs/"}


def _short_names(app, what, name, obj, options, signature, returns):
    """Write Tensor, not torch.Tensor, in signatures."""
    return tuple(text and re.sub(r"\btorch\.(?=Tensor\b)", "", text) for text in (signature, returns))


def _literal_bars(app, what, name, obj, options, lines):
    """In docstrings |x| and (*shape, n) are mathematics and Python, not markup."""
    inside = None  # the indentation of a formula, or -1 in an example, whose lines are left alone
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if inside is not None and (line.strip() if inside == -1 else not line.strip() or indent > inside):
            continue
        inside = indent if line.lstrip().startswith(".. math::") else -1 if line.lstrip().startswith(">>>") else None
        if inside is None:
            parts = re.split("(``.*?``)", line)
            parts[::2] = [re.sub(r"(?<!\\)\||(?<=[( ])\*(?=\w+[,)])", r"\\\g<0>", part) for part in parts[::2]]
            lines[number] = "".join(parts)


def _short_navigation(app, pagename, templatename, context, doctree):
    """Pages of single names are reached from the page of their room: two levels are enough for the sidebar."""
    if whole := context.get("toctree"):
        context["toctree"] = lambda **options: whole(**(options | {"maxdepth": 2}))


def _plain_properties(app, what, name, obj, options, lines) -> None:
    """Keep napoleon from reading the first line of a property, "The shape: one number per row", as a type."""
    if what in ("property", "attribute") and lines:
        lines[0] = re.sub(r"(?<!:):(?!:) ", " – ", lines[0])


def setup(app):
    """Connect what cleans signatures and docstrings and shortens the sidebar."""
    app.connect("html-page-context", _short_navigation, priority=400)
    app.connect("autodoc-process-signature", _short_names)
    app.connect("autodoc-process-docstring", _literal_bars)
    app.connect("autodoc-process-docstring", _plain_properties, priority=400)  # before napoleon

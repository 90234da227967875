"""What a study hands back: drawings that can be shown, tables that are rectangular."""

import io
import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from fenchel_lab.drawing import style
from fenchel_lab.report import Figure, Result, Table
from fenchel_lab.report.result import show


def line() -> Figure:
    with style.applied():
        drawing, (axes,) = style.panels(1, 1)
        axes.plot([0, 1], [0, 1], label="a line")
        axes.legend()
    return Figure(drawing, caption="A line", alt="It rises")


def test_svg_is_one_element_that_scales() -> None:
    root = ElementTree.fromstring(line().svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert width == pytest.approx(72 * style.WIDTH)
    assert height > 0


def test_svg_of_the_same_drawing_is_the_same_text() -> None:
    assert line().svg == line().svg


def test_png_shows_the_drawing() -> None:
    pixels = np.asarray(Image.open(io.BytesIO(line().png)).convert("RGB")).reshape(-1, 3)
    blue = [int(style.PALETTE[0][i : i + 2], 16) for i in (1, 3, 5)]
    assert (pixels == blue).all(1).sum() > 100
    assert (pixels == 255).all(1).mean() > 0.5


def test_a_row_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row \['x'\] has 1 cells, the header 2"):
        Table(["a", "b"], [["x"]], caption="")


@pytest.mark.parametrize("cell", [torch.tensor(1.0), np.float32(1), None])
def test_a_cell_that_is_no_text_or_number_is_refused(cell: object) -> None:
    with pytest.raises(TypeError, match=type(cell).__name__):
        Table(["a"], [[cell]], caption="")  # type: ignore[list-item]


def test_numbers_are_shown_short_with_a_true_minus() -> None:
    assert [show(x) for x in (-1.23456, 1e-7, math.inf, -math.inf, math.nan, -3, "a-b")] == [
        "−1.235",
        "1e−07",
        "∞",
        "−∞",
        "nan",
        "-3",
        "a-b",
    ]


def test_paragraphs_are_unwrapped() -> None:
    assert Result("\none\ntwo\n \n  three\n").paragraphs == ["one two", "three"]

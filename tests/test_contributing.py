"""CONTRIBUTING.md: the map of the rooms, and the three recipes, followed from outside the package."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fenchel
from fenchel import Gini, KSubsets, Norm, Regularizer, Shannon, Tsallis, kernels
from fenchel.regularizers.derivatives import on_support
from fenchel.regularizers.operators import register_map
from fenchel.regularizers.rowmap import ParameterMap

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCE = Path(fenchel.__file__).parent


# -- the map ---------------------------------------------------------------------------------------------------------


def test_the_map_has_every_room() -> None:
    table = PAGE[PAGE.index("## The rooms") : PAGE.index("### From a call")]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    listed = {name.removesuffix("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)}
    found = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed - {"src/fenchel"} == found - {"__init__.py", "__main__.py"}


def test_every_file_of_the_library_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    known = [path.as_posix() for folder in (SOURCE, Path(__file__).parent) for path in folder.rglob("*.py")]
    for name in named:
        if not name.startswith(("tests/", "lab/", "bench/", "chapters/", "docs/")):
            assert any(path.endswith(f"/{name}") for path in known), name


# -- a regularizer ---------------------------------------------------------------------------------------------------


class _SoftGiniMap(ParameterMap):
    """Ω(p) = (a/2)(‖p‖² − 1): sparsemax at temperature a, with a for its parameter."""

    name = "toy_soft_gini"

    def value(self, p: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        value: Tensor = a[0] * (p.square() - p).sum(-1, keepdim=True) / 2
        return value.squeeze(-1)

    def solve(self, z: Tensor, *a: Any) -> Tensor:
        return fenchel.sparsemax(z / a[0])

    def product(self, v: Tensor, z: Any, p: Tensor, *a: Any) -> Tensor:
        v, support = on_support(v, p), p != 0
        mean = v.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        return torch.where(support, (v - mean) / a[0], 0.0 * p)

    def value_sensitivity(self, z: Any, p: Tensor, *a: Any) -> Tensor:
        return (p.square() - p).sum(-1, keepdim=True) / 2

    def gradient_sensitivity(self, z: Any, p: Tensor, *a: Any) -> Tensor:
        return p


_RULE = _SoftGiniMap()
register_map(_RULE)


class SoftGini(Regularizer):
    rule = _RULE
    zero_at_vertices = True
    parameter_name = "softness"

    def __init__(self, softness: float | Tensor) -> None:
        super().__init__()
        self.softness = softness

    @property
    def parameter(self) -> float | Tensor:
        return self.softness


def test_a_regularizer_from_outside_has_maps_losses_and_derivatives() -> None:
    scores = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    softness = torch.rand(3, 1, dtype=torch.float64) + 0.5
    index, mask = torch.tensor([0, 2, 5]), torch.tensor([True, True, True, False, True, True])
    mine, theirs = SoftGini(softness), softness * Gini()
    for answer, expected in (
        (mine.argmax(scores, mask=mask), theirs.argmax(scores, mask=mask)),
        (mine.max(scores), theirs.max(scores)),
        (mine.loss(scores, index, mask=mask), theirs.loss(scores, index, mask=mask)),
        (fenchel.fy_loss(scores, index, mine), fenchel.fy_loss(scores, index, theirs)),
        (
            fenchel.attention(scores, scores, scores, SoftGini(0.5)),
            fenchel.attention(scores, scores, scores, 0.5 * Gini()),
        ),
    ):
        assert torch.allclose(answer, expected, atol=1e-13)
    softness = softness.requires_grad_()
    assert gradcheck(lambda s, a: SoftGini(a).argmax(s), (scores, softness))
    assert gradgradcheck(lambda s, a: SoftGini(a).max(s), (scores, softness))
    assert gradcheck(lambda s, a: SoftGini(a).loss(s, index), (scores, softness), check_forward_ad=True)
    compiled = torch.compile(lambda s: SoftGini(0.5).argmax(s), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(scores.detach()), (0.5 * Gini()).argmax(scores.detach()))


# -- a back end ------------------------------------------------------------------------------------------------------


def test_a_back_end_from_outside_is_a_row_of_the_table() -> None:
    seen = []

    def argmax(z: Tensor, alpha: float) -> Tensor:
        seen.append(alpha)
        return torch.softmax(torch.full_like(z, 0.0), -1)  # wrong on purpose: one sees who answered

    remove = kernels.register("argmax", "tsallis", argmax, device="cpu", dtypes=(torch.float64,), ranges=((1.7, 1.7),))
    scores = torch.randn(2, 4, dtype=torch.float64)
    try:
        assert torch.equal(fenchel.entmax(scores, 1.7), torch.full_like(scores, 0.25))
        assert seen == [1.7]
    finally:
        remove()
    assert not torch.equal(fenchel.entmax(scores, 1.7), torch.full_like(scores, 0.25))


# -- an engine -------------------------------------------------------------------------------------------------------


def choose_in_parts(omega: Regularizer, parts: Iterator[Tensor]) -> list[Tensor]:
    """argmax_Ω over scores that come in parts, of which no more is kept than may still have mass; one tensor a part."""
    omega, gamma = omega.canonical()
    kept: list[Tensor] = []
    line = None
    for part in parts:
        kept.append(part / gamma)
        line = omega.line(torch.cat(kept, -1))
        if line is None:
            raise ValueError(f"omega must have a line, below which nothing has mass, got {omega}")
        rounding = 1e-9 * (1 + line.abs())
        kept = [torch.where(each < line - rounding, -torch.inf, each) for each in kept]
    return list(omega.argmax(torch.cat(kept, -1)).split([each.shape[-1] for each in kept], -1))


@pytest.mark.parametrize("omega", [Gini(), Tsallis(1.3), 0.2 * Norm(3.0), KSubsets(3), 2.0 * KSubsets(1)], ids=str)
def test_an_engine_from_outside_asks_and_never_looks_at_types(omega: Regularizer) -> None:
    scores = torch.randn(4, 30, dtype=torch.float64)
    found = torch.cat(choose_in_parts(omega, iter(scores.split(7, -1))), -1)
    assert torch.allclose(found, omega.argmax(scores), atol=1e-12)


def test_an_engine_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="must have a line"):
        choose_in_parts(Shannon(), iter([torch.randn(3)]))

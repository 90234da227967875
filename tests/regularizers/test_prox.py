"""The proximal maps of fusedmax and oscarmax, against quadratic programs; their derivatives and masks."""

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fenchel
from fenchel import prox_oscar, prox_tv1d

MAPS = {
    prox_tv1d: lambda y: cvxpy.norm1(cvxpy.diff(y)) if y.size > 1 else 0,
    prox_oscar: lambda y: sum(cvxpy.maximum(y[i], y[j]) for i in range(y.size) for j in range(i)),
}
both = pytest.mark.parametrize("prox", MAPS, ids=lambda f: f.__name__)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solved(prox, row: np.ndarray, strength: float) -> np.ndarray:
    y = cvxpy.Variable(len(row))
    objective = cvxpy.sum_squares(y - row) / 2 + strength * MAPS[prox](y)
    cvxpy.Problem(cvxpy.Minimize(objective)).solve(
        solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11
    )
    return y.value


@both
@pytest.mark.parametrize("strength", [0.02, 0.3, 2.0, 100.0])
def test_it_solves_its_problem(prox, strength: float) -> None:
    scores = normal(3, 7) - 2.0
    wanted = torch.from_numpy(np.stack([solved(prox, row, strength) for row in scores.numpy()]))
    torch.testing.assert_close(prox(scores, strength), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prox(scores.t(), strength, dim=0).t(), prox(scores, strength))
    rows = torch.tensor([[strength], [0.0], [0.1]], dtype=torch.float64)
    each = prox(scores, rows)
    torch.testing.assert_close(each[0], prox(scores[0], strength))
    assert torch.equal(each[1], scores[1])
    torch.testing.assert_close(each[2], prox(scores[2], 0.1))


@both
def test_sparsemax_of_it_is_the_map(prox) -> None:
    choose = {prox_tv1d: fenchel.fusedmax, prox_oscar: fenchel.oscarmax}[prox]
    scores = normal(20, 9, seed=1)
    mask = normal(20, 9, seed=2) > -1
    for strength in (0.0, 0.05, 0.4):
        y = prox(scores, strength, mask=mask)
        torch.testing.assert_close(fenchel.sparsemax(y, mask=mask), choose(scores, strength, mask=mask))


@both
def test_masked_entries_are_left_out(prox) -> None:
    scores = normal(6, seed=3)
    kept = torch.tensor([0, 1, 3, 5])
    mask = torch.zeros(6, dtype=torch.bool).index_fill(0, kept, True)
    hidden = torch.where(mask, scores, torch.nan)
    y = prox(hidden, 0.3, mask=mask)
    torch.testing.assert_close(y[kept], prox(scores[kept], 0.3))
    assert (y[~mask] == 0).all()
    assert torch.equal(prox(torch.where(mask, scores, -torch.inf), 0.3), y)
    assert (prox(torch.full((2, 3), -torch.inf), 0.3) == 0).all()
    spoilt = normal(2, 4)
    spoilt[0, 1] = torch.nan
    assert prox(spoilt, 0.3)[0].isnan().all()
    assert prox(spoilt, 0.3)[1].isfinite().all()
    assert prox(torch.zeros(0, 4), 0.3).shape == (0, 4)
    assert prox(torch.zeros(3, 1).bfloat16(), 0.3).dtype == torch.bfloat16


@both
def test_derivatives(prox) -> None:
    scores, strength = normal(3, 6, seed=4).requires_grad_(), torch.tensor([[0.2], [0.5], [1.5]]).double()
    strength.requires_grad_()
    mask = torch.ones(6, dtype=torch.bool)
    mask[2] = False
    assert gradcheck(lambda s, t: prox(s, t, mask=mask), (scores, strength))
    assert gradgradcheck(lambda s, t: prox(s, t, mask=mask), (scores, strength))


@both
def test_bad_input_is_named(prox) -> None:
    with pytest.raises(ValueError, match="0 <= strength < inf"):
        prox(torch.zeros(3), -1.0)
    with pytest.raises(TypeError, match="scores must be a floating-point tensor"):
        prox(torch.zeros(3).long())


def test_the_limit_of_entmax_at_alpha_zero_is_custom() -> None:
    scores = torch.tensor([1.0, 0.3, -2.0], dtype=torch.float64)
    p = fenchel.Custom(lambda p: -p.log().sum(-1)).argmax(scores)
    tau = 1 / p + scores  # p = 1/(τ − s)
    torch.testing.assert_close(tau, tau[:1].expand(3), rtol=1e-8, atol=0)
    torch.testing.assert_close(p, fenchel.entmax(scores, 1e-6), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"0 < alpha <= inf, got 0\.0"):
        fenchel.entmax(scores, 0.0)

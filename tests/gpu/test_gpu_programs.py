"""Chains and alignments by the kernels for GPUs: against enumeration, finite differences, and the torch recursion."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fenchel import Gini, Regularizer, Shannon, Tsallis, kernels
from fenchel.dp import Alignment, LinearChain
from fenchel.kernels.gpu.launch import STARTED

sys.path.append(str(Path(__file__).parents[1] / "dp"))
from enumeration import EMPTY, FULL, SHARED, TABLE, Problem

each_problem = pytest.mark.parametrize("problem", [SHARED, FULL, EMPTY, TABLE], ids=str)
each_omega = pytest.mark.parametrize("omega", [0.6 * Shannon(), 2.0 * Gini()], ids=str)


def kernels_of(problem: Problem) -> tuple[str, str, str]:
    name = "alignment" if problem is TABLE else "chain"
    return f"{name}_kernel", f"{name}_gradient_kernel", f"{name}_hessian_kernel"


@each_problem
@each_omega
def test_values_and_marginals_are_those_of_all_paths(problem: Problem, omega: Regularizer) -> None:
    tensors = problem.tensors()
    d = problem.build(*tensors, omega)
    answers = problem.answers(tensors, omega, 3)
    expected = torch.tensor([problem.sign * a.value for a in answers], dtype=torch.float64)
    torch.testing.assert_close(d.value, expected, rtol=1e-13, atol=1e-13)
    marginals = torch.stack([a.marginals(d.marginals[0].numel()) for a in answers])
    torch.testing.assert_close(d.marginals.flatten(1), marginals, rtol=1e-13, atol=1e-13)
    assert set(kernels_of(problem)[:2]) <= set(STARTED)


@each_problem
@each_omega
def test_derivatives_are_those_of_finite_differences(problem: Problem, omega: Regularizer) -> None:
    tensors = problem.tensors(1)
    directions = [torch.randn_like(t) for t in tensors]

    def along(name: str) -> Tensor:
        moved = [[t + e * d for t, d in zip(tensors, directions, strict=True)] for e in (1e-6, -1e-6)]
        ahead, behind = (getattr(problem.build(*each, omega), name) for each in moved)
        return (ahead - behind) / 2e-6

    for name in ("value", "marginals", "transition_marginals")[: 2 if problem is TABLE else 3]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        result = getattr(problem.build(*leaves, omega), name)
        weight = torch.randn_like(result)
        found = torch.autograd.grad(result, leaves, weight)
        slope = sum((f * d).sum() for f, d in zip(found, directions, strict=True))
        torch.testing.assert_close(slope, (weight * along(name)).sum(), rtol=1e-6, atol=1e-6)
    assert set(kernels_of(problem)) <= set(STARTED)


def both_ways(build: object, *tensors: Tensor) -> list[list[Tensor]]:
    """Values, marginals, and derivatives of both, from the kernels and from the recursion in torch operations."""
    found = []
    for on in (True, False):
        with kernels.enabled(on):
            given = [t.clone().requires_grad_() for t in tensors]
            d = build(*given)
            results = [d.value, d.marginals]
            for each in (d.value, d.marginals):
                weight = torch.linspace(-1, 2, each.numel(), dtype=each.dtype).reshape(each.shape)
                results += torch.autograd.grad((weight * each).sum(), given)
            found.append(results)
    return found


@pytest.mark.parametrize(("states", "shared"), [(1, True), (70, True), (70, False)])
@pytest.mark.parametrize("omega", [0.5 * Shannon(), Gini()], ids=str)
def test_many_states_are_handled_by_tiles(states: int, shared: bool, omega: Regularizer) -> None:
    unary = torch.randn(2, 4, states, dtype=torch.float64)
    transition = torch.randn(states, states, dtype=torch.float64)
    transition = transition if shared else transition + torch.randn(2, 3, states, states, dtype=torch.float64)
    lengths = torch.tensor([4, 2])
    for a, b in zip(*both_ways(lambda u, w: LinearChain(u, w, lengths, omega=omega), unary, transition), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert {"chain_kernel", "chain_gradient_kernel", "chain_hessian_kernel"} <= set(STARTED)


@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (17, 3), (4, 5)], ids=str)
@pytest.mark.parametrize("omega", [0.5 * Shannon(), Gini()], ids=str)
def test_tables_of_every_shape(shape: tuple[int, int], omega: Regularizer) -> None:
    costs = torch.rand(2, *shape, dtype=torch.float64)
    lengths = torch.tensor([shape, [max(shape[0] - 1, 1), max(shape[1] - 3, 1)]])
    band = 1 if shape == (4, 5) else None
    for a, b in zip(*both_ways(lambda c: Alignment(c, lengths, omega, band), costs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert {"alignment_kernel", "alignment_gradient_kernel", "alignment_hessian_kernel"} <= set(STARTED)


@each_omega
def test_scores_far_apart_and_forbidden_ones(omega: Regularizer) -> None:
    """Sums are kept in double precision; forbidden parts contribute nothing, and a chain without a path has zeros."""
    unary, transition = 1e4 * torch.randn(3, 6, 5), 1e4 * torch.randn(5, 5)
    transition[0], unary[1, 2], unary[0, :, 4] = -torch.inf, -torch.inf, -torch.inf
    d, exact = (LinearChain(u, transition.to(u.dtype), omega=omega) for u in (unary, unary.double()))
    torch.testing.assert_close(d.value.double(), exact.value, rtol=1e-6, atol=0)
    torch.testing.assert_close(d.marginals.double(), exact.marginals, rtol=1e-5, atol=1e-6)
    assert d.value[1] == -torch.inf
    assert bool((d.marginals[1] == 0).all() & (d.marginals[0, :, 4] == 0).all())
    costs = torch.rand(2, 4, 5)
    costs[0, 1:3, 1:] = torch.inf
    costs[1, -1, -1] = torch.inf
    table = Alignment(costs, omega=omega)
    assert table.value[1] == torch.inf
    assert bool((table.marginals[0, 1:3, 1:] == 0).all() & (table.marginals[1] == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_spoilt_element_spoils_itself_alone(bad: float) -> None:
    for problem in (SHARED, FULL, TABLE):
        first, *rest = problem.tensors()
        clean = problem.build(first, *rest, Gini())
        spoilt = first.clone()
        spoilt[0, 0, 0] = problem.sign * bad
        spoilt.requires_grad_()
        d = problem.build(spoilt, *rest, Gini())
        assert bool(d.value[0].isnan() & d.marginals[0].isnan().all())
        assert torch.equal(d.value[1:], clean.value[1:])
        assert torch.equal(d.marginals[1:], clean.marginals[1:])
        (grad,) = torch.autograd.grad(d.marginals[1:].square().sum(), spoilt)
        assert bool((grad[0] == 0).all() & grad.isfinite().all())


def test_hundreds_of_steps_lose_no_mass() -> None:
    chain = LinearChain(torch.randn(1, 150, 2), torch.randn(2, 2))
    torch.testing.assert_close(chain.marginals.sum(-1), torch.ones(1, 150), rtol=0, atol=2e-7)
    assert STARTED["chain_gradient_kernel"] == 1


def test_what_the_kernels_do_not_serve_is_computed_elsewhere() -> None:
    LinearChain(torch.randn(1, 2, 3), torch.randn(3, 3)).value  # noqa: B018 (this one is served)
    before = dict(STARTED)
    large = LinearChain(torch.zeros(1, 2, 129), torch.zeros(129, 129))
    torch.testing.assert_close(large.value, torch.tensor([2 * math.log(129)]))
    other = LinearChain(torch.zeros(1, 2, 4), torch.zeros(4, 4), omega=Tsallis(1.5))
    assert bool(other.value.isfinite().all() & other.marginals.isfinite().all())
    assert dict(STARTED) == before
    LinearChain(torch.randn(1, 2, 3), torch.randn(3, 3)).value  # noqa: B018 (and is so afterwards)
    assert STARTED["chain_kernel"] == before["chain_kernel"] + 1


@pytest.mark.parametrize("step", ["forward", "gradient", "hessian_product"])
def test_a_kernel_that_fails_says_so_once_and_torch_takes_its_place(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LinearChain(torch.randn(1, 2, 3), torch.randn(3, 3)).value  # noqa: B018 (the kernel is in the table)
    table = kernels.table._table["chain", "tsallis"]
    before = list(table)
    unary, transition = torch.randn(2, 3, 3), torch.randn(3, 3)

    def build(*tensors: Tensor) -> LinearChain:
        return LinearChain(*tensors)

    expected = both_ways(build, unary, transition)[1]

    def fail(*_: object, **__: object) -> None:
        raise kernels.NotCompiledError("made to fail")

    (guarded,) = {row.kernel for row in table if isinstance(row.kernel, kernels.table._Guarded)}
    monkeypatch.setattr(guarded.kernel, step, fail)
    try:
        with pytest.warns(UserWarning, match="made to fail"):
            found = both_ways(build, unary, transition)[0]
        both_ways(build, unary, transition)  # and no warning, which would be an error
    finally:
        table[:] = before
        kernels.table._found.clear()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_script_for_whoever_has_a_gpu_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "lab" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert "| chain of 4 steps, 3 states, Gini |" in printed
    assert "| tokens, causal, both passes | SDPA | entmax attention, α 1.5 | adasplash |" in printed

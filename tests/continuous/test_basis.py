"""Bases and value functions beside scipy's densities and scikit-learn's ridge regression."""

import copy
import pickle

import numpy as np
import pytest
import scipy.stats as st
import torch
from torch import Tensor, nn

from fenchel.continuous import FunctionBasis, GaussianBasis


def test_functions_are_scipys_normal_densities() -> None:
    covariances = torch.tensor([[[0.3, 0.1], [0.1, 0.2]], [[1.0, 0.0], [0.0, 0.5]]], dtype=torch.float64)
    basis = GaussianBasis(torch.tensor([[0.0, 1.0], [0.5, 0.2]], dtype=torch.float64), covariances)
    t = torch.randn(5, 3, 2, dtype=torch.float64)
    for j in range(2):
        peer = st.multivariate_normal(basis.centers[j].numpy(), covariances[j].numpy())
        np.testing.assert_allclose(basis(t)[..., j], peer.pdf(t.numpy()), rtol=1e-12)


def test_lines_and_grids_have_centres_and_widths() -> None:
    line = GaussianBasis.line(6, widths=(0.1, 0.5))
    assert line.centers.flatten().tolist() == [0.0, 0.5, 1.0, 0.0, 0.5, 1.0]
    assert torch.allclose(line.covariances.flatten(), torch.tensor([0.01, 0.01, 0.01, 0.25, 0.25, 0.25]))
    grid = GaussianBasis.grid(2, 3, widths=(0.2,))
    assert (len(grid), grid.dim) == (6, 2)
    assert grid.centers.tolist() == [[0.0, 0.0], [0.0, 0.5], [0.0, 1.0], [1.0, 0.0], [1.0, 0.5], [1.0, 1.0]]
    assert len(GaussianBasis.grid(10, widths=(0.1, 0.3))) == 200


def middles(length: int) -> np.ndarray:
    return (np.arange(length) + 0.5) / length


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 40])  # fewer and more values than functions: two systems, one answer
def test_value_functions_are_ridge_regressions(length: int) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    basis = GaussianBasis.line(12, widths=(0.1, 0.5)).double()
    values = torch.randn(length, 3, dtype=torch.float64)
    features = basis(torch.from_numpy(middles(length)).unsqueeze(-1))
    peer = linear.Ridge(alpha=0.2, fit_intercept=False).fit(features, values)
    function = basis.fit(values, ridge=0.2)
    np.testing.assert_allclose(function.coefficients, peer.coef_.T, rtol=1e-7, atol=1e-9)
    t = torch.rand(4, 1, dtype=torch.float64)
    np.testing.assert_allclose(function(t), peer.predict(basis(t)), rtol=1e-7, atol=1e-9)


def test_padding_and_what_stands_there_do_not_matter() -> None:
    basis = GaussianBasis.line(8, widths=(0.1,)).double()
    values = torch.randn(3, 10, 2, dtype=torch.float64)
    lengths = [10, 4, 7]
    mask = torch.arange(10) < torch.tensor(lengths).unsqueeze(-1)
    spoilt = values.masked_fill(~mask.unsqueeze(-1), torch.nan)
    found = basis.fit(spoilt, mask).coefficients
    for row, length in enumerate(lengths):
        assert torch.allclose(found[row], basis.fit(values[row, :length]).coefficients, atol=1e-12)


def test_a_mask_with_holes_leaves_the_others_in_place() -> None:
    basis = GaussianBasis.line(8, widths=(0.1,)).double()
    values = torch.randn(6, 2, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False, False])
    positions = torch.from_numpy(middles(4)).unsqueeze(-1)
    kept = [0, 2, 3]
    wanted = basis.fit(values[kept], positions=positions[kept]).coefficients
    assert torch.allclose(basis.fit(values, mask).coefficients, wanted, atol=1e-12)


def test_positions_may_be_irregular_and_differ_by_row() -> None:
    basis = GaussianBasis.grid(3).double()
    values, positions = torch.randn(4, 9, 2, dtype=torch.float64), torch.rand(4, 9, 2, dtype=torch.float64)
    found = basis.fit(values, positions=positions).coefficients
    for row in range(4):
        alone = basis.fit(values[row], positions=positions[row]).coefficients
        assert torch.allclose(found[row], alone, atol=1e-12)


def test_images_are_read_row_by_row() -> None:
    basis = GaussianBasis.grid(4).double()
    image = torch.randn(6, 1, dtype=torch.float64)
    rows, columns = np.meshgrid(middles(2), middles(3), indexing="ij")
    positions = torch.from_numpy(np.stack([rows.ravel(), columns.ravel()], -1))
    found = basis.fit(image, shape=(2, 3)).coefficients
    assert torch.allclose(found, basis.fit(image, positions=positions).coefficients, atol=1e-12)
    mask = torch.tensor([True, True, False, True, True, True])
    masked = basis.fit(image, mask, shape=(2, 3)).coefficients
    assert torch.allclose(masked, basis.fit(image[mask], positions=positions[mask]).coefficients, atol=1e-12)


def test_matrices_are_kept_by_length_until_the_basis_changes() -> None:
    basis = GaussianBasis.line(8, widths=(0.1,))
    first = basis.weights((20,))
    assert basis.weights((20,)) is first
    assert basis.weights((21,)) is not first
    assert basis.weights((20,), ridge=0.3) is not first
    with torch.no_grad():
        basis.centers += 0.1
    changed = basis.weights((20,))
    assert not torch.allclose(changed, first)
    assert basis.double().weights((20,)).dtype == torch.float64
    assert "_cache" not in basis.state_dict()
    assert set(basis.state_dict()) == {"centers", "covariances"}


def test_matrices_that_are_kept_fit_into_so_many_bytes() -> None:
    basis = GaussianBasis.line(8, widths=(0.1,))
    basis.cache_bytes = 3000  # 32 bytes per row: 93 rows
    for length in (10, 20, 30, 40, 50):
        latest = basis.weights((length,))
        assert sum(kept[0].nbytes for kept in basis._cache.values()) <= 3000
        assert basis.weights((length,)) is latest
    assert len(basis._cache) == 2  # of 40 and 50: what came before made room


def test_a_trained_basis_has_gradients() -> None:
    centers = nn.Parameter(torch.rand(3, 1, dtype=torch.float64))
    basis = GaussianBasis(centers, torch.full((3, 1, 1), 0.04, dtype=torch.float64))
    assert [name for name, _ in basis.named_parameters()] == ["centers"]

    def fit(centers: Tensor, values: Tensor) -> Tensor:
        return GaussianBasis(centers, basis.covariances).fit(values).coefficients

    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fit, (centers, values))
    assert torch.autograd.gradgradcheck(fit, (centers, values))


def test_bad_input_is_named() -> None:
    eye = torch.eye(2).unsqueeze(0)
    with pytest.raises(ValueError, match="covariances must be symmetric and positive definite"):
        GaussianBasis(torch.zeros(1, 2), -eye)
    with pytest.raises(ValueError, match=r"covariances must have shape \(1, 2, 2\)"):
        GaussianBasis(torch.zeros(1, 2), torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="centers must have shape"):
        GaussianBasis(torch.zeros(0, 2), eye[:0])
    with pytest.raises(TypeError, match="centers must be a floating-point tensor"):
        GaussianBasis(torch.zeros(1, 2, dtype=torch.long), eye)
    with pytest.raises(ValueError, match="multiple of the number of widths"):
        GaussianBasis.line(7, widths=(0.1, 0.5))
    with pytest.raises(ValueError, match="widths"):
        GaussianBasis.line(2, widths=(0.0,))
    basis = GaussianBasis.line(4)
    with pytest.raises(ValueError, match="not be empty"):
        basis.fit(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="not be empty"):
        basis.regression(torch.zeros(0, 1))
    with pytest.raises(ValueError, match="ridge must satisfy 0 < ridge < inf, got 0"):
        basis.fit(torch.zeros(3, 2), ridge=0.0)
    with pytest.raises((TypeError, ValueError), match="mask must"):
        basis.fit(torch.zeros(3, 2), torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"t must have shape \(…, 1\)"):
        basis(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="give positions, or a shape"):
        GaussianBasis.grid(3).fit(torch.zeros(6, 2))


def test_what_was_fitted_in_inference_mode_can_be_trained_on() -> None:
    basis, values = GaussianBasis.line(8), torch.randn(10, 3, requires_grad=True)
    with torch.inference_mode():
        basis.fit(values.detach())
        made_there = GaussianBasis.line(8)
        assert torch.equal(made_there.weights((10,)), basis.weights((10,)))
    basis.fit(values).coefficients.sum().backward()
    assert values.grad.isfinite().all()


def test_copies_do_not_inherit_what_was_kept() -> None:
    # Kept matrices are found by the identity of tensors, which means nothing in a copy.
    basis = GaussianBasis.line(8)
    wanted = basis.weights((10,))
    for copied in (copy.deepcopy(basis), pickle.loads(pickle.dumps(basis))):
        assert not copied._cache
        assert torch.equal(copied.weights((10,)), wanted)
    assert basis._cache


def test_sizes_that_do_not_fit_are_named() -> None:
    basis = GaussianBasis.line(4)
    with pytest.raises(ValueError, match=r"mask must have shape \(…, 5\), got \(4,\)"):
        basis.regression(torch.rand(5, 1), torch.ones(4, dtype=torch.bool))
    with pytest.raises((TypeError, ValueError), match="mask must"):
        basis.regression(torch.rand(5, 1), torch.ones(5))
    with pytest.raises(ValueError, match="positions must be those of 5 values"):
        basis.fit(torch.randn(5, 3), positions=torch.rand(6, 1))
    with pytest.raises(TypeError, match="widths must be a sequence"):
        GaussianBasis.line(4, widths=0.1)
    with pytest.raises(TypeError, match="widths must be a sequence"):
        GaussianBasis.grid(4, widths=0.1)


class _Powers(nn.Module):
    """1, t and t² with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, t: Tensor) -> Tensor:
        return torch.cat([self.factor * t**k for k in range(3)], -1)


def test_any_module_is_a_basis_with_regression_as_least_squares() -> None:
    basis = FunctionBasis(_Powers().double())
    assert (len(basis), basis.dim) == (3, 1)
    values = torch.randn(2, 7, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    found = basis.fit(values, mask, ridge=0.1).coefficients
    for row, count in enumerate((7, 5)):
        t = (np.arange(count) + 0.5) / count
        rows = np.concatenate([np.stack([t**0, t, t**2], -1), np.sqrt(0.1) * np.eye(3)])
        target = np.concatenate([values[row, :count].numpy(), np.zeros((3, 4))])
        np.testing.assert_allclose(
            found[row].detach().numpy(), np.linalg.lstsq(rows, target, rcond=None)[0], atol=1e-10
        )


def test_the_parameters_of_a_module_get_gradients_through_the_regression() -> None:
    module = _Powers().double()
    basis, values = FunctionBasis(module), torch.randn(5, 2, dtype=torch.float64)

    def loss(factor: float) -> Tensor:
        module.factor.data.fill_(factor)
        return basis.fit(values).coefficients.square().sum()

    loss(1.3).backward()
    slope = (loss(1.3 + 1e-6) - loss(1.3 - 1e-6)) / 2e-6
    assert module.factor.grad is not None
    torch.testing.assert_close(module.factor.grad, slope.detach(), rtol=1e-6, atol=1e-8)


def test_modules_that_return_no_functions_are_refused() -> None:
    with pytest.raises(TypeError, match="function must be a module"):
        FunctionBasis(torch.sin)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"function must return ψ\(t\)"):
        FunctionBasis(torch.nn.Flatten(0))

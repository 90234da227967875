"""Map modules: drop-in for Softmax; alpha fixed, given as a parameter, or learned inside its bounds."""

import io
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close

import fenchel
from copies import COPIES
from fenchel import Gini, Hard, Norm, Regularizer, Shannon, Tsallis
from fenchel.nn import Argmax, Entmax, Fusedmax, Normmax, Oscarmax, Softmax, Sparsemax, TVmax2d

EXACT = {"atol": 1e-13, "rtol": 1e-12}


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_softmax_is_torchs(dim: int) -> None:
    scores = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = Softmax(dim)(scores), nn.Softmax(dim)(scores)
    assert_close(ours, theirs, **EXACT)
    direction = torch.randn_like(ours)
    slopes = [torch.autograd.grad(p, scores, direction)[0] for p in (ours, theirs)]
    assert_close(*slopes, **EXACT)


def test_a_masked_softmax_is_torchs_of_the_rest() -> None:
    scores, mask = torch.randn(3, 4, dtype=torch.float64), torch.tensor([True, False, True, True])
    p = Softmax()(scores, mask)
    assert_close(p[:, mask], nn.Softmax(-1)(scores[:, mask]), **EXACT)
    assert (p[:, ~mask] == 0).all()


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (Sparsemax, fenchel.sparsemax),
        (Entmax, fenchel.entmax),
        (Normmax, fenchel.normmax),
        (Argmax, fenchel.argmax),
        (lambda dim: Entmax(1.2, dim), lambda s, dim, mask: fenchel.entmax(s, 1.2, dim, mask)),
        (lambda dim: Normmax(5.0, dim), lambda s, dim, mask: fenchel.normmax(s, 5.0, dim, mask)),
        (lambda dim: Argmax(Norm(3), dim), lambda s, dim, mask: fenchel.normmax(s, 3, dim, mask)),
        (lambda dim: Argmax(0.5 * Gini(), dim), lambda s, dim, mask: fenchel.sparsemax(2 * s, dim, mask)),
    ],
)
def test_modules_are_their_functions(module: Any, function: Any) -> None:
    scores, mask = torch.randn(3, 4, 5, dtype=torch.float64), torch.rand(3, 4, 5) < 0.7
    for dim in (0, 1, -1):
        layer = module(dim=dim)
        assert torch.equal(layer(scores), function(scores, dim=dim, mask=None))
        assert torch.equal(layer(scores, mask), function(scores, dim=dim, mask=mask))
        assert not list(layer.parameters())
        assert not layer.state_dict()


def test_they_fit_into_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Sparsemax(dim=-1), nn.Linear(6, 2), Entmax(1.5, dim=-1))
    theirs = nn.Sequential(nn.Linear(4, 6), nn.Softmax(dim=-1), nn.Linear(6, 2), nn.Softmax(dim=-1))
    model.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(model.state_dict(), strict=True)
    model(torch.randn(3, 4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# -- a learnable alpha ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0001, 1.01, 1.2, 1.5, 1.75, 1.99, 1.9999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_learnable_alpha_starts_where_it_is_told(alpha: float, dtype: torch.dtype) -> None:
    layer = Entmax(torch.tensor(alpha, dtype=dtype), learnable=True)
    assert_close(layer.omega.alpha.detach(), torch.tensor(alpha, dtype=dtype), atol=0, rtol=4 * torch.finfo(dtype).eps)
    scores = torch.randn(3, 5, dtype=dtype)
    assert_close(layer(scores), fenchel.entmax(scores, alpha), atol=1e-5, rtol=1e-5)


def test_other_bounds_and_shapes() -> None:
    layer = Entmax(2.5, learnable=True, bounds=(2.0, 4.0), shape=(3, 1, 1))
    assert layer.omega.alpha.shape == (3, 1, 1)
    assert_close(layer.omega.alpha.detach(), torch.full((3, 1, 1), 2.5))
    each = torch.tensor([1.2, 1.8]).reshape(2, 1, 1)
    assert_close(Entmax(each, learnable=True).omega.alpha.detach(), each)
    assert_close(Entmax(each, learnable=True, shape=(3, 2, 1, 1)).omega.alpha.detach(), each.expand(3, 2, 1, 1))
    assert Entmax(0.5, learnable=True, bounds=(0.25, 0.75)).omega.alpha.item() == 0.5
    parameter = nn.Parameter(torch.tensor(1.25))
    assert_close(Entmax(parameter, learnable=True).omega.alpha.detach(), torch.tensor(1.25))


@given(
    raw=st.one_of(st.floats(-1e4, 1e4), st.sampled_from([100.0, -100.0, 1e30, -1e30, 17.0, -17.0])),
    bounds=st.tuples(st.floats(0.1, 3), st.floats(0.05, 3)).map(lambda b: (round(b[0], 2), round(b[0] + b[1], 2))),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=30)
def test_alpha_stays_inside_its_bounds_whatever_the_raw_parameter(
    raw: float, bounds: tuple[float, float], dtype: torch.dtype
) -> None:
    low, high = bounds
    layer = Entmax((low + high) / 2, learnable=True, bounds=bounds).to(dtype)
    with torch.no_grad():
        layer.omega.raw_alpha.fill_(raw)
    alpha = layer.omega.alpha
    limits = torch.tensor(bounds, dtype=alpha.dtype)
    assert limits[0] <= alpha <= limits[1]
    p = layer(torch.tensor([0.3, 0.1, -0.2, 1.0], dtype=dtype))
    p.float().square().sum().backward()
    assert layer.omega.raw_alpha.grad.isfinite()
    if abs(raw) < 5:
        assert limits[0] < alpha < limits[1]


def test_alpha_does_not_leave_its_bounds_by_rounding() -> None:
    generator = random.Random(0)
    for dtype in (torch.float32, torch.float64):
        for _ in range(300):
            low = round(generator.uniform(0.1, 3), 2)
            high = round(low + generator.uniform(0.05, 3), 2)
            omega = Tsallis(torch.tensor((low + high) / 2, dtype=dtype), learnable=True, bounds=(low, high))
            with torch.no_grad():
                ends = []
                for raw in (-100.0, 100.0):
                    omega.raw_alpha.fill_(raw)
                    ends.append(omega.alpha)
            assert torch.tensor(low, dtype=dtype) <= ends[0] <= ends[1] <= torch.tensor(high, dtype=dtype), (low, high)


@pytest.mark.parametrize("raw", [-100.0, 100.0])
def test_gradients_are_finite_where_the_sigmoid_is_flat(raw: float) -> None:
    layer = Entmax(1.5, learnable=True, shape=(2, 1))
    with torch.no_grad():
        layer.omega.raw_alpha.fill_(raw)
    scores = torch.randn(2, 5, requires_grad=True)
    p = layer(scores)
    p.square().sum().backward()
    assert layer.omega.raw_alpha.grad.isfinite().all()
    assert scores.grad.isfinite().all()
    assert_close(p, torch.softmax(scores, -1) if raw < 0 else fenchel.sparsemax(scores))


def test_the_gradient_reaches_the_raw_parameter() -> None:
    layer = Entmax(1.3, learnable=True, shape=(2, 1)).double()
    scores = torch.tensor([[0.3, 0.1, -0.05], [0.2, 0.0, 0.1]], dtype=torch.float64)

    def choose(raw: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"omega.raw_alpha": raw}, (scores,))

    assert gradcheck(choose, (layer.omega.raw_alpha,))


def test_gradient_descent_moves_every_alpha_its_own_way() -> None:
    layer = Entmax(1.5, learnable=True, shape=(2, 1))
    scores = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]])
    wanted = torch.tensor([1.1, 1.9])[:, None]
    target = fenchel.entmax(scores, wanted)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.2)
    for _ in range(80):
        optimizer.zero_grad()
        (layer(scores) - target).square().sum().backward()
        optimizer.step()
    assert_close(layer.omega.alpha.detach(), wanted, atol=0.05, rtol=0)


def test_one_alpha_a_head() -> None:
    layer = Entmax(torch.tensor([1.0001, 1.5, 1.9999]).reshape(3, 1, 1), learnable=True)
    scores = torch.randn(2, 3, 4, 5)
    p = layer(scores)
    for h, alpha in enumerate((1.0001, 1.5, 1.9999)):
        assert_close(p[:, h], fenchel.entmax(scores[:, h], alpha), atol=1e-5, rtol=1e-5)


# -- what is kept ---------------------------------------------------------------------------------------


def test_a_fixed_alpha_is_not_in_the_state_dict_and_a_learnable_one_is() -> None:
    for fixed in (Entmax(1.5), Entmax(torch.tensor(1.5)), Entmax(torch.full((3, 1), 1.5)), Normmax(torch.tensor(2.0))):
        assert not fixed.state_dict()
        assert not list(fixed.parameters())
    learnable = Entmax(1.5, learnable=True)
    (key,) = learnable.state_dict()
    assert key.endswith("raw_alpha")
    assert len(list(learnable.parameters())) == 1


def test_a_parameter_is_trained_as_it_is() -> None:
    for module, value in ((Entmax, 1.4), (Normmax, 2.5)):
        alpha = nn.Parameter(torch.tensor(value))
        layer = module(alpha)
        (held,) = layer.parameters()
        assert held is alpha
        (key,) = layer.state_dict()
        assert key.endswith("alpha")
        layer(torch.tensor([0.3, 0.1, -0.2])).square().sum().backward()
        assert alpha.grad is not None
        assert alpha.grad != 0


def test_a_fixed_tensor_alpha_moves_with_the_module() -> None:
    for layer in (Entmax(torch.tensor([[1.2], [1.8]])), Normmax(torch.tensor([[1.2], [1.8]]))):
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
            assert layer.to(dtype).omega.alpha.dtype == dtype
            assert layer(torch.randn(2, 5).to(dtype)).dtype == dtype
        assert layer.to("meta").omega.alpha.is_meta


def test_learned_alphas_survive_their_state_dict() -> None:
    layer = Entmax(1.5, learnable=True, shape=(3, 1))
    with torch.no_grad():
        layer.omega.raw_alpha.copy_(torch.randn(3, 1))
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = Entmax(1.1, learnable=True, shape=(3, 1))
    other.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    scores = torch.randn(3, 5)
    assert torch.equal(other(scores), layer(scores))


@pytest.mark.parametrize(
    "layer",
    [
        Softmax(),
        Sparsemax(1),
        Argmax(),
        Entmax(1.3),
        Entmax(torch.tensor(1.3)),
        Entmax(nn.Parameter(torch.tensor(1.3))),
        Entmax(1.3, learnable=True, shape=(3, 1)),
        Normmax(3.0),
        Argmax(0.5 * Tsallis(1.2)),
    ],
    ids=lambda m: repr(m).replace("\n", ""),
)
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_equal_and_independent(layer: Argmax, how: str) -> None:
    copied = COPIES[how](layer)
    scores = torch.randn(3, 5)
    before = layer(scores)
    assert torch.equal(copied(scores), before)
    assert repr(copied) == repr(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(0.2)
    assert torch.equal(layer(scores), before)


@pytest.mark.parametrize(
    "layer", [Softmax(), Sparsemax(), Entmax(1.5, learnable=True), Normmax()], ids=lambda m: type(m).__name__
)
def test_half_and_double(layer: nn.Module) -> None:
    scores = torch.randn(4, 6)
    expected = layer(scores)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        p = layer.to(dtype)(scores.to(dtype))
        assert p.dtype == dtype
        assert_close(p.float(), expected, atol=tolerance * 2, rtol=tolerance * 2)
    layer.float()


def test_a_learnable_alpha_compiles() -> None:
    torch._dynamo.reset()
    layer = Entmax(1.5, learnable=True, shape=(3, 1))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    scores = torch.randn(3, 5)
    assert_close(compiled(scores), layer(scores))
    slopes = [torch.autograd.grad(f(scores).square().sum(), layer.omega.raw_alpha) for f in (compiled, layer)]
    assert_close(*slopes)


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (Softmax(1), ["Softmax(", "dim=1"]),
        (Sparsemax(), ["Sparsemax(", "dim=-1"]),
        (Argmax(), ["Argmax(", "Hard()"]),
        (Entmax(1.25, 0), ["Entmax(", "alpha=1.25", "dim=0"]),
        (Entmax(torch.tensor(1.25)), ["alpha=1.25"]),
        (Entmax(torch.full((3, 1), 1.25)), ["(3, 1)"]),
        (Entmax(1.75, learnable=True), ["alpha=1.75", "learnable", "(1, 2)"]),
        (Entmax(1.75, learnable=True, bounds=(1.5, 3), shape=(4, 1, 1)), ["(4, 1, 1)", "learnable", "(1.5, 3)"]),
        (Normmax(3.5, 0), ["Normmax(", "alpha=3.5", "dim=0"]),
        (Normmax(math.inf), ["alpha=inf"]),
        (Tsallis(1.25), ["Tsallis(alpha=1.25)"]),
        (Norm(torch.tensor([[2.0], [3.0]])), ["Norm(", "(2, 1)"]),
        (Shannon(), ["Shannon()"]),
        (Gini(), ["Gini()"]),
        (Hard(), ["Hard()"]),
        (0.25 * Norm(3.0), ["gamma=0.25", "Norm(alpha=3)"]),
        (torch.tensor(0.25) * Gini(), ["gamma=0.25", "Gini()"]),
    ],
    ids=lambda v: repr(v).replace("\n", "") if isinstance(v, nn.Module) else "",
)
def test_the_repr_tells_the_parameters(module: nn.Module, parts: list[str]) -> None:
    for part in parts:
        assert part in repr(module)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "names"),
    [
        ((2.5,), {"learnable": True}, ValueError, "alpha"),
        ((1.0,), {"learnable": True}, ValueError, "alpha"),
        ((2.0,), {"learnable": True}, ValueError, "alpha"),
        ((torch.tensor([1.5, 2.0]),), {"learnable": True}, ValueError, "alpha"),
        ((1.5,), {"learnable": True, "bounds": (1.6, 2.0)}, ValueError, "alpha"),
        ((0.0,), {}, ValueError, "alpha"),
        ((-1.0,), {}, ValueError, "alpha"),
        ((math.nan,), {}, ValueError, "alpha"),
        (("1.5",), {}, TypeError, "alpha"),
        ((None,), {}, TypeError, "alpha"),
        ((torch.tensor(True),), {}, TypeError, "alpha"),
        ((1.5,), {"learnable": True, "bounds": (2.0, 1.0)}, ValueError, "bounds"),
        ((1.5,), {"learnable": True, "bounds": (1.5, 1.5)}, ValueError, "bounds"),
        ((1.5,), {"learnable": True, "bounds": (0.0, 2.0)}, ValueError, "bounds"),
        ((1.5,), {"learnable": True, "bounds": (1.0, math.inf)}, ValueError, "bounds"),
        ((1.5,), {"learnable": True, "bounds": (1.0, math.nan)}, ValueError, "bounds"),
        ((1.5,), {"learnable": True, "bounds": (1.0,)}, ValueError, "bounds"),
        ((1.2,), {"learnable": True, "bounds": (1.0, 1.5, 2.0)}, ValueError, "bounds"),
        ((1.5,), {"shape": (2, 1)}, ValueError, "shape"),
        ((1.5,), {"learnable": True, "shape": 3}, TypeError, "shape"),
        ((torch.tensor([1.2, 1.3]),), {"learnable": True, "shape": (3,)}, ValueError, "shape"),
        ((1.5,), {"dim": 1.0}, TypeError, "dim"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments: tuple, options: dict, error: type, names: str) -> None:
    with pytest.raises(error, match=names):
        Entmax(*arguments, **options)(torch.randn(2, 3))


@pytest.mark.parametrize("omega", ["softmax", 1.5, fenchel.sparsemax, torch.ones(2)], ids=lambda o: type(o).__name__)
def test_an_omega_that_is_not_a_regularizer_is_named(omega: object) -> None:
    with pytest.raises(TypeError, match="omega"):
        Argmax(omega)(torch.randn(2, 3))


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf, math.nan, torch.tensor(-1.0)], ids=str)
def test_a_temperature_that_is_not_positive_is_named(gamma: float) -> None:
    omega: Regularizer = Gini()
    with pytest.raises(ValueError, match="gamma"):
        omega * gamma


def test_a_tensor_times_a_regularizer_is_a_regularizer() -> None:
    gamma = torch.tensor([[0.5], [2.0]])
    scores = torch.randn(2, 4)
    for omega in (Gini() * gamma, gamma * Gini()):
        assert isinstance(omega, Regularizer)
        assert_close(omega.argmax(scores), fenchel.sparsemax(scores / gamma))


def test_grouping_modules_are_their_maps_and_train_a_strength() -> None:
    scores, mask = torch.randn(3, 4, 5), torch.rand(3, 4, 5) < 0.8
    assert torch.equal(Fusedmax(0.2, dim=1)(scores, mask), fenchel.fusedmax(scores, 0.2, 1, mask))
    assert torch.equal(Oscarmax(0.2, dim=0)(scores, mask), fenchel.oscarmax(scores, 0.2, 0, mask))
    assert torch.equal(TVmax2d(0.2)(scores, mask), fenchel.tvmax2d(scores, 0.2, mask))
    for kind in (Fusedmax, Oscarmax, TVmax2d):
        module = kind(nn.Parameter(torch.tensor(0.02)))
        module(0.3 * scores).square().sum().backward()
        assert module.omega.strength.grad < 0
        assert "strength=0.02" in repr(module)
        assert list(module.state_dict()) == ["omega.strength"]

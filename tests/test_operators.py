"""The ``fenchel::`` operators: what they promise to torch, and that graphs reach the kernels of eager mode."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import fenchel
from fenchel import Fused, Norm, Oscar, Regularizer, Tsallis, kernels
from fenchel._operators import DECOMPOSITIONS, define_operator
from fenchel._torch import below_autograd
from fenchel.kernels import table
from fenchel.regularizers.base import Scaled
from fenchel.regularizers.bounded import BOUNDED_GINI, BOUNDED_SHANNON
from fenchel.regularizers.operators import pack
from fenchel.regularizers.rowmap import RowMap

OPERATORS = torch.ops.fenchel
STEPS = ("argmax", "max", "product", "pull", "class_loss")


def one_per_row(low: float, high: float, z: Tensor) -> Tensor:
    values = low + (high - low) * torch.rand(*z.shape[:-1], 1, dtype=z.dtype)
    return values.requires_grad_(z.requires_grad)


PARAMETERS: dict[str, tuple[RowMap, Callable[[Tensor], tuple[Any, ...]]]] = {
    "entmax": (Tsallis.rule, lambda z: (1.5,)),
    "steep entmax": (Tsallis.rule, lambda z: (2.5,)),
    "softmax": (Tsallis.rule, lambda z: (1.0,)),
    "tensor alpha": (Tsallis.rule, lambda z: (one_per_row(1.2, 1.8, z),)),
    "normmax": (Norm.rule, lambda z: (2.0,)),
    "tensor norm": (Norm.rule, lambda z: (one_per_row(1.5, 3.0, z),)),
    "bounded": (BOUNDED_GINI, lambda z: (torch.full_like(z, 0.4).detach(), 1.0)),
    "bounded softmax": (BOUNDED_SHANNON, lambda z: (torch.full_like(z, 0.4).detach(), 1.0)),
    "fusedmax": (Fused.rule, lambda z: (0.1,)),
    "oscarmax": (Oscar.rule, lambda z: (0.1,)),
}
TENSORS = ("tensor alpha", "tensor norm", "bounded", "bounded softmax")
CASES = [
    (name, step)
    for name in PARAMETERS
    for step in STEPS
    # A gradient of a number is not asked for; and class indices are the vertices of the simplex.
    if (step != "pull" or name in TENSORS) and (step != "class_loss" or not name.startswith("bounded"))
]


def each_step_of(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "step"), [case for case in CASES if case[0] in names])


def arguments(name: str, step: str, scores: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An operator and what to call it with."""
    rule, parameters = PARAMETERS[name]
    a = parameters(scores)
    p = rule.argmax(scores.detach(), *(each.detach() if isinstance(each, Tensor) else each for each in a))
    p.requires_grad_(scores.requires_grad)
    v = torch.randn_like(scores).requires_grad_(scores.requires_grad)
    z = scores.detach()
    tensors = {
        "argmax": (scores,),
        "max": (scores, p.detach()),
        "product": (v, z, p),
        "pull": (v, z, p),
        "class_loss": (scores, torch.randint(-1, scores.shape[-1], scores.shape[:-1]), True),
    }[step]
    return getattr(OPERATORS, step).default, (*tensors, *pack(a), rule.name)


def scores_in_double(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


# -- what torch is promised ------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_step_of(["tensor alpha", "bounded"])
def test_operators_pass_the_checks_of_torch(name: str, step: str) -> None:
    operator, args = arguments(name, step, scores_in_double(3, 5))
    torch.library.opcheck(operator, args)


@each_step_of(list(PARAMETERS))
def test_shapes_and_strides_are_those_that_were_promised(name: str, step: str) -> None:
    for strided in (torch.randn(4, 3, 5).permute(2, 0, 1), torch.randn(5, 3).T, torch.randn(6)):
        operator, args = arguments(name, step, strided)
        torch.library.opcheck(operator, args, test_utils="test_faketensor")


@pytest.mark.slow
@each_step_of(["entmax", "tensor alpha", "normmax", "tensor norm"])
def test_operators_have_derivatives_of_both_modes_and_orders(name: str, step: str) -> None:
    scores = (0.1 * torch.randn(2, 4, dtype=torch.float64)).requires_grad_()  # p > 0: products are smooth in it
    operator, args = arguments(name, step, scores)
    inputs = [each for each in args if isinstance(each, Tensor) and each.requires_grad]

    def results(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        own = [next(rest) if isinstance(each, Tensor) and each.requires_grad else each for each in args]
        if step == "max":  # kernels rely on p being the choice for these scores and parameters
            own[1] = OPERATORS.argmax.default(own[0], *own[2:])
        found = operator(*own)
        return found[: 2 if step == "pull" else 1] if isinstance(found, tuple) else (found,)

    assert gradcheck(results, inputs, check_forward_ad=True)
    assert gradgradcheck(results, inputs)


@each_step_of(list(PARAMETERS))
def test_a_mapped_operator_is_that_of_each_slice(name: str, step: str) -> None:
    operator, args = arguments(name, step, torch.randn(4, 3, 5, dtype=torch.float64))
    in_dims = tuple(0 if isinstance(each, Tensor) else None for each in args)
    mapped = torch.func.vmap(operator, in_dims)(*args)
    for i in range(4):
        expected = operator(*(each[i] if isinstance(each, Tensor) else each for each in args))
        pairs = zip(mapped, expected, strict=True) if isinstance(expected, tuple) else [(mapped, expected)]
        for found, one in pairs:
            assert_close(found[i] if one.numel() else one, one)


# -- graphs reach the kernels ----------------------------------------------------------------------------------------


@pytest.fixture
def called() -> Iterator[list[str]]:
    """The steps whose kernels were called, in order."""
    steps: list[str] = []

    def counting(step: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            steps.append(step)
            return kernel(*args)

        return count

    one, index = torch.randn(1, 2), torch.zeros(1, dtype=torch.int64)
    fenchel.entmax(one), fenchel.entmax_loss(one, index)  # kernels are imported by the first that is asked for
    remove = []
    for step in ("argmax", "product", "pull", "class_loss", "loss_given"):
        for name in ("tsallis", "norm"):
            found = table.find(step, name, (1.5,), torch.zeros(1, 2))
            if found is not None:
                remove.append(kernels.register(step, name, counting(step, found)))
    yield steps
    for each in remove:
        each()


target = torch.tensor([2, 0, -100, 1, 2])
LOSSES: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "entmax": (lambda s, a: fenchel.entmax(s, 1.5).square().sum(), ["argmax", "product"]),
    "entmax of a tensor alpha": (lambda s, a: fenchel.entmax(s, a).square().sum(), ["argmax", "pull"]),
    "normmax": (lambda s, a: fenchel.normmax(s, 2.0).square().sum(), ["argmax", "product"]),
    "entmax_loss": (lambda s, a: fenchel.entmax_loss(s, target), ["class_loss"]),
    "entmax_loss of a tensor alpha": (lambda s, a: fenchel.entmax_loss(s, target, a), ["class_loss", "argmax"]),
    "normmax_loss": (lambda s, a: fenchel.normmax_loss(s, target, reduction="sum"), ["class_loss"]),
    "scaled": (lambda s, a: fenchel.fy_loss(s, target, Scaled(Tsallis(1.5), a)), ["class_loss"]),
    "masked": (lambda s, a: fenchel.entmax_loss(s, target, mask=torch.arange(4) != 3), ["class_loss"]),
    "weighted": (lambda s, a: fenchel.entmax_loss(s, target, weight=torch.arange(4.0)), ["class_loss"]),
    "smoothed": (lambda s, a: fenchel.entmax_loss(s, target, label_smoothing=0.1), ["argmax"]),
    "none ignored": (lambda s, a: fenchel.entmax_loss(s, target.clamp_min(0), ignore_index=7), ["class_loss"]),
    "all rows": (lambda s, a: fenchel.entmax_loss(s, target, reduction="none").square().sum(), ["class_loss"]),
    "along dim 0": (lambda s, a: fenchel.entmax_loss(s.T, target, dim=0), ["class_loss"]),
    "module": (lambda s, a: fenchel.nn.EntmaxLoss(1.5)(s, target), ["class_loss"]),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
EAGER = {"entmax_loss of a tensor alpha": ["argmax", "loss_given"], "smoothed": ["argmax", "loss_given"]}
"""Where a graph solves in both passes, or takes the maximum apart, eager calls take the loss from the choice."""


def with_gradients(function: Callable[..., Tensor], scores: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
    value = function(scores, alpha)
    value.backward()
    found = (value.detach(), scores.grad, alpha.grad)
    scores.grad = alpha.grad = None
    return tuple(t for t in found if t is not None)


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4, requires_grad=True), torch.tensor(1.3, requires_grad=True)


@pytest.mark.slow
@every_loss
def test_compiled_passes_reach_the_kernels_that_eager_ones_reach(name: str, called: list[str]) -> None:
    torch._dynamo.reset()
    function, expected = LOSSES[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = example()
    with_gradients(compiled, *inputs)
    called.clear()
    found = with_gradients(compiled, *inputs)
    assert called == expected
    called.clear()
    assert_close(found, with_gradients(function, *inputs))
    assert called == EAGER.get(name, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_inductor_reaches_the_kernels_too(called: list[str]) -> None:
    torch._dynamo.reset()
    chosen = [LOSSES[name] for name in ("entmax of a tensor alpha", "entmax_loss", "normmax_loss")]

    def function(*inputs: Tensor) -> Tensor:
        return torch.stack([each(*inputs).square().sum() for each, _ in chosen]).sum()

    # Headers are compiled in advance for the sake of later graphs, of which there are none here.
    compiled = torch.compile(function, fullgraph=True, options={"cpp_cache_precompile_headers": False})
    inputs = example()
    with_gradients(compiled, *inputs)
    called.clear()
    assert_close(with_gradients(compiled, *inputs), with_gradients(function, *inputs))
    assert sorted(called) == sorted(2 * [step for _, steps in chosen for step in steps])


@pytest.mark.parametrize("name", ["entmax", "entmax_loss", "entmax_loss of a tensor alpha", "scaled", "weighted"])
def test_a_graph_has_second_derivatives(name: str) -> None:
    function, _ = LOSSES[name]
    scores, alpha = example()

    def second(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(f(scores, alpha), scores, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (scores, alpha), allow_unused=True)

    torch._dynamo.reset()
    found = second(torch.compile(function, fullgraph=True, backend="eager"))
    assert_close(found, second(function))


def test_a_compiled_loss_keeps_forward_mode() -> None:
    torch._dynamo.reset()
    scores, direction = torch.randn(5, 4), torch.randn(5, 4)
    compiled = torch.compile(lambda s: fenchel.entmax_loss(s, target), fullgraph=True, backend="aot_eager")
    compiled(scores)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scores, direction)
        found = torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent
        expected = torch.autograd.forward_ad.unpack_dual(fenchel.entmax_loss(dual, target)).tangent
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["entmax", "entmax_loss"])
def test_transformations_of_functions_compile_or_raise(name: str) -> None:
    scores = torch.randn(3, 5, 4)

    def function(s: Tensor) -> Tensor:
        return LOSSES[name][0](s, None)

    def compiled(transformed: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(lambda s: torch.func.vmap(transformed)(s), fullgraph=True, backend="aot_eager")

    assert_close(compiled(function)(scores), torch.func.vmap(function)(scores))
    for transformed in (torch.func.grad(function), torch.func.hessian(function)):
        # The Function of an operator has one level of derivatives: torch refuses another.
        with pytest.raises(torch._dynamo.exc.Unsupported, match="custom_function_call"):
            compiled(transformed)(scores)


# -- export ----------------------------------------------------------------------------------------------------------


class _Choice(torch.nn.Module):
    def __init__(self, omega: Regularizer) -> None:
        super().__init__()
        self.omega = omega

    def forward(self, scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.omega.argmax(scores), fenchel.fy_loss(scores, index, self.omega)


def operators_of(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if "fenchel" in str(node.target)}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize(
    "omega",
    [
        Tsallis(1.5),
        pytest.param(Tsallis(2.5), marks=pytest.mark.slow),
        pytest.param(Tsallis(torch.tensor(1.3)), marks=pytest.mark.slow),
        pytest.param(Norm(2.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_exported_program_decomposes_into_operations_of_torch(
    omega: Regularizer, set_kernels: Callable[[bool], None]
) -> None:
    scores, index = torch.randn(5, 4), target.clamp_min(0)
    program = torch.export.export(_Choice(omega), (scores, index))
    assert operators_of(program) == {"fenchel.argmax.default", "fenchel.class_loss.default"}
    plain = program.run_decompositions({**torch.export.default_decompositions(), **DECOMPOSITIONS})
    assert not operators_of(plain)
    set_kernels(False)
    expected = _Choice(omega)(scores, index)
    for each in (program, plain):
        assert_close(each.module()(scores, index), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "omega",
    [
        Tsallis(1.2),
        pytest.param(Tsallis(0.7), marks=pytest.mark.slow),
        pytest.param(Tsallis(3.0), marks=pytest.mark.slow),
        pytest.param(Norm(5.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_decomposed_program_takes_rows_of_every_width(omega: Regularizer) -> None:
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = (free, {0: torch.export.Dim.DYNAMIC})
    scores, index = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    program = torch.export.export(_Choice(omega), (scores, index), dynamic_shapes=shapes)
    plain = program.run_decompositions({**torch.export.default_decompositions(), **DECOMPOSITIONS})
    for rows, width in ((3, 2), (2, 300)):
        scores, index = torch.randn(rows, width), torch.zeros(rows, dtype=torch.long)
        assert_close(plain.module()(scores, index), _Choice(omega)(scores, index))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_depends_on_the_data_stays_an_operator() -> None:
    program = torch.export.export(_Choice(Fused(0.1)), (torch.randn(5, 4), target.clamp_min(0)))
    plain = program.run_decompositions({**torch.export.default_decompositions(), **DECOMPOSITIONS})
    assert "fenchel.argmax.default" in operators_of(plain)


# -- another operator ------------------------------------------------------------------------------------------------


def test_an_operator_is_defined_in_one_call() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            with below_autograd():
                results: tuple[Tensor, Tensor] = double(x)
            return results

        @staticmethod
        def backward(ctx: Any, grad: Tensor, total: Tensor) -> Tensor:
            return 2 * grad + 2 * total.unsqueeze(-1)

    double = define_operator(
        "double_for_a_test",
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: (2 * x, 2 * x.sum(-1)),
        lambda x: (x.new_empty(x.shape), x.new_empty(x.shape[:-1])),
        Double.apply,
    )
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.fenchel.double_for_a_test.default, (x,))
    assert gradcheck(double, (x,))
    assert_close(torch.func.vmap(double, 1)(x.detach())[1], 2 * x.detach().T.sum(-1))

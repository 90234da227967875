"""Attention and output layers as operators of a graph: the kernels, results and memory of eager mode."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import fenchel
from fenchel import Gini, Norm, Regularizer, Shannon, Tsallis, attention, kernels, linear_entmax_loss
from fenchel._operators import DECOMPOSITIONS
from fenchel.regularizers.tsallis import TSALLIS
from fenchel.streaming import supports
from fenchel.streaming.operators import attend_in_graph

EXACT = {"atol": 1e-12, "rtol": 1e-12}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def agree(call: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Callable[..., Tensor]:
    """Compile a call to one graph, which must have the results and gradients of eager mode."""
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", **options)
    assert_close(results(compiled, inputs), results(call, inputs), **EXACT)
    return compiled


def results(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    output = call(*inputs)
    direction = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).cos()
    return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


def watching(sizes: list[int]) -> Any:
    """A backend that runs graphs as they are, and notes the sizes of all tensors in them."""

    def watch(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        sizes.extend(v.numel() for v in values if isinstance(v, Tensor))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=watch, bw_compiler=watch)


@pytest.fixture
def counted() -> Iterator[list[str]]:
    """The steps that ran by a kernel from outside the package, which serves float64."""
    called: list[str] = []

    def counting(step: str) -> Callable[..., object]:
        kernel = kernels.find(step, "tsallis", (1.5,))

        def count(*args: Tensor, **options: object) -> object:
            called.append(step)
            return kernel(*args, **options)

        return count

    steps = ("attend", "attend_backward", "linear_class_loss", "linear_class_loss_backward")
    removers = [
        kernels.register(step, "tsallis", counting(step), dtypes=(torch.float64,), ranges=((1.001, 2.0),))
        for step in steps
    ]
    yield called
    for remove in removers:
        remove()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.7},
        {"attn_mask": torch.arange(300) < 200},
        {"attn_mask": torch.ones(40, 300, dtype=torch.bool).tril(100)},
        {"attn_mask": torch.linspace(-1, 1, 2 * 4 * 40 * 300, dtype=torch.float64).reshape(2, 4, 40, 300)},
    ],
    ids=["plain", "causal", "padding", "mask", "added"],
)
def test_a_compiled_call_runs_the_kernels_of_eager_mode(options: dict, counted: list[str]) -> None:
    inputs = randn(2, 4, 40, 8), randn(2, 4, 300, 8), randn(2, 4, 300, 5)
    compiled = agree(lambda *t: attention(*t, **options), *inputs)
    counted.clear()
    compiled(*inputs).sum().backward()
    assert counted == ["attend", "attend_backward"]
    counted.clear()
    with torch.no_grad():
        compiled(*inputs)
    assert counted == ["attend"]


@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (2, 4)])
def test_query_heads_may_share_keys_in_a_graph(heads: tuple[int, int], counted: list[str]) -> None:
    inputs = randn(2, 4, 20, 8), randn(2, heads[0], 300, 8), randn(2, heads[1], 300, 5)
    mask = torch.rand(4, 20, 300) < 0.5
    agree(lambda *t: attention(*t, attn_mask=mask), *inputs)
    assert counted


@pytest.mark.parametrize("omega", [0.5 * Gini(), Shannon(), Norm(2.0), Tsallis(3.0)], ids=str)
def test_every_omega_compiles_to_the_results_of_eager_mode(omega: Regularizer) -> None:
    agree(lambda *t: attention(*t, omega), randn(2, 30, 8), randn(2, 300, 8), randn(2, 300, 5))


def test_alpha_is_learned_in_a_graph(counted: list[str]) -> None:
    inputs = randn(2, 4, 30, 8), randn(2, 4, 300, 8), randn(2, 4, 300, 5)
    alpha = torch.tensor([1.3, 1.5, 1.8, 1.99], dtype=torch.float64).view(4, 1, 1).requires_grad_()
    agree(lambda a, *t: attention(*t, Tsallis(a)), alpha, *inputs)
    assert counted
    counted.clear()
    agree(lambda a, *t: attention(*t, Tsallis(a)), (alpha.detach() + 0.5).requires_grad_(), *inputs)  # beyond kernels
    learned = Tsallis(1.5, learnable=True, shape=(4, 1, 1)).double()
    agree(lambda raw, *t: attention(*t, learned), learned.raw_alpha, *inputs)


@pytest.mark.slow
def test_dropout_and_weights_are_part_of_a_graph() -> None:
    inputs = randn(2, 30, 8), randn(2, 300, 8), randn(2, 300, 5)
    agree(lambda *t: torch.cat(attention(*t, return_weights=True), -1), *inputs)
    compiled = torch.compile(lambda *t: attention(*t, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    mean = torch.stack([compiled(*inputs).detach() for _ in range(1000)]).mean(0)
    assert_close(mean, attention(*inputs).detach(), atol=0.4, rtol=0)


@pytest.mark.slow
def test_the_number_of_queries_and_keys_may_vary_in_one_graph(counted: list[str]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *t: attention(*t, is_causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for queries, keys in ((30, 300), (17, 300), (40, 411), (600, 600), (5, 20)):
        inputs = randn(2, queries, 8), randn(2, keys, 8), randn(2, keys, 5)
        expected = results(lambda *t: attention(*t, is_causal=True), inputs)
        assert_close(results(compiled, inputs), expected, **EXACT)
    assert counted


@pytest.mark.parametrize("omega", [Tsallis(1.5), Shannon()], ids=str)
def test_no_matrix_of_queries_and_keys_is_held_in_a_graph(omega: Regularizer) -> None:
    sizes: list[int] = []
    layer = fenchel.nn.MultiheadAttention(16, 2, batch_first=True, omega=omega)
    x = torch.randn(1, 3000, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    compiled = torch.compile(lambda x: layer(x, x, x, need_weights=False)[0], fullgraph=True, backend=watching(sizes))
    output = compiled(x)
    output.sum().backward()
    assert_close(output, expected)
    assert max(sizes) <= 0.15 * 2 * 3000 * 3000


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own
def test_an_exported_program_holds_the_operator_or_its_decomposition() -> None:
    class Attend(torch.nn.Module):
        def forward(self, *t: Tensor) -> Tensor:
            return attention(*t, is_causal=True)

    inputs = tuple(t.detach() for t in (randn(2, 30, 8), randn(2, 300, 8), randn(2, 300, 5)))
    program = torch.export.export(Attend(), inputs)
    targets = {node.target for node in program.graph.nodes}
    assert torch.ops.fenchel.attend.default in targets
    assert_close(program.module()(*inputs), attention(*inputs, is_causal=True), **EXACT)
    plain = program.run_decompositions({**torch.export.default_decompositions(), **DECOMPOSITIONS})
    assert not {t for t in (node.target for node in plain.graph.nodes) if str(t).startswith("fenchel")}
    assert_close(plain.module()(*inputs), attention(*inputs, is_causal=True), **EXACT)


@pytest.mark.parametrize("rows", [1, 8, 24, 1 << 16])
@pytest.mark.parametrize("entries", [None, 0, 12, 40])
def test_blocks_and_lists_of_an_operator_do_not_matter(rows: int, entries: int | None) -> None:
    query = (randn(3, 20, 6) * torch.linspace(0.1, 5, 20, dtype=torch.float64).unsqueeze(-1)).detach().requires_grad_()
    inputs = query, randn(3, 40, 6), randn(3, 40, 4)
    task = supports.Task(TSALLIS, rows, entries, (3,), 10, causal=True)
    expected = results(
        lambda *t: supports.attend(*t, None, 1.5, supports.Task(TSALLIS, 64, 40, (3,), 10, True))[0], inputs
    )
    assert_close(results(lambda *t: attend_in_graph(*t, None, 1.5, task), inputs), expected, **EXACT)


@pytest.mark.slow
def test_an_operator_is_differentiable_twice() -> None:
    inputs = (
        randn(2, 3, 2),
        randn(2, 4, 2),
        randn(2, 4, 2),
        torch.full((2, 3), 1.4, dtype=torch.float64).requires_grad_(),
    )
    task = supports.Task(TSALLIS, 2, 4, (2,), 3)
    call = lambda q, k, v, a: attend_in_graph(q, k, v, None, a, task)  # noqa: E731
    gradcheck(call, inputs)
    gradgradcheck(call, inputs)


def test_operators_are_what_their_schemas_say() -> None:
    inputs = randn(2, 3, 2), randn(2, 4, 2), randn(2, 4, 2)
    for entries, keep in ((None, True), (2, True), (2, False)):
        args = (*inputs, torch.rand(3, 4) < 0.7, None, 1.5, "tsallis", (2,), 3, True, 2, entries, keep)
        # Entries beyond the lists are not written, so that two calls need not agree in them.
        torch.library.opcheck(torch.ops.fenchel.attend.default, args, test_utils=("test_schema", "test_faketensor"))


# -- output layers ---------------------------------------------------------------------------------------------------


def output_layer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of peaked and flat tokens, the matrix, the bias, and targets, some of which are ignored."""
    hidden = (randn(40, 6) * torch.linspace(0.1, 8, 40, dtype=torch.float64).unsqueeze(-1)).detach().requires_grad_()
    target = torch.randint(900, (40,))
    target[::7] = -100
    return hidden, randn(900, 6), randn(900), target


@pytest.mark.parametrize(
    ("reduction", "alpha", "smoothed"),
    [("mean", 1.5, False), ("sum", 2.0, False), ("none", 1.5, False), ("mean", 1.3, True), ("none", 1.0, True)],
)
def test_a_compiled_output_layer_runs_the_kernels_of_eager_mode(
    reduction: str, alpha: float, smoothed: bool, counted: list[str]
) -> None:
    *tensors, target = output_layer()
    options: dict[str, Any] = {"reduction": reduction, "alpha": alpha}
    if smoothed:
        options |= {"label_smoothing": 0.1, "class_weight": torch.linspace(0, 1, 900)}
    tensors = tensors[:2] if reduction == "sum" else tensors

    def call(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_entmax_loss(hidden, weight, target, bias, **options)

    compiled = agree(call, *tensors)
    counted.clear()
    compiled(*tensors).sum().backward()
    assert ("linear_class_loss" in counted) is (alpha != 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_alpha_of_an_output_layer_is_learned_in_a_graph(reduction: str, counted: list[str]) -> None:
    *tensors, target = output_layer()
    alpha = torch.tensor([1.4], dtype=torch.float64)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor = alpha) -> Tensor:
        return linear_entmax_loss(hidden, weight, target, bias, alpha=alpha, reduction=reduction)

    agree(call, *tensors, alpha.clone().requires_grad_())
    counted.clear()
    compiled = agree(call, *tensors)  # a tensor that is not learned is a number for the kernels
    assert "linear_class_loss" in counted
    with pytest.raises(ValueError, match="alpha must satisfy 1 <= alpha <= 2, got 3"):
        compiled(*tensors, torch.tensor(3.0))


@pytest.mark.slow
def test_the_number_of_tokens_may_vary_in_one_graph(counted: list[str]) -> None:
    torch.compiler.reset()
    layer = fenchel.nn.LinearEntmaxLoss(6, 900, learnable=False, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (40, 17, 300, 1):
        hidden, target = randn(tokens, 6), torch.randint(900, (tokens,))
        inputs = hidden, layer.weight
        ours = torch.autograd.grad(compiled(hidden, target), inputs)
        assert_close(ours, torch.autograd.grad(layer(hidden, target), inputs), **EXACT)
    assert "linear_class_loss" in counted


@pytest.mark.slow
def test_no_matrix_of_tokens_and_classes_is_held_in_a_graph() -> None:
    sizes: list[int] = []
    layer = fenchel.nn.LinearEntmaxLoss(8, 2000)
    hidden, target = torch.randn(1000, 8), torch.randint(2000, (1000,))
    compiled = torch.compile(layer, fullgraph=True, backend=watching(sizes))
    compiled(hidden, target).backward()
    assert max(sizes) == 2000 * 8


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own
def test_an_exported_output_layer_holds_the_operator_or_its_decomposition() -> None:
    layer = fenchel.nn.LinearEntmaxLoss(6, 900, dtype=torch.float64, label_smoothing=0.1)
    hidden, _, _, target = output_layer()
    program = torch.export.export(layer, (hidden.detach(), target))
    assert torch.ops.fenchel.linear_class_loss.default in {node.target for node in program.graph.nodes}
    assert_close(program.module()(hidden, target), layer(hidden, target), **EXACT)
    plain = program.run_decompositions({**torch.export.default_decompositions(), **DECOMPOSITIONS})
    assert not [node for node in plain.graph.nodes if str(node.target).startswith("fenchel")]
    assert_close(plain.module()(hidden, target), layer(hidden, target), **EXACT)


@pytest.mark.parametrize("summed", [False, True])
def test_the_operator_of_output_layers_is_its_decomposition(summed: bool) -> None:
    hidden, weight, bias, target = output_layer()
    rates, alpha = torch.rand(40, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
    index = torch.where(target < 0, -1, target)
    operator = torch.ops.fenchel.linear_class_loss.default
    for needed in ([True] * 4, [False] * 4, [True, False, True, False]):
        args = (hidden.detach(), weight.detach(), bias.detach(), alpha, 0.0, index, rates, summed, needed)
        torch.library.opcheck(operator, args)
        expected = DECOMPOSITIONS[operator](*args)
        assert_close(operator(*args), expected, **EXACT)
    gradcheck(
        lambda h, w, b: operator(h, w, b, None, 1.5, index, rates, summed, [False] * 4)[0],
        (hidden, weight, bias),
        fast_mode=True,
    )

"""Models that leave this library: graphs of torch's own operators, and ONNX Runtime's numbers for other inputs."""

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fenchel

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters
FREE = torch.export.Dim.DYNAMIC
ROWS = {0: FREE, 1: FREE}
LABELS = ["O", "B-X", "I-X", "B-Y"]


class Choices(torch.nn.Module):
    """Some maps of the same scores."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, scores: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(MAPS[name](scores, mask=mask) for name in self.names)


class Losses(torch.nn.Module):
    def forward(self, scores: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        soft = fenchel.entmax_loss(scores, scores.flip(-1).softmax(-1), reduction="none")
        classes = fenchel.entmax_loss(scores, target), fenchel.sparsemax_loss(scores, target, reduction="none")
        return *classes, fenchel.entmax_loss(scores, target, alpha=1.2, reduction="sum"), soft


class Attend(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        causal = fenchel.attention(query, key, value, fenchel.Gini(), is_causal=True)
        return fenchel.attention(query, key, value), causal


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = fenchel.nn.MultiheadAttention(16, 4, batch_first=True, omega=fenchel.Gini())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        output, weights = self.attend(x, x, x)
        return output, weights, self.attend(x, x, x, need_weights=False)[0]


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.crf = torch.nn.Linear(3, 4), fenchel.nn.CRF(4, constraints="BIO", labels=LABELS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.crf(self.scores(x), mask).map()


def rows(count: int, width: int) -> tuple[Tensor, Tensor]:
    mask = torch.rand(count, width) > 0.3
    mask[0], mask[1] = False, True
    return 3 * torch.randn(count, width), mask


def classes(count: int, width: int) -> tuple[Tensor, Tensor]:
    target = torch.randint(width, (count,))
    target[1] = -100
    return torch.randn(count, width), target


def heads(batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, batch, 2, 5, 8))


def sentences(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6, 3), torch.rand(count, 6) > 0.3


torch.manual_seed(0)
MAPS: dict[str, Callable[..., Tensor]] = {
    "sparsemax": fenchel.sparsemax,
    "entmax, 1.5": fenchel.entmax,
    **{f"entmax, {alpha:g}": partial(fenchel.entmax, alpha=alpha) for alpha in (1.3, 1.05, 0.7, 3.0, math.inf)},
    "normmax, 2": fenchel.normmax,
    "normmax, 5": partial(fenchel.normmax, alpha=5.0),
    "k_subsets": partial(fenchel.k_subsets, k=2),
}
TABLES = [rows(5, 7), rows(3, 40), rows(2, 2)], (ROWS, ROWS)
MODELS = {
    "sparsemax": (lambda: Choices("sparsemax"), *TABLES),
    "maps": (lambda: Choices(*MAPS), *TABLES),
    "losses": (Losses, [classes(5, 7), classes(3, 40)], (ROWS, {0: FREE})),
    "attention": (Attend, [heads(2), heads(3)], ({0: FREE},) * 3),
    "MultiheadAttention": (Heads, [(torch.randn(2, 5, 16),), (torch.randn(3, 5, 16),)], ({0: FREE},)),
    "CRF": (Tagger, [sentences(2), sentences(9)], ({0: FREE},) * 2),
}
QUICK = ("sparsemax", "CRF")
every_model = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)


def results(module: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = module(*inputs)
    return found if isinstance(found, tuple) else (found,)


@every_model
def test_onnx_runtime_gives_the_same_numbers(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    make, inputs, shapes = MODELS[name]
    model = make().eval()
    program = torch.onnx.export(model, inputs[0], dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert {node.domain for node in program.model_proto.graph.node} == {""}  # standard operators alone
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue())
    names = [each.name for each in session.get_inputs()]
    for given in inputs:
        found = session.run(None, {key: tensor.numpy() for key, tensor in zip(names, given, strict=True)})
        for mine, theirs in zip(results(model, given), found, strict=True):
            torch.testing.assert_close(torch.tensor(theirs), mine.detach(), rtol=1e-5, atol=1e-6)


@every_model
def test_without_kernels_an_exported_graph_holds_aten_alone(name: str, set_kernels: Callable[[bool], None]) -> None:
    make, inputs, shapes = MODELS[name]
    model = make().eval()
    expected = [results(model, given) for given in inputs]
    set_kernels(False)
    program = torch.export.export(model, inputs[0], dynamic_shapes=shapes)
    names = {node.target.namespace for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert names == {"aten"}
    for given, answer in zip(inputs, expected, strict=True):
        torch.testing.assert_close(results(program.module(), given), answer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_trace_of_torch_jit_takes_other_inputs(name: str) -> None:
    make, inputs, _ = MODELS[name]
    model = make().eval().requires_grad_(False)
    trace = torch.jit.trace(model, inputs[0], check_trace=False)
    for given in inputs:
        torch.testing.assert_close(results(trace, given), results(model, given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verb", ["value", "marginals"])
def test_what_a_trace_cannot_hold_is_refused(verb: str) -> None:
    crf = fenchel.nn.CRF(4).requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"a dynamic program .* torch.jit.trace records; torch.export takes the others"
    ):
        torch.jit.trace(lambda x: getattr(crf(x), verb), torch.randn(2, 5, 4), check_trace=False)

"""Default devices, single parameters from another device, and what a device is asked to do."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fenchel
from fenchel import Capped, Custom, Fused, Gini, KSubsets, Norm, Oscar, SparseMAP, Tsallis
from fenchel.dp import Alignment, Lattice, LinearChain, barycenter, dtw
from fenchel.factors import Budget
from fenchel.hopfield import Hopfield, HopfieldEncoderLayer, Memory
from fenchel.seq2seq import (
    Pair,
    Recurrent,
    Transformer,
    Vocabulary,
    beam_search,
    collate,
    complete,
    force,
)
from fenchel.structures import Chain, DependencyTree, SequentialSubsets, Subsets

ROWS, TARGET = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
ALPHA, UPPER, GAMMA = torch.tensor(1.3), torch.full((6,), 0.5), torch.tensor(0.5)
HEADS, LONG, PATTERNS = torch.randn(2, 8, 4), torch.randn(1, 2, 300, 8), torch.randn(10, 4)
STATES, STEP, SERIES = torch.randn(2, 5, 3), torch.randn(3, 3), torch.randn(3, 5, 1)

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "entmax": lambda s: fenchel.entmax(s, 1.5),
    "entmax above 2": lambda s: fenchel.entmax(s, 3.0),
    "entmax near 1": lambda s: fenchel.entmax(s, 1.0001),
    "entmax of a tensor": lambda s: fenchel.entmax(s, ALPHA),
    "entmax of a mask": lambda s: fenchel.entmax(s, mask=ROWS > 0),
    "normmax": lambda s: fenchel.normmax(s, 20.0),
    "fusedmax": fenchel.fusedmax,
    "oscarmax": fenchel.oscarmax,
    "tvmax2d": fenchel.tvmax2d,
    "constrained_softmax": lambda s: fenchel.constrained_softmax(s, UPPER),
    "constrained_sparsemax": lambda s: fenchel.constrained_sparsemax(s, 0.5),
    "k_subsets": lambda s: fenchel.k_subsets(s, 2),
    "custom": Custom(lambda p: p.square().sum(-1) + p.diff().square().sum(-1)).argmax,
    "scaled": lambda s: (GAMMA * Gini()).max(s),
    "capped": lambda s: Capped(0.5).max(s),
    "loss": lambda s: fenchel.entmax_loss(s, TARGET, ALPHA),
    "smooth loss": lambda s: fenchel.fy_loss(s, TARGET, Gini(), label_smoothing=0.1, weight=UPPER),
    "grouped loss": lambda s: fenchel.fy_loss(s, TARGET, Fused()),
    "output": lambda s: fenchel.linear_entmax_loss(s, ROWS, TARGET),
    "attention": lambda s: fenchel.attention(HEADS + s.sum(), HEADS, HEADS, is_causal=True),
    "attention with weights": lambda s: fenchel.attention(HEADS + s.sum(), HEADS, HEADS, return_weights=True)[0],
    "attention by supports": lambda s: fenchel.attention(LONG + s.sum(), LONG, LONG, is_causal=True),
    "chain": lambda s: LinearChain(STATES + s.sum(), STEP).marginals,
    "dtw": lambda s: dtw(SERIES + s.sum(), SERIES),
    "barycenter": lambda s: barycenter(SERIES, max_iter=2) + 0 * s.sum(),
    "subsets": SparseMAP(Subsets(2)).argmax,
    "sequences": SparseMAP(SequentialSubsets(2, transition=0.3)).argmax,
    "chains": lambda s: SparseMAP(Chain(STEP)).argmax(STATES + s.sum()),
    "trees": lambda s: SparseMAP(DependencyTree()).argmax(HEADS[:, :4] @ HEADS[:, :5].mT + s.sum()),
    "memory": lambda s: Memory(PATTERNS, omega=Gini()).retrieve(s[:, :4]).state,
    "memory of several": lambda s: Memory(PATTERNS, omega=KSubsets(2)).retrieve(s[:, :4]).state,
}


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_what_is_on_the_cpu_stays_there_whatever_the_default_device(
    name: str, kernels: str, set_kernels: Callable[[bool], None]
) -> None:
    set_kernels(kernels == "on")
    results = []
    for device in ("cpu", "meta"):
        scores = ROWS.clone().requires_grad_()
        torch.set_default_device(device)
        try:
            result = CALLS[name](scores)
            if result.requires_grad:
                result.square().sum().backward()
        finally:
            torch.set_default_device(None)
        results.append((result, scores.grad))
    (expected, slope), (result, other) = results
    assert torch.equal(result, expected)
    assert (slope is None) == (other is None)
    assert slope is None or torch.equal(slope, other)


def test_a_regularizer_can_be_trained_whatever_the_default_device(elsewhere: None) -> None:
    omega = Tsallis(torch.full((2, 1), 1.4, device="cpu"), learnable=True)
    assert omega.raw_alpha is not None
    assert omega.raw_alpha.device.type == "cpu"


@pytest.mark.parametrize(
    "call",
    [
        lambda s, a: fenchel.entmax(s, a),
        lambda s, a: fenchel.normmax(s, a),
        lambda s, a: fenchel.fusedmax(s, a),
        lambda s, a: fenchel.k_subsets(s, a),
        lambda s, a: fenchel.constrained_softmax(s, a),
        lambda s, a: (a * Gini()).argmax(s),
        lambda s, a: Tsallis(a).argmax(s),
        lambda s, a: Oscar(a).argmax(s),
        lambda s, a: Norm(a).max(s),
        lambda s, a: (a * Norm()).loss(s, s.argmax(-1)),
    ],
)
def test_a_single_number_on_the_cpu_goes_with_scores_on_another_device(call: Callable[..., Tensor]) -> None:
    scores = torch.empty(3, 5, device="meta")
    result = call(scores, torch.tensor(1.5))
    assert result.is_meta
    assert result.shape == call(torch.randn(3, 5), torch.tensor(1.5)).shape


# -- devices without kernels: how many operators, and never a look at values -------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose tensors count as data, and of which every look at a value is an error: meta tensors."""
    real = fenchel._torch.concrete
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fenchel" and getattr(module, "concrete", None) is real:
            monkeypatch.setattr(module, "concrete", lambda *tensors: not torch.compiler.is_compiling())
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # there is none for meta tensors
    return "meta"


def learned(*shape: int) -> Tensor:
    return torch.full(shape, 1.5, device="meta", requires_grad=True)


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


OMEGAS = {
    "Tsallis(1.5)": lambda: Tsallis(1.5),
    "Gini": Gini,
    "Shannon": fenchel.Shannon,
    "Hard": fenchel.Hard,
    "Tsallis(3)": lambda: Tsallis(3.0),
    "Norm": Norm,
    "KSubsets": lambda: KSubsets(2),
    "Capped": lambda: Capped(0.5),
    "learnable": lambda: Tsallis(1.5, learnable=True, shape=(4, 1, 1)).to("meta"),
    "scaled": lambda: numbers(4, 1, 1) * Gini(),
}

LOSSES: dict[str, Callable[..., Tensor]] = {
    "indices": lambda loss, s: loss(s, indices(8)),
    "one per row": lambda loss, s: loss(s, indices(8), reduction="none"),
    "weights": lambda loss, s: loss(s, indices(8), weight=numbers(100)),
    "smoothing": lambda loss, s: loss(s, indices(8), weight=numbers(100), label_smoothing=0.1),
    "probabilities": lambda loss, s: loss(s, numbers(8, 100)),
    "smooth probabilities": lambda loss, s: loss(s, numbers(8, 100), label_smoothing=0.1),
}

WITHOUT_SYNC: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"entmax {a}": lambda s, a=a: fenchel.entmax(s, a) for a in (0.5, 1.0, 1.0001, 1.3, 1.5, 2.0, 3.0, torch.inf)},
    **{f"normmax {a}": lambda s, a=a: fenchel.normmax(s, a) for a in (1.1, 2.0, 5.0, torch.inf)},
    "entmax of alphas": lambda s: fenchel.entmax(s, learned(8, 1)),
    "entmax of an alpha": lambda s: fenchel.entmax(s, learned()),
    "normmax of alphas": lambda s: fenchel.normmax(s, learned(8, 1)),
    "masked entmax": lambda s: fenchel.entmax(s, mask=s > 0),
    "entmax of half precision": lambda s: fenchel.entmax(s.half(), 1.5, dim=0),
    "k_subsets": lambda s: fenchel.k_subsets(s, learned(8, 1)),
    "constrained_sparsemax": lambda s: fenchel.constrained_sparsemax(s, numbers(8, 100)),
    "constrained_softmax": lambda s: fenchel.constrained_softmax(s, 0.5),
    **{
        f"{loss.__name__} of {name}": lambda s, loss=loss, of=of: of(loss, s)
        for loss in (fenchel.sparsemax_loss, fenchel.normmax_loss)
        for name, of in LOSSES.items()
    },
    "loss with a tensor alpha": lambda s: fenchel.entmax_loss(s, indices(8), learned(8, 1)),
    "soft loss with a tensor alpha": lambda s: fenchel.entmax_loss(s, numbers(8, 100), learned(8, 1)),
    "k_subsets loss": lambda s: KSubsets(2).loss(s, numbers(8, 100)),
    "output": lambda s: fenchel.linear_entmax_loss(s, numbers(50, 100), indices(8)),
    "smooth output": lambda s: fenchel.linear_entmax_loss(
        s, numbers(50, 100), indices(8), label_smoothing=0.1, class_weight=numbers(50)
    ),
    "output with a learned alpha": lambda s: fenchel.linear_entmax_loss(
        s, numbers(50, 100), indices(8), alpha=learned()
    ),
    "output with a tensor alpha": lambda s: fenchel.linear_entmax_loss(
        s, numbers(50, 100), indices(8), alpha=learned().detach()
    ),
    "nn.LinearEntmaxLoss": lambda s: fenchel.nn.LinearEntmaxLoss(100, 50, learnable=True).to("meta")(s, indices(8)),
    "nn.EntmaxLoss": lambda s: fenchel.nn.EntmaxLoss(1.5).to("meta")(s, indices(8)),
    "nn.Entmax": lambda s: fenchel.nn.Entmax(1.5, learnable=True).to("meta")(s),
    "nn.MultiheadAttention": lambda s: fenchel.nn.MultiheadAttention(100, 4).to("meta")(s, s, s)[0],
    "nn.MultiheadAttention with padding": lambda s: fenchel.nn.MultiheadAttention(100, 4, batch_first=True).to("meta")(
        s[None], s[None], s[None], key_padding_mask=numbers(1, 8).bool(), need_weights=False
    )[0],
    **{
        f"attention of {omega}": lambda s, make=make: fenchel.attention(
            (q := numbers(2, 4, 64, 16) + s.sum()), q, q, make(), dropout_p=0.1
        )
        for omega, make in OMEGAS.items()
    },
    "attention by parts": lambda s: fenchel.attention((q := numbers(1, 4, 1024, 16) + s.sum()), q, q, is_causal=True),
}


@pytest.mark.parametrize("name", WITHOUT_SYNC)
def test_no_value_on_a_device_is_waited_for(name: str, device: str) -> None:
    scores = torch.empty(8, 100, device=device, requires_grad=True)
    WITHOUT_SYNC[name](scores).sum().backward()
    assert scores.grad is not None
    with torch.no_grad():
        WITHOUT_SYNC[name](scores)


def test_the_fake_device_refuses_every_look_at_a_value(device: str) -> None:
    scores = torch.empty(8, 100, device=device)
    looks = [
        bool,
        lambda s: s.sum().item(),
        Tensor.cpu,
        Tensor.nonzero,
        lambda s: s[s > 0],
        lambda s: torch.equal(s, s),
    ]
    for look in looks:
        with pytest.raises((RuntimeError, NotImplementedError)):
            look(scores)
    assert fenchel.regularizers.rowmap.concrete(scores)


@pytest.mark.parametrize(("choose", "least"), [(fenchel.entmax, 0.0), (fenchel.normmax, 1.0)])
def test_an_alpha_out_of_range_on_a_device_makes_its_row_nan(
    choose: Callable[..., Tensor], least: float, set_kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_kernels(False)
    for module in ("_checks", "regularizers.tsallis", "regularizers.norm", "regularizers.solvers.thresholds"):
        monkeypatch.setattr(f"fenchel.{module}.known", lambda *tensors: False)
    scores = ROWS.index_fill(1, torch.tensor([2]), -torch.inf).requires_grad_()
    p = choose(scores, torch.tensor([[least - 0.5], [least], [1.5], [torch.nan]]))
    assert p.isnan().all(-1).tolist() == [True, True, False, True]
    torch.testing.assert_close(p[2], choose(scores[2], 1.5))
    (slope,) = torch.autograd.grad(p[2, 0], scores)
    assert slope[2].isfinite().all()


VIEWS = {"detach", "view", "expand", "unsqueeze", "squeeze", "alias", "slice", "_unsafe_view", "transpose", "permute"}


class Launches(TorchDispatchMode):
    """A mode that counts the operators that a device would have to launch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("choose", "forward", "backward"),
    [
        (fenchel.sparsemax, 40, 12),
        (fenchel.entmax, 40, 12),
        (lambda s: fenchel.normmax(s, torch.inf), 40, 12),
        (fenchel.normmax, 40, 24),
        (lambda s: fenchel.entmax(s, 1.0001), 120, 12),
        (lambda s: fenchel.normmax(s, 1.1), 120, 24),
        # From here on the steps that are proven to be enough take more than 120 operators.
        (lambda s: fenchel.entmax(s, 1.1), 160, 12),
        (lambda s: fenchel.entmax(s, 1.3), 140, 12),
        (lambda s: fenchel.entmax(s, 0.5), 180, 12),
        (lambda s: fenchel.entmax(s, 1.75), 220, 12),
        (lambda s: fenchel.normmax(s, 20.0), 250, 24),
        (lambda s: fenchel.entmax(s, 3.0), 420, 40),
        (lambda s: fenchel.constrained_softmax(s, torch.full_like(s, 0.5)), 150, 20),
        (lambda s: fenchel.k_subsets(s, 2), 230, 20),
    ],
)
def test_a_device_launches_few_operators(choose: Callable[[Tensor], Tensor], forward: int, backward: int) -> None:
    scores = torch.empty(8, 32_000, device="meta", requires_grad=True)
    with Launches() as there:
        p = choose(scores)
    grad = torch.empty_like(p)
    with Launches() as back:
        p.backward(grad)
    assert there.count <= forward
    assert back.count <= backward


# -- dynamic programs and factor graphs: computed on the CPU from one copy of the scores ------------------------------


def tree_with_budgets(s: Tensor) -> Tensor:
    graph = fenchel.FactorGraph()
    u = graph.variables(s[:, :4, :5], batch_dims=1)
    graph.add(fenchel.factors.DependencyTree(u))
    graph.add(Budget(u[:, 1], 1))
    graph.add(fenchel.factors.Sequence(u[:, :2], s[0, :2, :2]))
    graph.solve()
    return u.value


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "chain": lambda s: LinearChain(s, s[0, :6]).value,
    "chain with lengths": lambda s: LinearChain(s, s[0, :6], indices(3) + 4, s[0, 0], s[:, 1], Gini()).value,
    "chain loss": lambda s: LinearChain(s, s[0, :6]).loss(indices(3, 7)),
    "transition marginals": lambda s: LinearChain(s, s[0, :6]).transition_marginals,
    "chain with an alpha": lambda s: LinearChain(s, s[0, :6], omega=Tsallis(1.4, learnable=True).to("meta")).value,
    "chain log_prob": lambda s: LinearChain(s, s[0, :6]).log_prob(indices(2, 3, 7)),
    "chain entropy": lambda s: LinearChain(s, s[0, :6]).entropy(),
    "kl_divergence": lambda s: LinearChain(s, s[0, :6]).kl_divergence(LinearChain(2 * s, s[0, :6])),
    "alignment": lambda s: Alignment(s, omega=fenchel.Gini()).marginals,
    "lattice": lambda s: Lattice(torch.arange(6), torch.arange(1, 7), s[:, 0], 7).value,
    "dtw": lambda s: dtw(s, s[:, :3]),
    "dtw_divergence": lambda s: fenchel.dp.dtw_divergence(s, s[:, :3]),
    "factor graph": tree_with_budgets,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_and_graphs_go_to_the_cpu_and_back(name: str) -> None:
    scores = torch.zeros(3, 7, 6, device="meta", requires_grad=True)
    result = PROGRAMS[name](scores)
    assert result.is_meta
    result.sum().backward()
    assert scores.grad is not None
    assert scores.grad.is_meta
    with torch.no_grad():
        assert PROGRAMS[name](scores).is_meta


def test_paths_are_returned_on_the_device_of_the_scores() -> None:
    scores = torch.zeros(3, 7, 6, device="meta")
    for d in (LinearChain(scores, scores[0, :6]), Alignment(scores)):
        assert d.map().is_meta
        assert d.sample(2).is_meta
        assert d.top(2).paths.is_meta
        assert d.top(2).probs.is_meta
        assert d.walk.is_meta
        assert d.bounds().upper.is_meta
    assert barycenter(scores, max_iter=2).is_meta


class OnDevice(Launches):
    """A mode that counts the operators that have an argument on the device, and the copies from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves((args, kwargs)))
        return super().__torch_dispatch__(func, types, args, kwargs) if there else func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "call",
    [
        lambda s: LinearChain(s, s[0, :21], s.new_full((4,), 20, dtype=torch.long)).loss(indices(4, 40)),
        lambda s: Alignment(s, omega=Gini()).value,
    ],
)
def test_the_number_of_operators_on_a_device_does_not_grow_with_the_steps(call: Callable[[Tensor], Tensor]) -> None:
    scores = torch.zeros(4, 40, 21, device="meta", requires_grad=True)
    with OnDevice() as launches:
        call(scores).sum().backward()
    assert launches.count <= 40


def test_values_and_gradients_of_scores_on_a_device_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy from the device is replaced by one that has values, and keeps the gradient that goes back."""
    steps = STATES.shape[1]
    flat = torch.cat([STATES.reshape(-1), STEP.reshape(-1)])
    sent = []

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            assert tensor.shape == flat.shape  # one copy for all scores
            return flat.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            sent.append(grad)
            return grad.to("meta")

    monkeypatch.setattr("fenchel._torch._Zeros", Copy)
    unary, step = (t.to("meta").requires_grad_() for t in (STATES, STEP))
    d = LinearChain(unary, step, start=None, omega=Gini())
    here = [t.clone().requires_grad_() for t in (STATES, STEP)]
    expected = LinearChain(*here, omega=Gini())
    assert d.value.is_meta
    assert torch.equal(d.exact_maximum(), expected.exact_maximum())
    d.value.sum().backward()
    expected.value.sum().backward()
    assert torch.equal(sent[0], torch.cat([t.grad.reshape(-1) for t in here if t.grad is not None]))
    assert unary.grad is not None
    assert unary.grad.shape == (2, steps, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda share: fenchel.nn.MultiheadAttention(8, 2, dropout=share),
        lambda share: Hopfield(8, dropout=share),
        lambda share: Hopfield(8, bag_dropout=share),
        lambda share: HopfieldEncoderLayer(Hopfield(8), dropout=share),
        lambda share: Recurrent(Vocabulary("ab"), Vocabulary("ab"), dropout=share),
        lambda share: Transformer(Vocabulary("ab"), Vocabulary("ab"), dropout=share),
    ],
)
@pytest.mark.parametrize("share", [float("nan"), -0.1, 1.5])
def test_layers_refuse_shares_to_drop_that_are_none(make: Callable[[float], Any], share: float) -> None:
    with pytest.raises(ValueError, match=r"dropout(_p)? must (be in \[0, 1|satisfy 0 <= \w+ <=? 1)"):
        make(share)


@pytest.mark.parametrize("kind", [Recurrent, Transformer])
def test_models_write_the_same_strings_whatever_the_default_device(kind: Any) -> None:
    torch.manual_seed(0)
    letters = Vocabulary("abcd")
    model = kind(letters, letters).eval()
    pairs = [Pair(tuple("abc"), tuple("cab")), Pair(tuple("d"), ("a",))]

    def everything() -> list[Any]:
        found = beam_search(model, [pair.source for pair in pairs], beam_size=3, max_length=4)
        choices = force(model, pairs[0].source, letters.encode("cab"))
        rest = complete(model, pairs[0].source, letters.encode("c"), max_length=3)
        return [found, choices, rest, model(collate(pairs, letters, letters)).item()]

    expected = everything()
    torch.set_default_device("meta")
    try:
        assert everything() == expected
    finally:
        torch.set_default_device(None)

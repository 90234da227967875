"""Decoders whose attention has bounds over all steps, or is continuous."""

import math
from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from fenchel import Gini, Hard, Shannon, Tsallis
from fenchel.continuous import ContinuousAttention, GaussianBasis, MatchedEncoder, PooledEncoder
from fenchel.seq2seq import (
    Ensemble,
    FertilityPredictor,
    Pair,
    Recurrent,
    Transformer,
    Vocabulary,
    beam_search,
    collate,
    complete,
    enumerate_support,
    force,
)
from fenchel.seq2seq.fertility import constrained

LETTERS = Vocabulary("abcdef")
PAIRS = [Pair(tuple("abc"), tuple("fed")), Pair(tuple("a"), tuple("bb")), Pair(tuple("fedcba"), ())]
HIDDEN = 8


def fertilities() -> dict[str, object]:
    return {
        "number": 0.7,
        "tensor": torch.linspace(0.2, 1.5, len(LETTERS)),
        "parameter": nn.Parameter(torch.linspace(0.2, 1.5, len(LETTERS))),
        "predictor": FertilityPredictor(HIDDEN, most=2.0),
        "module": nn.Sequential(nn.Linear(HIDDEN, 1), nn.Softplus()),
    }


def attentions() -> dict[str, ContinuousAttention]:
    basis = GaussianBasis.line(30, widths=(0.03, 0.1, 0.3))
    return {
        "added": ContinuousAttention(basis, encoder=MatchedEncoder(Gini()), combined=True),
        "matched": ContinuousAttention(basis, alpha=1.0, encoder=MatchedEncoder(Shannon())),
        "pooled": ContinuousAttention(basis, encoder=PooledEncoder(HIDDEN, num_heads=2)),
    }


def make(seed: int = 0, **options: object) -> Recurrent:
    torch.manual_seed(seed)
    return Recurrent(LETTERS, LETTERS, embedding=6, hidden=HIDDEN, layers=1, dropout=0.0, **options)  # type: ignore[arg-type]


FERTILITIES, ATTENTIONS = list(fertilities()), list(attentions())
OPTIONS = [("fertility", name) for name in FERTILITIES] + [("attention", name) for name in ATTENTIONS]


def made(option: tuple[str, str], seed: int = 0) -> Recurrent:
    kind, name = option
    torch.manual_seed(1)
    part = fertilities()[name] if kind == "fertility" else attentions()[name]
    model = make(seed, **{kind: part})
    if model.key is not None:
        with torch.no_grad():  # attention that differs from symbol to symbol
            model.key.weight.mul_(8.0)
    return model


@pytest.mark.parametrize("total", [0.3, 0.99, 1.0, 2.5])
def test_constrained_attention_is_the_projection_on_its_bounds(total: float) -> None:
    """A quadratic program: mass 1, or all that is left."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(5, generator=generator, dtype=torch.float64)
    left = torch.rand(5, generator=generator, dtype=torch.float64)
    left = left * total / left.sum()
    mass = min(total, 1.0)
    target = scores.numpy()
    answer = minimize(
        lambda p: ((p - target) ** 2).sum() / 2,
        left.numpy() * mass / total,
        jac=lambda p: p - target,
        bounds=[(0.0, float(u)) for u in left],
        constraints={"type": "eq", "fun": lambda p: p.sum() - mass},
        options={"ftol": 1e-15, "maxiter": 500},
    )
    found = constrained(scores[None], left[None], Gini())[0]
    torch.testing.assert_close(found, torch.as_tensor(answer.x), atol=1e-6, rtol=0)
    assert float(constrained(scores[None], left[None], Shannon()).sum()) == pytest.approx(mass)
    cooler = constrained(scores[None], left[None], 0.5 * Gini())
    torch.testing.assert_close(cooler, constrained(2 * scores[None], left[None], Gini()))


@pytest.mark.parametrize("name", FERTILITIES)
def test_no_symbol_receives_more_than_its_fertility(name: str) -> None:
    model = made(("fertility", name)).eval()
    source, target = "abca", "fedcba"
    weights = model.attend(source, target).double()
    numbers = LETTERS.encode(source)
    given = model.fertility
    if isinstance(given, nn.Module):
        bound = given(model.start([source]).memory).detach().reshape(4).double()
    else:
        bound = torch.as_tensor(given, dtype=torch.float64).detach().expand(len(LETTERS))[numbers]
    assert bool((weights.sum(0) <= bound + 1e-5).all())
    # What is given at each step: 1, or all that is left.
    left = bound - (weights.cumsum(0) - weights)
    torch.testing.assert_close(weights.sum(1), left.sum(1).clamp(max=1.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("omega", [Gini(), Shannon()], ids=str)
def test_a_large_fertility_changes_nothing(omega: Gini) -> None:
    bounded, free = make(attention=omega, fertility=100.0).eval(), make(attention=omega).eval()
    torch.testing.assert_close(bounded.attend("abc", "fed"), free.attend("abc", "fed"))


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@torch.no_grad()
def test_steps_give_what_is_learned_at_once(option: tuple[str, str]) -> None:
    """Padding, a batch, and one step after the other: the same distributions as ``force`` of each pair alone."""
    model = made(option).eval()
    batch = collate(PAIRS, LETTERS, LETTERS)
    state = model.encode(batch.source)
    hidden, weights = model.decode(state, batch.inputs)
    for step in range(batch.inputs.shape[1]):
        found, state = model.step(batch.inputs[:, step].clamp_max(len(LETTERS)), state)
        for row, pair in enumerate(PAIRS):
            if step <= len(pair.target):
                torch.testing.assert_close(found[row], model.omega.argmax(model.output(hidden[row, step])))
                torch.testing.assert_close(state.attention[row], weights[row, step])
    for row, pair in enumerate(PAIRS):
        alone = force(model, pair.source, LETTERS.encode(pair.target))
        p = model.omega.argmax(model.output(hidden[row]))
        for step, choice in enumerate(alone):
            assert choice.probability == pytest.approx(float(p[step, choice.token]), abs=1e-5)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_searches_carry_what_was_spent(option: tuple[str, str]) -> None:
    """The probability and coverage of each hypothesis are those of its own steps: beams reorder the states."""
    model = made(option).eval()
    with torch.no_grad():
        model.output.weight.mul_(3.0)
        model.output.bias[0] = 0.3
    found = beam_search(model, ["abc", "fedcb"], beam_size=4, max_length=5)
    assert any(len(beam.hypotheses) > 1 for beam in found)
    for source, beam in zip(["abc", "fedcb"], found, strict=True):
        for each in beam.hypotheses:
            if each.finished:
                log = sum(math.log(choice.probability) for choice in force(model, source, each.tokens))
                assert each.log_probability == pytest.approx(log, abs=1e-4)
            weights = model.attend(source, LETTERS.decode(each.tokens))
            assert each.coverage is not None
            torch.testing.assert_close(each.coverage, weights.sum(0), atol=1e-5, rtol=1e-4)
    for beam in enumerate_support(model, ["abc"], max_length=3):
        assert all(each.coverage is not None for each in beam.hypotheses)
    assert len(complete(model, "abc", max_length=3).tokens) <= 3
    assert beam_search(Ensemble([model, model]), ["abc"], max_length=3)[0].mass <= 1


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_the_loss_trains_every_part(option: tuple[str, str]) -> None:
    """The gradient of the loss is that of finite differences, through what was spent at earlier steps."""
    model = made(option).double()
    batch = collate(PAIRS, LETTERS, LETTERS)
    loss = model(batch)
    loss.backward()
    checked = 0
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("key", "fertility", "continuous")):
            continue
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        assert parameter.grad is not None
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6 * direction)
                values.append(float(model(batch)))
                parameter.sub_(sign * 1e-6 * direction)
        slope = float((parameter.grad * direction).sum())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, abs=1e-7, rel=1e-4), name
        checked += 1
    assert checked >= (2 if option[1] in ("parameter", "predictor", "module", "pooled") else 1)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_folder_gives_the_model_back(option: tuple[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    model = made(option).to(dtype).eval()
    model.save(tmp_path)
    if option[1] == "module":
        with pytest.raises(ValueError, match="load with fertility"):
            Recurrent.load(tmp_path)
        loaded = Recurrent.load(tmp_path, fertility=fertilities()["module"])
    else:
        loaded = Recurrent.load(tmp_path)
    assert torch.equal(loaded.attend("abca", "fed"), model.attend("abca", "fed"))
    assert [*loaded.state_dict()] == [*model.state_dict()]
    assert isinstance(loaded.fertility, nn.Parameter) == isinstance(model.fertility, nn.Parameter)


def test_attention_of_the_users_own_making_is_not_written(tmp_path: Path) -> None:
    class Mine(MatchedEncoder):
        pass

    model = make(attention=ContinuousAttention(GaussianBasis.line(10), encoder=Mine()))
    with pytest.raises(ValueError, match="a file cannot hold"):
        model.save(tmp_path)


def test_continuous_attention_is_that_of_its_scores() -> None:
    """By hand: the scores of the last state, through the same module."""
    attention = attentions()["added"]
    model = make(attention=attention).eval()
    state = model.start(["abcd"])
    _, after = model.advance(torch.tensor([LETTERS.start]), state)
    scores = (state.keys @ after.hidden[-1].unsqueeze(-1)).squeeze(-1)
    expected = attention.attend(state.memory, scores)
    torch.testing.assert_close(after.attention, expected.weights.squeeze(-2))
    entered = torch.cat([after.hidden[-1], expected.context], 1)
    torch.testing.assert_close(after.feed, torch.tanh(model.context(entered)))


def test_parts_are_copied_and_not_shared() -> None:
    predictor = FertilityPredictor(HIDDEN)
    one, other = make(fertility=predictor), make(fertility=predictor)
    with torch.no_grad():
        one.fertility.score.weight.zero_()  # type: ignore[union-attr]
    assert bool((other.fertility.score.weight != 0).any())  # type: ignore[union-attr]


def test_models_without_coverage_tell_none() -> None:
    torch.manual_seed(0)
    model = Transformer(LETTERS, LETTERS, width=8, num_heads=2, layers=1, inner=12).eval()
    (found,) = beam_search(model, ["ab"], max_length=2)
    assert found.best.coverage is None


def test_a_search_of_several_lengths_tells_the_coverage_of_each_source() -> None:
    found = beam_search(make().eval(), ["abcdef", "a"], max_length=3)
    for beam, length in zip(found, (6, 1), strict=True):
        coverage = beam.best.coverage
        assert coverage is not None
        assert coverage.shape == (length,)
        assert float(coverage.sum()) == pytest.approx(len(beam.best.tokens) + 1, abs=1e-5)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, r"attention must be Gini\(\) or Shannon\(\)", {"attention": Tsallis(1.5), "fertility": 1.0}),
        (ValueError, r"attention must be Gini\(\) or Shannon\(\)", {"attention": Hard(), "fertility": 1.0}),
        (ValueError, "fertility must satisfy 0 <", {"fertility": 0.0}),
        (ValueError, r"fertility must have shape \(8,\)", {"fertility": torch.ones(3)}),
        (ValueError, "fertility must not be negative", {"fertility": -torch.ones(8)}),
        (TypeError, "fertility must be a number", {"fertility": "many"}),
        (ValueError, "fertility must be None", {"attention": attentions()["added"], "fertility": 1.0}),
        (
            ValueError,
            "one dimension",
            {"attention": ContinuousAttention(GaussianBasis.grid(3), encoder=MatchedEncoder())},
        ),
        (ValueError, "encoder", {"attention": ContinuousAttention(GaussianBasis.line(4))}),
        (ValueError, "width 8", {"attention": ContinuousAttention(GaussianBasis.line(4), encoder=PooledEncoder(5))}),
        (
            ValueError,
            "one head",
            {"attention": ContinuousAttention(GaussianBasis.line(4), encoder=MatchedEncoder(num_heads=2))},
        ),
        (TypeError, "attention", {"attention": nn.Identity()}),
    ],
)
def test_bad_arguments_are_refused(error: type[Exception], match: str, options: dict[str, object]) -> None:
    with pytest.raises(error, match=match):
        make(**options)


def test_a_predictor_of_the_wrong_shape_is_refused() -> None:
    model = make(fertility=nn.Linear(HIDDEN, 2)).eval()
    with pytest.raises(ValueError, match="one number per symbol"):
        model.start(["abc"])


def test_load_refuses_options_that_a_model_does_not_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Transformer(LETTERS, LETTERS, width=8, num_heads=2, layers=1, inner=12).save(tmp_path)
    with pytest.raises(ValueError, match="no argument fertility"):
        Transformer.load(tmp_path, fertility=1.0)


def test_an_exhausted_source_gives_zero_attention() -> None:
    model = make(fertility=0.1).eval()
    weights = model.attend("ab", "abcdef")
    assert float(weights[0].sum()) == pytest.approx(0.2)
    assert not bool(weights[1:].any())

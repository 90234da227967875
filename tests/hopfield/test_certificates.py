"""Propositions 2 to 5 on random memories: what is certified is retrieved, and what is not is not."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.spatial.distance import pdist
from torch import Tensor
from torch.testing import assert_close

from fenchel import Capped, Fused, Gini, Hard, KSubsets, Norm, Regularizer, Shannon, SparseMAP, Tsallis
from fenchel.hopfield import Memory, capacity
from fenchel.hopfield.certificates import needed_lead
from fenchel.streaming import Plan, using
from fenchel.structures import AtMost, SequentialSubsets, Share, Structure, Subsets

MARGINS = [
    (Tsallis(1.5), 2.0),
    (Gini(), 1.0),
    (Tsallis(4.0), 1 / 3),
    (Norm(2.0), 1.0),
    (Norm(5.0), 1.0),
    (Norm(math.inf), 1.0),
    (3.0 * Tsallis(1.5), 6.0),
    (KSubsets(1), 1.0),
]
every_margin = st.sampled_from(MARGINS)
seeds = st.integers(0, 10**6)


def draw(seed: int, count: int = 8, width: int = 5) -> Tensor:
    """Patterns of unequal norms."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.5 + torch.rand(count, 1, generator=generator, dtype=torch.float64)
    return scale * torch.randn(count, width, generator=generator, dtype=torch.float64)


def outside_hull(x: np.ndarray, i: int) -> bool:
    """Whether pattern i is no convex combination of the others: a linear program."""
    others = np.delete(x, i, 0)
    equal = np.vstack([others.T, np.ones(len(others))])
    answer = linprog(np.zeros(len(others)), A_eq=equal, b_eq=np.append(x[i], 1.0), bounds=(0, None))
    return answer.status == 2


@pytest.mark.slow
@given(seeds, every_margin, st.floats(0.2, 20.0))
@settings(max_examples=40)
def test_a_pattern_is_stationary_iff_it_is_separated(seed: int, case: tuple[Regularizer, float], beta: float) -> None:
    """Proposition 2, both directions, for patterns outside the hull of the others."""
    omega, margin = case
    x = draw(seed)
    memory = Memory(x, omega, beta)
    found = memory.certify()
    products = x @ x.T
    others = products.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
    separation = products.diagonal() - others.amax(-1)
    torch.testing.assert_close(found.separation, separation)
    torch.testing.assert_close(found.min_beta, torch.where(separation > 0, margin / separation, torch.inf))
    after = memory.step(x)
    for i in range(len(x)):
        if abs(separation[i] * beta - margin) < 1e-9 or not outside_hull(x.numpy(), i):
            continue
        assert bool(found.stationary[i]) == (float(separation[i]) >= margin / beta)
        assert bool(found.stationary[i]) == torch.equal(after[i], x[i])


@given(seeds, every_margin)
@settings(max_examples=15)
def test_min_beta_is_where_a_pattern_becomes_stationary(seed: int, case: tuple[Regularizer, float]) -> None:
    x = draw(seed)
    least = Memory(x, case[0]).certify().min_beta
    for i in range(len(x)):
        if math.isfinite(least[i]):
            assert torch.equal(Memory(x, case[0], float(least[i]) * (1 + 1e-9)).step(x[i]), x[i])
            below = Memory(x, case[0], float(least[i]) * (1 - 1e-4))
            assert not bool(below.certify().stationary[i])
            assert float(below.weights(x[i])[i]) < 1
        else:
            assert not bool(Memory(x, case[0], 1e6).certify().stationary[i])


@given(seeds, every_margin)
@settings(max_examples=40)
def test_one_step_retrieves_inside_the_radius_and_not_beyond(seed: int, case: tuple[Regularizer, float]) -> None:
    """Proposition 2 with the largest ball there is: a query just beyond it, towards its rival, is not retrieved."""
    omega, margin = case
    x, beta = draw(seed), 5.0
    memory = Memory(x, omega, beta)
    found = memory.certify()
    assert torch.equal(found.radius >= 0, found.stationary)
    generator = torch.Generator().manual_seed(seed)
    for i in found.stationary.nonzero().flatten().tolist():
        radius = float(found.radius[i])
        direction = torch.randn(50, x.shape[1], generator=generator, dtype=torch.float64)
        direction /= torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        inside = x[i] + radius * (1 - 1e-9) * direction
        assert torch.equal(memory.step(inside), x[i].expand_as(inside))
        assert torch.equal(memory.retrieve(inside).state, x[i].expand_as(inside))
        away = x[i] - x
        length = torch.linalg.vector_norm(away, dim=-1)
        lead = torch.where(length > 0, (away @ x[i] - margin / beta) / length, torch.inf)
        rival = int(lead.argmin())
        assert radius == pytest.approx(float(lead[rival]))
        towards = -away[rival] / length[rival]
        assert torch.equal(memory.step(x[i] + radius * (1 - 1e-6) * towards), x[i])
        assert float(memory.weights(x[i] + (radius + 1e-3) * towards)[rival]) > 0
        assert not torch.equal(memory.step(x[i] + (radius + 1e-3) * towards), x[i])


@given(seeds, every_margin)
@settings(max_examples=20)
def test_the_radius_is_no_smaller_than_that_of_proposition_2(seed: int, case: tuple[Regularizer, float]) -> None:
    omega, margin = case
    x = draw(seed)
    x = 2 * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    found = Memory(x, omega, 5.0).certify()
    printed = (found.separation - margin / 5.0) / (2 * 2)
    assert bool((found.radius >= printed - 1e-12)[found.stationary].all())


@pytest.mark.parametrize(("omega", "margin"), MARGINS, ids=str)
@pytest.mark.parametrize("copies", [2, 3])
def test_copies_share_and_need_less(omega: Regularizer, margin: float, copies: int) -> None:
    """Duplicates have separation 0, and are stationary all the same; their ball is the largest, too."""
    others = draw(3, 4, 3)
    x = torch.cat([torch.tensor([[4.0, 1.0, 0.0]], dtype=torch.float64).expand(copies, 3), others])
    for beta in (0.05, 0.11, 0.2, 0.5, 2.0):
        memory = Memory(x, omega, beta)
        found = memory.certify()
        assert bool((found.separation[:copies] == 0).all())
        stays = torch.allclose(memory.step(x[0]), x[0], atol=1e-12, rtol=0)
        assert found.stationary[:copies].tolist() == [stays] * copies
        if stays:
            away = x[0] - others
            length = torch.linalg.vector_norm(away, dim=-1)
            rival = int(((away @ x[0]) / length).argmin())
            radius = float(found.radius[0])
            for number in range(len(others)):
                towards = -away[number] / length[number]
                inside = memory.step(x[0] + (radius - 1e-9) * towards)
                torch.testing.assert_close(inside, x[0], atol=1e-12, rtol=0)
            outside = [memory.step(x[0] - (radius + 1e-3) * a / n) for a, n in zip(away, length, strict=True)]
            assert any(not torch.allclose(each, x[0], atol=1e-9) for each in outside), rival
        least = float(found.min_beta[0])
        assert torch.allclose(Memory(x, omega, least * 1.0001).step(x[0]), x[0], atol=1e-12, rtol=0)
        assert not torch.allclose(Memory(x, omega, least * 0.98).step(x[0]), x[0], atol=1e-12, rtol=0)


def test_softmax_promises_nothing_and_argmax_everything_that_leads() -> None:
    x = draw(0)
    soft = Memory(x, Shannon(), 50.0).certify()
    assert not bool(soft.stationary.any())
    assert bool((soft.min_beta == math.inf).all())
    hard = Memory(x, Hard(), 0.1).certify()
    assert torch.equal(hard.stationary, hard.separation > 0)
    assert torch.equal(hard.stationary, (Memory(x, Hard(), 0.1).step(x) == x).all(-1))
    tie = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    assert not bool(Memory(tie, Hard()).certify().stationary[0])


def test_a_single_pattern_has_no_rival() -> None:
    found = Memory(draw(0, 1)).certify()
    assert found.separation.item() == found.radius.item() == math.inf
    assert bool(found.stationary)
    assert found.min_beta.item() == 0


def test_blocks_change_nothing() -> None:
    x = draw(5, 30)
    x[3] = x[20]
    whole = Memory(x).certify()
    with using(Plan(columns=7)):
        parts = Memory(x).certify()
    with using(Plan(columns=7, exact=0)):
        single = Memory(x.float()).certify()
    for name in ("separation", "stationary", "radius", "min_beta"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    torch.testing.assert_close(single.radius, whole.radius, atol=1e-5, rtol=1e-5)


def associations(count: int, k: int) -> Tensor:
    rows = torch.zeros(math.comb(count, k), count, dtype=torch.bool)
    for row, chosen in zip(rows, itertools.combinations(range(count), k), strict=True):
        row[list(chosen)] = True
    return rows


def _is(weights: Tensor, y: Tensor) -> Tensor:
    """Whether weights are an association, to rounding: k of them are found as a sum."""
    return (weights - y.double()).abs().amax(-1) < 1e-14


def least_lead(scores: Tensor, y: Tensor) -> Tensor:
    """The lead in score of each association over the best of all others, where all are given."""
    values = scores @ y.double().T
    return values.diagonal() - values.masked_fill(torch.eye(len(y), dtype=torch.bool), -torch.inf).amax(-1)


@given(seeds, st.sampled_from([(2, 1.0), (3, 1.0), (2, 0.5)]), st.floats(0.3, 10.0))
@settings(max_examples=15)
def test_an_association_is_returned_iff_its_patterns_lead(seed: int, case: tuple[int, float], beta: float) -> None:
    """Propositions 4 and 5, with the exact gap in place of k/β."""
    k, gamma = case
    x = draw(seed, 7)
    memory = Memory(x, gamma * KSubsets(k), beta)
    y = associations(7, k)
    found = memory.certify(y)
    q = y.double() @ x
    scores = beta * q @ x.T
    gap = torch.where(y, scores, torch.inf).amin(-1) - torch.where(y, -torch.inf, scores).amax(-1)
    torch.testing.assert_close(found.separation, least_lead(q @ x.T, y))
    assert bool(found.exact.all())
    clear = (gap - gamma).abs() > 1e-9
    returned = _is(memory.weights(q), y)
    assert torch.equal(found.stationary[clear], returned[clear])
    assert torch.equal(found.stationary[clear], (gap >= gamma)[clear])
    for row in found.stationary.nonzero().flatten()[:3].tolist():
        radius = float(found.radius[row])
        rivals = [(i, j) for i in y[row].nonzero().flatten() for j in (~y[row]).nonzero().flatten()]
        apart = torch.stack([x[i] - x[j] for i, j in rivals])
        length = torch.linalg.vector_norm(apart, dim=-1)
        lead = (apart @ q[row] - gamma / beta) / length
        assert radius == pytest.approx(float(lead.min()))
        towards = -apart[lead.argmin()] / length[lead.argmin()]
        assert bool(_is(memory.weights(q[row] + radius * (1 - 1e-6) * towards), y[row]))
        assert not bool(_is(memory.weights(q[row] + (radius + 1e-3) * towards), y[row]))
        largest = float(torch.linalg.vector_norm(x, dim=-1).max())
        # The printed condition, k/β + 2Mkε, asks for more.
        assert radius >= (float(found.separation[row]) - k * gamma / beta) / (2 * largest * k) - 1e-12


@pytest.mark.parametrize(
    "structure",
    [SequentialSubsets(2), SequentialSubsets(2, torch.zeros(6)), Subsets(Share(0.3)), SequentialSubsets(Share(0.3))],
    ids=str,
)
def test_any_structure_of_all_subsets_of_k_is_certified_as_k_subsets(structure: Structure) -> None:
    patterns = 2 * torch.randn(7, 4, dtype=torch.float64)
    chosen = torch.zeros(5, 7, dtype=torch.bool)
    for row, pair in enumerate(itertools.islice(itertools.combinations(range(7), 2), 5)):
        chosen[row, list(pair)] = True
    found, wanted = (Memory(patterns, 0.5 * each, 1.3).certify(chosen) for each in (SparseMAP(structure), KSubsets(2)))
    torch.testing.assert_close(vars(found), vars(wanted), rtol=0, atol=0)


@pytest.mark.parametrize(
    "omega", [Gini(), Tsallis(1.2), Norm(3.0), Norm(math.inf), Capped(0.4), 0.3 * KSubsets(1)], ids=str
)
@pytest.mark.parametrize("copies", [3, 8])
def test_copies_take_all_at_the_lead_that_they_need_and_not_below(omega: Regularizer, copies: int) -> None:
    lead = needed_lead(omega, torch.tensor([copies]))
    assert lead is not None
    scores = torch.zeros(copies + 2, dtype=torch.float64)
    for off, alone in ((1e-6, True), (-1e-6, False)):
        scores[copies:] = -(lead + off)
        assert bool((omega.argmax(scores)[copies:] == 0).all()) == alone


def test_subsets_as_a_structure_are_k_subsets() -> None:
    x, y = draw(1, 6), associations(6, 2)
    one, other = Memory(x, KSubsets(2), 2.0).certify(y), Memory(x, SparseMAP(Subsets(2)), 2.0).certify(y)
    for name in ("separation", "stationary", "radius", "min_beta", "exact"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("structure", [SequentialSubsets(2, 0.4), SequentialSubsets(2, -0.3), AtMost(2)], ids=str)
def test_a_structure_is_certified_iff_it_is_returned(structure: SequentialSubsets, gamma: float) -> None:
    """Proposition 4 with higher-order scores, and its converse."""
    x, beta = draw(2, 6), 1.5
    y = associations(6, 2)
    memory = Memory(x, gamma * SparseMAP(structure), beta)
    found = memory.certify(y)
    q = y.double() @ x
    returned = (memory.weights(q) - y.double()).abs().amax(-1) < 1e-6
    assert torch.equal(found.stationary, returned)
    assert 0 < int(returned.sum()) < len(y)
    for row, least in enumerate(found.min_beta.tolist()):
        if 0 < least < math.inf:
            for factor, stays in ((1.001, True), (0.99, False)):
                weights = Memory(x, gamma * SparseMAP(structure), least * factor).weights(q[row])
                assert bool((weights - y[row].double()).abs().max() < 1e-6) == stays


@pytest.mark.parametrize(
    ("error", "match", "omega", "given"),
    [
        (ValueError, "pass associations", KSubsets(2), None),
        (ValueError, "2 patterns each, got one with 1", KSubsets(2), torch.eye(4, dtype=torch.bool)),
        (TypeError, "boolean", KSubsets(2), torch.eye(4)),
        (ValueError, r"shape \(A, 4\)", KSubsets(2), torch.eye(3, dtype=torch.bool)),
    ],
)
def test_bad_associations_are_refused(
    error: type[Exception], match: str, omega: Regularizer, given: Tensor | None
) -> None:
    with pytest.raises(error, match=match):
        Memory(draw(0, 4), omega).certify(given)


def test_capacity_is_proposition_3() -> None:
    """Patterns 60° apart: the printed numbers come out."""
    beta, norm = 3.0, 2.0
    noise = norm / 4 - 2.0 / (2 * beta * norm)
    found = capacity(20, beta, Tsallis(1.5), norm=norm, noise=noise)
    assert found.noise == pytest.approx(noise)
    assert found.angle == pytest.approx(math.pi / 3)
    assert found.equidistant == pytest.approx(math.sqrt(3 * math.pi * 20 / 8) * (2 / math.sqrt(3)) ** 20)
    beta, noise, d, p = 50.0, 0.05, 40, 0.01
    found = capacity(d, beta, Tsallis(1.5), norm=norm, noise=noise, failure=p)
    zeta = 1 / found.angle
    kappa = math.gamma(d / 2) / math.gamma((d - 1) / 2) / ((d - 1) * math.sqrt(math.pi))
    assert found.random == pytest.approx(math.sqrt(2 * p / kappa) * zeta ** ((d - 1) / 2))
    assert found.random > 1000
    assert norm / 2 * (1 - math.cos(1 / zeta)) - 2.0 / (2 * beta * norm) == pytest.approx(noise)


def test_so_many_random_patterns_are_retrieved() -> None:
    """The bound for patterns at random holds, at a rate of failure no larger than was asked for."""
    beta, dim, failure = 6.0, 12, 0.2
    count = int(capacity(dim, beta, Gini(), noise=0.02, failure=failure).random)
    assert count > 10
    failed = 0
    for seed in range(200):
        x = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x /= torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        cosine = 1 - pdist(x.numpy()).min() ** 2 / 2
        failed += 1 - cosine < 1 / beta + 2 * 0.02
    assert failed <= 200 * failure
    assert bool((Memory(x, Gini(), beta).certify().radius >= 0.02).all()) or failed


def test_capacity_tells_how_much_noise_random_patterns_stand() -> None:
    """Equation 11, with ζ from N; and the inverse of how many patterns a noise allows."""
    beta, norm, d, p, count = 50.0, 2.0, 40, 0.01, 5000
    found = capacity(d, beta, Tsallis(1.5), norm=norm, failure=p, count=count).random_noise
    kappa = math.gamma(d / 2) / math.gamma((d - 1) / 2) / ((d - 1) * math.sqrt(math.pi))
    zeta = (count**2 * kappa / (2 * p)) ** (1 / (d - 1))
    assert found == pytest.approx(norm / 2 * (1 - math.cos(1 / zeta)) - 2.0 / (2 * beta * norm))
    assert found > 0
    assert capacity(d, beta, Tsallis(1.5), norm=norm, noise=found, failure=p).random == pytest.approx(count)
    assert capacity(d, beta, Gini()).random_noise is None
    assert capacity(d, beta, Gini(), count=1).random_noise == math.inf
    assert capacity(2, 0.1, Gini(), count=10**9).random_noise < 0
    with pytest.raises(ValueError, match="count must be at least 1"):
        capacity(d, beta, Gini(), count=0)


def test_capacity_at_its_ends() -> None:
    assert capacity(5, 0.1, Gini()).equidistant == 1.0  # too hot for two
    assert math.isnan(capacity(5, 0.1, Gini()).angle)
    assert capacity(100_000, 1e3, Gini()).equidistant == math.inf
    assert math.isfinite(capacity(100_000, 1e3, Gini()).log_equidistant)
    for bad in ({"dim": 1}, {"beta": 0.0}, {"omega": Shannon()}, {"noise": -1.0}, {"failure": 0.0}, {"norm": 0.0}):
        with pytest.raises(ValueError, match=r"must"):
            capacity(**{"dim": 5, "beta": 1.0, "omega": Gini(), **bad})


@pytest.mark.parametrize(
    ("omega", "expected"),
    [
        (Tsallis(1.5), lambda c: 2 * c**-0.5),
        (0.3 * Gini(), lambda c: 0.3 / c),
        (Norm(3.0), lambda c: c ** (1 / 3 - 1)),
        (Norm(math.inf), lambda c: 1 / c),
        (KSubsets(1), lambda c: 1 / c),
        (Hard(), lambda c: 0 * c),
        (Shannon(), lambda c: c * math.inf),
    ],
    ids=lambda each: str(each) if isinstance(each, Regularizer) else "expected",
)
def test_the_lead_that_copies_need(omega: Regularizer, expected: Callable[[Tensor], Tensor]) -> None:
    copies = torch.tensor([1, 2, 2, 7])
    found = needed_lead(omega, copies)
    assert found is not None
    assert_close(found, expected(copies.double()), atol=1e-12, rtol=1e-12)
    for count, lead in zip(copies.tolist(), found.tolist(), strict=True):
        for offset, alone in ((1e-6, True), (-1e-6, False)):
            if 0 < lead < math.inf:
                others = omega.argmax(torch.tensor([0.0] * count + [-lead - offset] * 3, dtype=torch.float64))[count:]
                assert bool((others == 0).all()) is alone


def test_the_lead_of_copies_is_not_known_for_several_choices_at_once() -> None:
    for omega in (KSubsets(2), Fused(0.1), SparseMAP(Subsets(2))):
        assert needed_lead(omega, torch.tensor([1, 2])) is None

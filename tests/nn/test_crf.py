"""The tagging layer against all tag sequences, one by one, and against the packages that users come from."""

import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from dp.enumeration import Answer, chain_edges, parameters, solve
from fenchel import Gini, Regularizer, Shannon, Tsallis
from fenchel.dp import LinearChain
from fenchel.nn import CRF

SENTENCES, STEPS, TAGS = 5, 4, 3
MASK = torch.tensor(  # full, with a hole, with nothing in front, with one position, and empty
    [[True] * 4, [True, False, True, True], [False, True, False, True], [False, False, True, False], [False] * 4]
)
OMEGAS = [Shannon(), 0.5 * Gini(), Tsallis(1.5), Tsallis(1.2)]
every_omega = pytest.mark.parametrize("omega", OMEGAS, ids=lambda o: str(o).replace("\n", ""))
either_way = pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
BIO = ["O", "B-X", "I-X", "B-Y", "I-Y"]
BIOES = [*BIO, "E-X", "S-X", "E-Y", "S-Y"]
FORMS = {"BIO": r"(O |B-X (I-X )*|B-Y (I-Y )*)*", "BIOES": r"(O |S-X |S-Y |B-X (I-X )*E-X |B-Y (I-Y )*E-Y )*"}


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if hasattr(request.node, "callspec"):
        set_kernels(request.node.callspec.params.get("compiled", True))


def layer(num_tags: int = TAGS, omega: Regularizer | None = None, **options: object) -> CRF:
    torch.manual_seed(0)
    crf = CRF(num_tags, omega, **options).double()
    for each in crf.parameters():
        torch.nn.init.normal_(each)
    return crf


def emissions_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answer(crf: CRF, emissions: Tensor, kept: Tensor) -> Answer:
    """All sequences of one sentence, without what the mask leaves out; parts are positions × tags of what is left."""
    tensors = (t.detach() for t in (crf.transitions, crf.start_transitions, crf.end_transitions))
    unary = emissions[kept].unsqueeze(0)
    unary = unary if len(unary[0]) else emissions[:1].unsqueeze(0)  # not read: the sentence is empty
    return solve(*chain_edges(0, unary, *tensors, lengths=kept.sum().reshape(1)), *parameters(crf.omega))


def spread(parts: list[int], kept: Tensor) -> Tensor:
    """A sequence at its positions."""
    path = torch.full(kept.shape, -1)
    path[kept] = torch.tensor([part % TAGS for part in parts if part >= 0], dtype=torch.long)
    return path


@either_way
@every_omega
def test_every_verb_agrees_with_enumeration_of_what_the_mask_leaves(omega: Regularizer, compiled: bool) -> None:
    crf, emissions = layer(omega=omega), emissions_of(SENTENCES, STEPS, TAGS)
    chain = crf(emissions, MASK)
    assert isinstance(chain, LinearChain)
    best, top = chain.map(), chain.top(TAGS**STEPS + 1)
    for b, kept in enumerate(MASK):
        expected = answer(crf, emissions[b], kept)
        assert chain.value[b].item() == pytest.approx(expected.value, abs=1e-12)
        assert chain.entropy()[b].item() == pytest.approx(expected.entropy(), abs=1e-11)
        marginals = torch.zeros(STEPS, TAGS).double()
        links = torch.zeros(STEPS - 1, TAGS, TAGS).double()
        scores = {}
        for parts, probability, score in expected.paths:
            path = spread(parts, kept)
            scores[tuple(path.tolist())] = score, probability
            places = kept.nonzero().flatten().tolist()
            for t in places:
                marginals[t, path[t]] += probability
            for t, after in itertools.pairwise(places):
                links[t, path[t], path[after]] += probability
            given = best.clone()
            given[b] = path
            assert chain.loss(given)[b].item() == pytest.approx(max(expected.value - score, 0), abs=1e-12)
            assert chain.log_prob(given)[b].exp().item() == pytest.approx(probability, abs=1e-11)
        torch.testing.assert_close(chain.marginals[b], marginals, rtol=0, atol=1e-12)
        torch.testing.assert_close(chain.transition_marginals[b], links, rtol=0, atol=1e-12)
        for t, after in itertools.pairwise(kept.nonzero().flatten().tolist()):
            reached = marginals[after] > 1e-9
            steps = links[t][:, reached] / marginals[after, reached]
            torch.testing.assert_close(chain.walk[b, t][:, reached], steps, rtol=0, atol=1e-9)
        assert tuple(best[b].tolist()) == max(scores, key=lambda path: scores[path][0])
        for path, probability in zip(top.paths[b].tolist(), top.probs[b].tolist(), strict=True):
            if probability > 0:
                assert scores[tuple(path)][1] == pytest.approx(probability, abs=1e-12)
        assert top.probs[b].sum().item() == pytest.approx(1)
        for path in chain.sample(20)[:, b].tolist():
            assert scores[tuple(path)][1] > 0


def test_a_sentence_without_positions_has_one_sequence_and_no_loss() -> None:
    emissions = torch.full((2, 3, TAGS), math.nan).double().requires_grad_()
    tags = torch.tensor([[0, 7, -1], [-100, 1, 2]])
    chain = layer()(emissions, torch.zeros(2, 3, dtype=torch.bool))
    for each in (chain.value, chain.loss(tags), chain.log_prob(chain.map()), chain.entropy()):
        assert (each == 0).all()
    assert (chain.map() == -1).all()
    (gradient,) = torch.autograd.grad(chain.loss(tags).sum(), emissions)
    assert (gradient == 0).all()


def test_nothing_at_a_masked_position_matters() -> None:
    crf, emissions = layer(), emissions_of(SENTENCES, STEPS, TAGS)
    tags = torch.randint(TAGS, (SENTENCES, STEPS))
    spoilt = torch.where(MASK.unsqueeze(-1), emissions, math.nan).requires_grad_()
    clean, chain = crf(emissions, MASK), crf(spoilt, MASK)
    assert torch.equal(chain.loss(torch.where(MASK, tags, 99)), clean.loss(tags))
    assert torch.equal(chain.marginals, clean.marginals)
    (gradient,) = torch.autograd.grad(chain.loss(tags).sum(), spoilt)
    assert (gradient[~MASK] == 0).all()


@pytest.mark.parametrize(
    "mask", [None, MASK[:1].expand(SENTENCES, -1), MASK, torch.arange(STEPS) < torch.arange(5)[:, None]]
)
def test_the_batch_may_be_the_second_dimension(mask: Tensor | None) -> None:
    first, second = layer(), layer(batch_first=False)
    emissions, tags = emissions_of(SENTENCES, STEPS, TAGS), torch.randint(TAGS, (SENTENCES, STEPS))
    chain = first(emissions, mask)
    other = second(emissions.transpose(0, 1), None if mask is None else mask.t())
    assert torch.equal(chain.loss(tags), other.loss(tags.t()))
    assert torch.equal(chain.marginals, other.marginals)
    assert torch.equal(chain.map(), other.map())
    assert first.decode(emissions, mask) == second.decode(emissions.transpose(0, 1), None if mask is None else mask.t())


def test_decoded_lists_have_one_tag_per_unmasked_position() -> None:
    crf, emissions = layer(), emissions_of(SENTENCES, STEPS, TAGS)
    found = crf.decode(emissions, MASK)
    assert found == [path[kept].tolist() for path, kept in zip(crf(emissions, MASK).map(), MASK, strict=True)]
    assert [len(each) for each in found] == MASK.sum(1).tolist()
    assert all(type(tag) is int for each in found for tag in each)
    assert crf.decode(emissions) == crf(emissions).map().tolist()


@either_way
@every_omega
def test_tags_that_are_not_observed_leave_all_sequences_that_agree(omega: Regularizer, compiled: bool) -> None:
    crf, emissions = layer(omega=omega), emissions_of(SENTENCES, STEPS, TAGS)
    tags = torch.tensor([[0, -100, -100, 1], [-100, 9, 2, -100], [5, 1, 5, -100], [0, 0, -100, 0], [7, 7, 7, 7]])
    loss = crf(emissions, MASK).loss(tags)
    for b, kept in enumerate(MASK):
        seen = emissions[b].clone()
        for t in kept.nonzero().flatten().tolist():
            if tags[b, t] >= 0:
                seen[t, torch.arange(TAGS) != tags[b, t]] = -math.inf
        agreeing = answer(crf, seen, kept).value
        assert loss[b].item() == pytest.approx(answer(crf, emissions[b], kept).value - agreeing, abs=1e-12)
    assert loss[3] == 0


@either_way
@pytest.mark.parametrize("omega", [Shannon(), 0.5 * Gini()], ids=["shannon", "gini"])
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_derivatives_to_second_order(omega: Regularizer, constrained: bool, compiled: bool) -> None:
    crf = layer(omega=omega, **({"constraints": "BIO", "labels": BIO[:3]} if constrained else {}))
    names = [name for name, _ in crf.named_parameters()]
    tags = torch.tensor([[0, 1, 2, 0], [1, -100, 2, -100], [-100, 0, 0, -100], [0, 0, 1, 0], [0, 0, 0, 0]])

    def call(verb: str):
        def run(emissions: Tensor, *values: Tensor) -> Tensor:
            chain = torch.func.functional_call(crf, dict(zip(names, values, strict=True)), (emissions, MASK))
            return chain.loss(tags) if verb == "loss" else getattr(chain, verb)

        return run

    inputs = (emissions_of(SENTENCES, STEPS, TAGS).requires_grad_(), *crf.parameters())
    assert gradcheck(call("loss"), inputs, fast_mode=True)
    assert gradgradcheck(call("loss"), inputs, fast_mode=True)
    assert gradcheck(call("marginals"), inputs, fast_mode=True)
    assert gradcheck(call("transition_marginals"), inputs, fast_mode=True)


# -- constraints -------------------------------------------------------------------------------------------


def allowed(sequence: tuple[int, ...], labels: list[str], scheme: str) -> bool:
    return re.fullmatch(FORMS[scheme], "".join(f"{labels[tag]} " for tag in sequence)) is not None


@pytest.mark.parametrize(("scheme", "labels"), [("BIO", BIO), ("BIOES", BIOES)])
def test_a_scheme_leaves_the_sequences_of_its_grammar(scheme: str, labels: list[str]) -> None:
    crf = layer(len(labels), constraints=scheme, labels=labels)
    for length in (1, 2, 3):
        emissions = emissions_of(1, length, len(labels), seed=length)
        chain = crf(emissions)
        every = list(itertools.product(range(len(labels)), repeat=length))
        total = torch.tensor(every)
        free = layer(len(labels))(emissions.expand(len(every), -1, -1))
        scores = free.value - free.loss(total)
        fine = torch.tensor([allowed(sequence, labels, scheme) for sequence in every])
        torch.testing.assert_close(chain.value, scores[fine].logsumexp(0, keepdim=True))
        assert torch.equal(chain.log_prob(total.unsqueeze(1))[:, 0] > -math.inf, fine)
        assert chain.map()[0].tolist() == total[fine][scores[fine].argmax()].tolist()
        marginals = torch.zeros(length, len(labels)).double()
        for sequence, weight in zip(total[fine], scores[fine].softmax(0), strict=True):
            marginals[torch.arange(length), sequence] += weight.detach()
        torch.testing.assert_close(chain.marginals[0], marginals, rtol=0, atol=1e-12)
        assert (chain.marginals[0][marginals == 0] == 0).all()


@either_way
@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=["shannon", "gini"])
def test_a_matrix_of_allowed_steps_is_taken_with_and_without_ends(omega: Regularizer, compiled: bool) -> None:
    steps = torch.tensor([[True, True, False], [False, True, True], [True, False, True]])
    first, last = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    emissions = emissions_of(30, 3, TAGS)
    for constraints, begin, end in (
        (steps, torch.ones(3).bool(), torch.ones(3).bool()),
        ((steps, first, last), first, last),
    ):
        crf = layer(omega=omega, constraints=constraints)
        found = set(map(tuple, crf.decode(emissions)))
        assert found
        for a, b, c in found:
            assert begin[a]
            assert steps[a, b]
            assert steps[b, c]
            assert end[c]
        chain = crf(emissions)
        assert (chain.marginals[:, 0, ~begin] == 0).all()
        assert (chain.marginals[:, -1, ~end] == 0).all()
        assert (chain.transition_marginals[:, :, ~steps] == 0).all()
        assert set(crf.state_dict()) == {"transitions", "start_transitions", "end_transitions"}


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ([[0, 0, 0, 0], [2, 0, 0, 0]], "sentence 1 at position 0: 'I-X' may not begin the sentence"),
        ([[0, 1, 0, 4], [0, 0, 0, 0]], "sentence 0 at position 3: 'I-Y' may not follow 'B-X'"),
        ([[0, 0, 2, 0], [0, 1, 0, 4]], "sentence 1 at position 3: 'I-Y' may not follow 'B-X'"),
        ([[0, 0, 2, 0], [0, 0, 0, 2]], "sentence 1 at position 3: 'I-X' may not follow 'O'"),
    ],
)
def test_tags_that_violate_constraints_are_named(tags: list[list[int]], message: str) -> None:
    crf = layer(5, constraints="BIO", labels=BIO)
    mask = torch.tensor([[True, True, False, True], [True, True, False, True]])
    with pytest.raises(ValueError, match=f"tags violate the constraints in {message}"):
        crf(emissions_of(2, 4, 5), mask).loss(torch.tensor(tags))


def test_tags_that_cannot_be_completed_are_named() -> None:
    crf = layer(3, constraints=(torch.eye(3).bool(), torch.ones(3).bool(), torch.tensor([True, True, False])))
    chain = crf(emissions_of(1, 3, 3))
    with pytest.raises(ValueError, match="sentence 0 at position 2: 1 may not follow what is not observed"):
        chain.loss(torch.tensor([[0, -100, 1]]))
    with pytest.raises(ValueError, match="sentence 0 at position 2: 2 may not end the sentence"):
        chain.loss(torch.tensor([[2, -100, 2]]))
    assert chain.loss(torch.tensor([[1, -100, -100]])) >= 0


def test_violations_that_cannot_be_read_have_an_infinite_loss() -> None:
    crf = layer(5, constraints="BIO", labels=BIO)
    emissions, tags = emissions_of(2, 4, 5), torch.tensor([[2, 0, 0, 0], [1, 2, 0, 0]])
    loss = torch.vmap(lambda x, y: crf(x.unsqueeze(0)).loss(y.unsqueeze(0))[0])(emissions, tags)
    assert loss[0] == math.inf
    torch.testing.assert_close(loss[1:], crf(emissions[1:]).loss(tags[1:]))


def test_scores_that_forbid_a_tag_are_no_violation() -> None:
    crf, emissions = layer(5, constraints="BIO", labels=BIO), emissions_of(1, 4, 5)
    emissions[0, 1, 2] = -math.inf
    assert crf(emissions).loss(torch.tensor([[1, 2, 0, 0]])) == math.inf


# -- other packages ----------------------------------------------------------------------------------------


def peer_batch() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(7) < torch.tensor([7, 3, 1, 5])[:, None]
    return emissions_of(4, 7, 5).float(), torch.randint(5, (4, 7)), mask


def test_the_state_of_pytorch_crf_gives_its_numbers() -> None:
    theirs = pytest.importorskip("torchcrf").CRF(5, batch_first=True)
    ours = CRF(5)
    ours.load_state_dict(theirs.state_dict())
    emissions, tags, mask = peer_batch()
    torch.testing.assert_close(
        ours(emissions, mask).loss(tags), -theirs(emissions, tags, mask, "none"), rtol=1e-5, atol=1e-5
    )
    assert ours.decode(emissions, mask) == theirs.decode(emissions, mask)
    theirs.load_state_dict(ours.state_dict())


def test_the_state_of_torchcrf_gives_its_numbers() -> None:
    package = pytest.importorskip("TorchCRF")
    theirs, ours = package.CRF(5, use_gpu=False), CRF(5)
    ours.load_state_dict(theirs.state_dict())
    emissions, tags, mask = peer_batch()
    torch.testing.assert_close(ours(emissions, mask).loss(tags), -theirs(emissions, tags, mask), rtol=1e-5, atol=1e-5)
    assert ours.decode(emissions, mask) == theirs.viterbi_decode(emissions, mask)


def test_parameters_of_torchcrf_are_renamed_also_in_a_model() -> None:
    steps, first, last = torch.randn(3, 3), torch.randn(3), torch.randn(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), CRF(3))
    state = {"0.weight": torch.ones(3, 2), "0.bias": torch.zeros(3)}
    model.load_state_dict(state | {"1.trans_matrix": steps, "1.start_trans": first, "1.end_trans": last})
    for mine, given in (
        (model[1].transitions, steps),
        (model[1].start_transitions, first),
        (model[1].end_transitions, last),
    ):
        assert torch.equal(mine, given)
    emissions, tags = emissions_of(1, 2, 3).float(), (0, 2)
    every = {
        (a, b): emissions[0, 0, a] + emissions[0, 1, b] + first[a] + steps[a, b] + last[b]
        for a, b in itertools.product(range(3), repeat=2)
    }
    likelihood = every[tags] - torch.stack(list(every.values())).logsumexp(0)
    torch.testing.assert_close(model[1](emissions).loss(torch.tensor([tags]))[0], -likelihood, rtol=1e-5, atol=1e-5)


# -- arguments ---------------------------------------------------------------------------------------------


def test_emissions_of_low_precision_give_losses_in_that_of_the_parameters() -> None:
    crf, emissions = CRF(3), emissions_of(2, 4, 3).bfloat16()
    assert crf(emissions).loss(torch.zeros(2, 4).long()).dtype == torch.float32
    assert crf(emissions.double()).value.dtype == torch.float64
    assert crf.bfloat16()(emissions).marginals.dtype == torch.bfloat16


def test_programs_are_compared_over_the_same_mask_alone() -> None:
    crf, emissions = layer(), emissions_of(SENTENCES, STEPS, TAGS)
    chain = crf(emissions, MASK)
    torch.testing.assert_close(chain.kl_divergence(crf(emissions, MASK.clone())), torch.zeros(5).double())
    with pytest.raises(ValueError, match="other must have the same mask"):
        chain.kl_divergence(crf(emissions, MASK.flip(1)))


def test_a_batch_without_sentences() -> None:
    crf = CRF(3)
    chain = crf(torch.zeros(0, 4, 3), torch.zeros(0, 4, dtype=torch.bool))
    assert chain.loss(torch.zeros(0, 4).long()).shape == (0,)
    assert crf.decode(torch.zeros(0, 4, 3)) == []


X, TARGET = torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: CRF(3)(X, TARGET), TypeError, r"mask must be a boolean tensor.*got torch.int64.*\.loss\(tags\)"),
        (lambda: CRF(3)(X, TARGET, TARGET == 0), TypeError, r"1 further argument.*\.loss\(tags\)"),
        (lambda: CRF(3)(X, tags=TARGET), TypeError, r"1 further argument.*\.loss\(tags\)"),
        (lambda: CRF(3)(X, (TARGET == 0).byte()), TypeError, "mask must be a boolean tensor.*got torch.uint8"),
        (
            lambda: CRF(3)(X, TARGET[:1] == 0),
            ValueError,
            r"mask must have the shape of emissions.*\(2, 4\)",
        ),
        (lambda: CRF(4)(X), ValueError, r"emissions must have shape \(B, T, 4\), got \(2, 4, 3\)"),
        (lambda: CRF(4, batch_first=False)(X), ValueError, r"emissions must have shape \(T, B, 4\)"),
        (lambda: CRF(3)(X[:, :0]), ValueError, r"emissions must have at least one position.*got \(2, 0, 3\)"),
        (lambda: CRF(3)(X.long()), TypeError, "emissions must be a floating-point tensor"),
        (lambda: CRF(3)(X).loss(X), TypeError, "tags must be a tensor of integers"),
        (lambda: CRF(3)(X).loss(TARGET[:1]), ValueError, r"must have shape \(…, 2, 4\)"),
        (lambda: CRF(3)(X, TARGET == 0).loss(TARGET[:1]), ValueError, r"tags must have shape \(…, 2, 4\)"),
        (
            lambda: CRF(3)(X).loss(TARGET - 1),
            ValueError,
            r"in \[0, 2\], or -100 where it is not observed; got -1",
        ),
        (lambda: CRF(3, batch_first=False)(X).loss(TARGET[:1]), ValueError, r"tags must have shape \(…, 2, 4\)"),
        (lambda: CRF(0), ValueError, "num_tags must be at least 1"),
        (lambda: CRF(3, "BIO"), TypeError, "omega"),
        (lambda: CRF(3, constraints="BIO"), ValueError, "labels must be given with constraints='BIO'"),
        (lambda: CRF(3, constraints="IOB", labels=BIO[:3]), ValueError, "constraints must be 'BIO' or 'BIOES'"),
        (lambda: CRF(3, labels=BIO), ValueError, "labels must be 3 different names"),
        (lambda: CRF(3, labels="BIO"), TypeError, "labels must be a sequence of strings"),
        (lambda: CRF(3, constraints="BIO", labels=["O", "B-X", "E-X"]), ValueError, "labels must be 'O'.*got 'E-X'"),
        (lambda: CRF(3, constraints="BIO", labels=["O", "B-X", "[PAD]"]), ValueError, r"got '\[PAD\]'"),
        (lambda: CRF(3, constraints=torch.ones(3, 3)), TypeError, "constraints must be a boolean tensor"),
        (lambda: CRF(3, constraints=torch.ones(2, 3).bool()), ValueError, r"constraints must have shape \(3, 3\)"),
        (lambda: CRF(3, constraints=(TARGET == 0,) * 2), TypeError, "tuple of three"),
    ],
)
def test_bad_arguments_are_refused(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()

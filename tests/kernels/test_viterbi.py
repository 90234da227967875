"""Best paths through chains, against all paths."""

import itertools

import pytest
import torch

from fenchel.kernels.cpu.structures.viterbi import viterbi


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def either_way(request, set_kernels):
    set_kernels(request.param)


def score(path, unary, transition):
    steps = [transition[t - 1 if len(transition) > 1 else 0, path[t - 1], path[t]] for t in range(1, len(path))]
    return sum(float(unary[t, s]) for t, s in enumerate(path)) + sum(map(float, steps))


def best(unary, transition, length):
    """The best path by enumeration; among equals the lowest states, last state first."""
    paths = itertools.product(range(unary.shape[1]), repeat=length)
    return max(paths, key=lambda p: (score(p, unary, transition), [-s for s in reversed(p)]))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["real", "integer", "forbidden", "huge"])
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (5, 1), (1, 3), (5, 3)])
def test_best_path_agrees_with_enumeration(dtype, kind, rows, steps):
    generator = torch.Generator().manual_seed(rows * 7 + steps)
    unary = torch.randn(5, 4, 3, generator=generator).to(dtype)
    transition = torch.randn(rows, steps, 3, 3, generator=generator).to(dtype)
    if kind == "integer":
        unary, transition = unary.round(), transition.round()
    if kind == "forbidden":
        unary[unary < -1], transition[transition < -0.7] = -torch.inf, -torch.inf
    if kind == "huge":
        unary, transition = 1e6 * unary.round() + unary.round(), 1e6 * transition.round()
    lengths = torch.tensor([4, 1, 3, 2, 4])
    states = viterbi(unary, transition, lengths)
    for b, length in enumerate(lengths.tolist()):
        moves = transition[b if rows > 1 else 0]
        wanted = best(unary[b], moves, length)
        if score(wanted, unary[b], moves) > -torch.inf:
            assert states[b].tolist() == [*wanted, *[-1] * (4 - length)]


@pytest.mark.usefixtures("either_way")
def test_chains_of_one_step_and_of_none():
    unary = torch.tensor([[[0.0, 2.0]], [[3.0, 1.0]], [[0.0, 1.0]]])
    lengths = torch.tensor([1, 1, 0])
    assert viterbi(unary, torch.zeros(1, 0, 2, 2), lengths).tolist() == [[1], [0], [-1]]
    assert viterbi(unary[:0], torch.zeros(1, 1, 2, 2), lengths[:0]).shape == (0, 1)

"""The highest-scoring path through a chain of states, for ``structures.Chain`` and ``dp.LinearChain``."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel.kernels import usable


def viterbi(unary: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    """The highest-scoring sequence of states of each chain, in O(B T S²).

    Scores of −inf forbid a state or a step. Among equally good paths the one with the lowest last state wins, then the
    one with the lowest state before it, and so on. If every path is forbidden, the result is one of them, with a
    score of −inf.

    Args:
        unary: (B, T, S), float32 or float64, with the scores of the first and the last state added.
        transition: (1 or B, 1 or T−1, S, S), [previous, current], of the same dtype.
        lengths: (B,), int64, from 0 to T.

    Returns:
        States (B, T), int64, −1 after the end.

    Example:
        >>> import torch
        >>> stay = torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]])
        >>> viterbi(torch.tensor([[[2.0, 0.0], [0.0, 1.0], [0.0, 9.0]]]), stay, torch.tensor([2]))
        tensor([[ 0,  0, -1]])
    """
    unary, transition, lengths = unary.detach(), transition.detach(), lengths.detach()
    if unary.shape[0] == 0 or unary.shape[1] == 0:
        return torch.full(unary.shape[:2], -1, dtype=torch.long, device=unary.device)
    if unary.shape[1] == 1 and transition.shape[1] == 0:
        transition = unary.new_zeros(1, 1, unary.shape[2], unary.shape[2])
    if not usable("chains", unary, transition):
        return _by_steps(unary, transition, lengths)
    from fenchel.kernels.cpu.structures.chains import best_paths
    from fenchel.kernels.cpu.threads import over_rows

    states = torch.empty(unary.shape[:2], dtype=torch.long, device="cpu")
    work = unary.numel() * unary.shape[2]
    arrays = (t.contiguous().numpy() for t in (unary, transition, lengths))
    over_rows(best_paths, unary.shape[0], work, *arrays, states.numpy())
    return states


def _by_steps(unary: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    """``viterbi`` in torch operations, one step of all chains at a time."""
    steps = unary.shape[1]
    unary, transition = unary.double(), transition.double()
    best, back = unary[:, 0], []
    for t in range(1, steps):
        step = transition[:, t - 1 if transition.shape[1] > 1 else 0]
        reached, before = (best.unsqueeze(-1) + step).max(1)
        going = (t < lengths).unsqueeze(-1)
        best = torch.where(going, reached + unary[:, t], best)
        back.append(before)
    state, states = best.argmax(-1), []
    for t in range(steps - 1, -1, -1):
        states.append(torch.where(t < lengths, state, -1))
        if t:
            earlier = back[t - 1].gather(1, state.unsqueeze(-1)).squeeze(-1)
            state = torch.where(t < lengths, earlier, state)
    return torch.stack(states[::-1], 1)

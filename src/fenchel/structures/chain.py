"""Chains: sequences of states with scores for each step from one to the next."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_floats
from fenchel.kernels.cpu.structures.viterbi import viterbi
from fenchel.regularizers.base import hold, show
from fenchel.regularizers.configs import written_by
from fenchel.structures.base import Array, Layers, Oracle, Searched, Sums, check_batch


@written_by("transition")
class Chain(Searched):
    r"""All sequences of states: one state at each of T positions, and a score for each step.

    .. math:: \max_{z_1 \dots z_T} \; \sum_t s_{t, z_t} + \sum_t A_{z_{t-1}, z_t}

    Scores (…, T, S). Viterbi's algorithm, O(T S²). Positions at the end with all states masked are padding: a mask of
    shape (…, T, 1), such as ``(torch.arange(T) < lengths[:, None])[..., None]``, gives sequences of different lengths.

    Args:
        transition: (S, S), or (…, T−1 or 1, S, S) with leading dimensions that broadcast to the batch; [previous,
            current]. A parameter is trained; −inf forbids a step. With T = 1 there is no step.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.structures import Chain
        >>> stay = Chain(torch.eye(2))
        >>> scores = torch.tensor([[1.0, 0.0], [0.0, 0.3], [1.0, 0.0]])
        >>> stay.map(scores).argmax(-1)
        tensor([0, 0, 0])
        >>> fenchel.SparseMAP(Chain(0.3 * torch.eye(2))).argmax(scores)
        tensor([[0.8500, 0.1500],
                [0.6500, 0.3500],
                [0.8500, 0.1500]])

    References: Niculae, Martins, Blondel & Cardie (2018).
    """

    event_dim = 2
    fixed_dims = 1
    transition_dims = 3
    patience = 256
    transition: Tensor

    def __init__(self, transition: Tensor) -> None:
        super().__init__()
        hold(self, "transition", check_floats(transition, "transition", "…", "S", "S"))

    def check(self, shape: torch.Size) -> None:
        steps, states = shape[-2:]
        t = self.transition
        if t.shape[-1] != states:
            raise ValueError(
                f"transition must be over the {states} states of scores of shape {tuple(shape)}, got {tuple(t.shape)}"
            )
        if t.dim() > 2:
            if t.shape[-3] not in (1, steps - 1):
                raise ValueError(
                    f"transition must have T − 1 = {steps - 1} or 1 entries along dim −3 for scores of shape "
                    f"{tuple(shape)}, got {tuple(t.shape)}"
                )
            check_batch(t, 3, shape[:-2], "transition", shape)

    def higher(self, structures: Tensor) -> Tensor | None:
        t = self.transition.to(structures)
        forbidden = t == -torch.inf
        total = _steps(structures, torch.where(forbidden, 0.0, t))
        # A product would make NaN of −inf and of what is not chosen.
        taken = _steps(structures, forbidden.to(structures)) > 0
        return torch.where(taken, -torch.inf, total)

    def transitions(self, shape: torch.Size) -> Tensor | None:
        return self.transition if self.transition.dim() > 2 else self.transition.unsqueeze(0)

    def with_transitions(self, transitions: Tensor) -> Chain:
        return Chain(transitions)

    def key(self) -> Hashable | None:
        return (Chain,) if type(self) is Chain else None

    def rows(self, batch: torch.Size, index: Tensor) -> Chain:
        t = self.transition
        return self if t.dim() < 4 else Chain(t.expand(*batch, *t.shape[-3:]).reshape(-1, *t.shape[-3:])[index])

    def broken(self) -> Tensor | None:
        t = self.transition.detach()
        wrong = t.isnan() | (t == torch.inf)
        return wrong.flatten(-3).any(-1) if t.dim() > 2 else wrong.any()

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        steps, states = shape
        t = self._steps(batch)
        lengths: Array | None = None

        def best(scores: Array, rows: Array) -> tuple[Array, Array]:
            nonlocal lengths
            if lengths is None:
                lengths = _lengths(scores.reshape(-1, steps, states))
            unary = torch.from_numpy(scores[rows]).reshape(-1, steps, states)
            own = t[torch.from_numpy(rows)] if len(t) > 1 else t
            path = viterbi(unary, own, torch.from_numpy(lengths[rows])).numpy()
            inside = path >= 0
            bonus = _along(path, inside, own.numpy())
            reached = np.take_along_axis(unary.numpy(), np.maximum(path, 0)[..., None], -1)[..., 0]
            stuck = ((reached == -np.inf) & inside).any(-1) | (bonus == -np.inf)
            places = np.where(inside, np.arange(steps) * states + path, -1).astype(np.int32)
            return places, np.where(stuck, -np.inf, bonus)

        return best

    def sums(self, shape: torch.Size) -> Sums | None:
        t = self.transition.detach()
        if bool((t != t[..., :1, :1]).any()):
            return None
        return Sums(np.arange(shape.numel()).reshape(shape), np.ones(shape[0]), exact=True)

    def layers(self, batch: torch.Size, shape: torch.Size, theta: Array) -> Layers:
        steps, states = shape
        return Layers(
            np.arange(steps * states, dtype=np.int32).reshape(shape),
            np.arange(states + 1) * states,
            np.tile(np.arange(states), states),
            np.arange(states**2),
            self._steps(batch).flatten(2).numpy(),
            np.ones((1, states), dtype=np.bool_),
        )

    def _steps(self, batch: torch.Size) -> Tensor:
        """Transitions (1 or R, 1 or T − 1, S, S), in double precision."""
        t = self.transition.detach().cpu().double()
        if t.dim() > 3:
            t = t.expand(*batch, *t.shape[-3:]).reshape(-1, *t.shape[-3:])
        elif t.dim() == 3:
            t = t.unsqueeze(0)
        else:
            t = t[None, None]
        return t.contiguous()

    def extra_repr(self) -> str:
        return f"transition={show(self.transition)}"


def _steps(structures: Tensor, transition: Tensor) -> Tensor:
    """Σ_t y_{t−1}ᵀ A_t y_t of structures (…, T, S)."""
    before, after = structures[..., :-1, :], structures[..., 1:, :]
    shared = transition.dim() == 2
    reached = before @ transition if shared else (before.unsqueeze(-2) @ transition).squeeze(-2)
    return (reached * after).sum((-2, -1))


def _along(path: Array, inside: Array, transition: Array) -> Array:
    """The sum of the steps of paths (n, T)."""
    if path.shape[1] == 1:
        return np.zeros(len(path))
    row = np.arange(len(path))[:, None] if len(transition) > 1 else np.zeros((1, 1), dtype=np.int64)
    step = np.arange(path.shape[1] - 1) if transition.shape[1] > 1 else np.zeros(1, dtype=np.int64)
    score = transition[row, step, np.maximum(path[:, :-1], 0), np.maximum(path[:, 1:], 0)]
    total: Array = np.where(inside[:, 1:], score, 0.0).sum(-1)
    return total


def _lengths(scores: Array) -> Array:
    """How many positions have a state to choose; only the last ones may have none."""
    some: Array = np.asarray((scores > -np.inf).any(-1))
    lengths: Array = some.sum(-1)
    if (some[:, :-1] < some[:, 1:]).any():
        raise ValueError(
            "Chain is infeasible: mask must leave a state at every position, but for padding at the end of a sequence"
        )
    return lengths

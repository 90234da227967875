"""Chains of states: conditional random fields and their sparse counterparts."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import concrete
from fenchel.dp.calculus import Inputs, Recursion, Run, stays_outside
from fenchel.dp.graph import Graph, Walk, remembered, walk
from fenchel.dp.program import (
    DynamicProgram,
    check_choice,
    check_floats,
    check_integers,
    check_same_lengths,
    gathered,
    precise,
)
from fenchel.kernels.cpu.structures.viterbi import viterbi
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.tsallis import Shannon


class LinearChain(DynamicProgram):
    r"""Sequences of states, scored by state and by step: a conditional random field for Shannon's Ω.

    .. math:: v_{t,s} = u_{t,s} + {\max_\Omega}_p \, (v_{t-1,p} + w_{p,s}), \qquad
              \mathrm{value} = {\max_\Omega}_s \, v_{T,s}

    ``value`` is the log-partition function for ``Shannon()``, and ``loss`` the negative log-likelihood; with ``Gini()``
    the walk goes through few states, and most sequences have probability zero. O(T S²) time.

    Args:
        unary: (B, T, S), the score of each state at each step.
        transition: (S, S), [previous, current]; or (B, T−1, S, S), where B and T−1 may be 1.
        lengths: (B,), integers from 1 to T; what stands after the end of a chain does not matter. T if None.
        start: (S,) or (B, S), scores of the first state; 0 if None.
        end: (S,) or (B, S), scores of the last state, at each chain's own end; 0 if None.
        omega: smooths every maximum; one of the simplex.

    A path is a tensor of states, (…, B, T), −1 after the end.

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> from fenchel.dp import LinearChain
        >>> unary = torch.tensor([[[1.0, 0.0], [0.0, 0.4], [0.0, 2.0]]])
        >>> stay = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
        >>> d = LinearChain(unary, stay, omega=Gini())
        >>> d.marginals
        tensor([[[0.8172, 0.1828],
                 [0.2687, 0.7312],
                 [0.0000, 1.0000]]])
        >>> d.top(4).probs  # the whole distribution: three of eight sequences
        tensor([[0.5484, 0.2688, 0.1828, 0.0000]])
        >>> d.map(), d.loss(torch.tensor([[0, 1, 1]]))
        (tensor([[0, 1, 1]]), tensor([0.1347]))

    References: Lafferty, McCallum & Pereira (2001); Mensch & Blondel (2018), section 4.1.
    """

    def __init__(
        self,
        unary: Tensor,
        transition: Tensor,
        lengths: Tensor | None = None,
        start: Tensor | None = None,
        end: Tensor | None = None,
        omega: Regularizer | None = None,
    ) -> None:
        check_floats(unary, "unary", 3, "(B, T, S)")
        self.omega = check_choice(Shannon() if omega is None else omega)
        self.lengths = _check_lengths(lengths, unary)
        scores = (
            unary,
            _check_transition(transition, unary),
            _check_ends(start, "start", unary),
            _check_ends(end, "end", unary),
        )
        dtype = torch.float32
        for each in scores:
            dtype = torch.promote_types(dtype, each.dtype)
        self._inputs = tuple(each if each.dtype == dtype else each.to(dtype) for each in scores)
        self._run = Run(_ChainRecursion(self.omega, self.lengths, *unary.shape[1:]), self._inputs)
        self._dtype = unary.dtype

    @property
    def transition_marginals(self) -> Tensor:
        """(B, T−1, S, S): how probable each pair of a state and the next one is; zero after the end of a chain."""
        unary, transition, start, end = self._inputs
        batch, steps, states = unary.shape
        every = transition.expand(batch, steps - 1, states, states)
        return self._run.marginals((unary, every, start, end))[1].to(self._dtype)

    @stays_outside
    @torch.no_grad()
    def map(self) -> Tensor:
        unary, transition, start, end = (precise(t.detach()) for t in self._inputs)
        unary = unary + 0.0  # a copy, to which the ends are added
        unary[:, 0] += start
        unary[torch.arange(len(unary), device=unary.device), self.lengths - 1] += end
        states = viterbi(unary, transition, self.lengths)
        possible = self._score(states.clamp_min(0)) > -torch.inf
        return torch.where(possible.unsqueeze(-1), states, -1)

    def __repr__(self) -> str:
        batch, steps, states = self._inputs[0].shape
        return f"LinearChain({batch} chains of up to {steps} steps, {states} states, omega={self.omega})"

    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        _, steps, states = self._inputs[0].shape
        going = torch.arange(steps, device=edges.device) < self.lengths.unsqueeze(-1)
        return torch.where(going & possible.unsqueeze(-1), edges[..., :steps] % states, -1)

    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        _, steps, states = self._inputs[0].shape
        index = torch.arange(steps, device=path.device)
        path = torch.where(index < self.lengths.unsqueeze(-1), path, 0).long().clamp_min(0)
        last = path.gather(-1, (self.lengths - 1).expand(path.shape[:-1]).unsqueeze(-1))
        path = torch.where(index < self.lengths.unsqueeze(-1), path, last)  # as the graph goes on after the end
        step = states + ((index[1:] - 1) * states + path[..., :-1]) * states + path[..., 1:]
        end = states + (steps - 1) * states**2 + last
        return gathered(values, torch.cat([path[..., :1], step, end], -1))

    def _score(self, path: Tensor) -> Tensor:
        unary, transition, start, end = self._inputs
        _, steps, states = unary.shape
        going = torch.arange(steps, device=path.device) < self.lengths.unsqueeze(-1)
        path = torch.where(going, path, 0).long()
        each = unary.expand(*path.shape, states).gather(-1, path.unsqueeze(-1)).squeeze(-1)
        score = torch.where(going, precise(each), 0.0).sum(-1)
        if steps > 1:
            pairs = (path[..., :-1] * states + path[..., 1:]).unsqueeze(-1)
            flat = transition.flatten(-2)
            if len(flat) == 1 and flat.shape[1] == 1:
                each = flat[0, 0][pairs.squeeze(-1)]
            else:
                each = flat.expand(*pairs.shape[:-1], states**2).gather(-1, pairs).squeeze(-1)
            score = score + torch.where(going[:, 1:], precise(each), 0.0).sum(-1)
        last = path.gather(-1, (self.lengths - 1).expand(path.shape[:-1]).unsqueeze(-1))
        for ends, state in ((start, path[..., :1]), (end, last)):
            score = score + precise(ends.expand(*path.shape[:-1], states).gather(-1, state).squeeze(-1))
        return score

    def _check_paths(self, other: DynamicProgram) -> None:
        assert isinstance(other, LinearChain)
        check_same_lengths(self.lengths, other.lengths)

    def _blank(self, path: Tensor) -> Tensor:
        return (check_integers(path, "path") < 0).all(-1)

    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        path = check_integers(path, name)
        batch, steps, states = self._inputs[0].shape
        if path.shape[-2:] != (batch, steps):
            raise ValueError(f"{name} must have shape (…, {batch}, {steps}): states; got {tuple(path.shape)}")
        if concrete(path):
            going = torch.arange(steps, device=path.device) < self.lengths.unsqueeze(-1)
            wrong = going & ((path < 0) | (path >= states))
            wrong = wrong if blank is None else wrong & ~blank.unsqueeze(-1)
            if bool(wrong.any()):
                raise ValueError(f"{name} must hold states in [0, {states - 1}], got {path[wrong][0].item()}")


class _ChainRecursion(Recursion):
    step = "chain"

    def __init__(self, omega: Regularizer, lengths: Tensor, steps: int, states: int) -> None:
        self.omega, self.lengths, self.steps, self.states = omega, lengths, steps, states

    def advance(self, inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        unary, transition, start, end = inputs
        value, walk = self.kernel(inputs).advance(unary, transition, (start, end), self.lengths, *self.numbers, keep)
        return value, walk

    def expect(self, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        shared = inputs[1].shape[1] == 1
        found = self.kernel(inputs).expect(weight, value, walk, self.lengths, inputs[0].shape, shared)
        return self._each(inputs, found)

    def curve(
        self, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        unary, transition, start, end = directions
        unary = unary.double().clone()
        unary[:, 0] += start
        unary[torch.arange(len(unary), device=unary.device), self.lengths - 1] += end
        kernel = self.kernel(inputs)
        change, curved = kernel.curve(weight, value, walk, self.lengths, unary, transition, *self.numbers)
        return change, self._each(inputs, curved)

    def walk(self, inputs: Inputs, omega: Regularizer | None = None) -> Walk:
        unary, transition, start, end = map(precise, inputs)
        batch, steps, states = unary.shape
        going = torch.arange(1, steps, device=unary.device) < self.lengths.unsqueeze(-1)
        each = unary[:, 1:].unsqueeze(-2) + transition
        # After the end of a chain the walk stays where it is.
        stay = torch.where(torch.eye(states, dtype=torch.bool, device=unary.device), 0.0, -torch.inf).to(unary.dtype)
        each = torch.where(going[..., None, None], each, stay)
        scores = torch.cat([unary[:, 0] + start, each.flatten(1), end.expand(batch, states)], -1)
        return walk(self.graph, scores, self.omega if omega is None else omega)

    @cached_property
    def graph(self) -> Graph:
        return _graph(self.steps, self.states)

    def collect(self, marginals: Tensor) -> Inputs:
        steps, states = self.steps, self.states
        going = torch.arange(steps, device=marginals.device) < self.lengths.unsqueeze(-1)
        first, between, _ = torch.split(marginals, [states, (steps - 1) * states**2, states], -1)
        each = torch.where(going[:, 1:, None, None], between.reshape(len(marginals), steps - 1, states, states), 0.0)
        invalid = torch.where(marginals[:, :1].isnan(), torch.nan, 0.0).to(marginals.dtype).unsqueeze(-1)
        nodes = torch.cat([first.unsqueeze(1), each.sum(-2)], 1)
        return nodes + invalid, each + invalid.unsqueeze(-1)  # after the end of a chain too

    def _each(self, inputs: Inputs, found: list[Tensor]) -> Inputs:
        """Results for states and steps in the shapes of the inputs, summed over the batch where it shares an input."""
        states, steps = found
        first = states[:, 0]
        last = states[torch.arange(len(states), device=states.device), self.lengths - 1]
        every = (states, steps, first, last)
        return tuple(
            each.sum(0, keepdim=True) if len(given) == 1 < len(each) else each
            for given, each in zip(inputs, every, strict=True)
        )


@remembered()
def _graph(steps: int, states: int) -> Graph:
    """The source, the states at each step, the end; edges: to the first states, [step, previous, current], out."""
    columns = np.arange(states)
    nodes = 1 + np.arange(steps * states).reshape(steps, states)
    last = 1 + steps * states
    between = np.broadcast_to(nodes[:-1, :, None], (steps - 1, states, states))
    towards = np.broadcast_to(nodes[1:, None, :], (steps - 1, states, states))
    sources = np.concatenate([0 * columns, between.reshape(-1), nodes[-1]])
    targets = np.concatenate([nodes[0], towards.reshape(-1), 0 * columns + last])
    levels = np.concatenate([[0], np.repeat(np.arange(1, steps + 1), states), [steps + 1]])
    return Graph(sources, targets, levels)


def _check_lengths(lengths: Tensor | None, unary: Tensor) -> Tensor:
    batch, steps, _ = unary.shape
    if lengths is None:
        return torch.full((batch,), steps, device=unary.device)
    lengths = check_integers(lengths, "lengths")
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape ({batch},), one per chain, got {tuple(lengths.shape)}")
    if concrete(lengths) and bool(((lengths < 1) | (lengths > steps)).any()):
        wrong = lengths[(lengths < 1) | (lengths > steps)][0].item()
        raise ValueError(f"lengths must be in [1, {steps}], the steps of unary, got {wrong}")
    return lengths.to(unary.device)


def _check_transition(transition: Tensor, unary: Tensor) -> Tensor:
    """As (1 or B, 1 or T−1, S, S)."""
    batch, steps, states = unary.shape
    allowed = f"({states}, {states}) or ({batch} or 1, {steps - 1} or 1, {states}, {states})"
    if not isinstance(transition, Tensor):
        raise TypeError(f"transition must be a torch.Tensor, got {type(transition).__name__}")
    if not transition.is_floating_point():
        raise TypeError(f"transition must have a floating-point dtype, got {transition.dtype}")
    full = transition[None, None] if transition.dim() == 2 else transition
    if full.dim() != 4 or full.shape[2:] != (states, states):
        raise ValueError(f"transition must have shape {allowed}, got {tuple(transition.shape)}")
    if full.shape[0] not in (1, batch) or full.shape[1] not in (1, steps - 1):
        raise ValueError(f"transition must have shape {allowed}, got {tuple(transition.shape)}")
    return full


def _check_ends(scores: Tensor | None, name: str, unary: Tensor) -> Tensor:
    """As (1 or B, S)."""
    batch, _, states = unary.shape
    if scores is None:
        return unary.new_zeros(1, states)
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {scores.dtype}")
    if scores.shape not in ((states,), (1, states), (batch, states)):
        raise ValueError(f"{name} must have shape ({states},) or ({batch}, {states}), got {tuple(scores.shape)}")
    return scores.reshape(-1, states)

"""Chains of states: conditional random fields and their sparse counterparts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_floats, check_integers
from fenchel._torch import concrete, traced
from fenchel.dp.calculus import Inputs, stays_outside
from fenchel.dp.graph import Graph, Walk, remembered, walk
from fenchel.dp.program import DynamicProgram, check_lengths, sum_over_edges
from fenchel.kernels.cpu.structures.viterbi import viterbi
from fenchel.regularizers.base import Regularizer

NOT_OBSERVED = -100
"""In a target, the state of a step that is not observed: ``torch.nn.functional.cross_entropy``'s ignore_index."""


class LinearChain(DynamicProgram):
    r"""Sequences of states, scored by state and by step: a conditional random field for Shannon's Ω.

    .. math:: v_{t,s} = u_{t,s} + {\max_\Omega}_p \, (v_{t-1,p} + w_{p,s}), \qquad
              \mathrm{value} = {\max_\Omega}_s \, v_{T,s}

    ``value`` is the log-partition function for ``Shannon()``, and ``loss`` the negative log-likelihood; with ``Gini()``
    the walk goes through few states, and most sequences have probability zero. O(T S²) time.

    Args:
        unary: (B, T, S), the score of each state at each step.
        transition: (S, S), [previous, current]; or (B, T−1, S, S), where B and T−1 may be 1.
        lengths: (B,), integers from 0 to T; what stands after the end of a chain does not matter. T if None. A chain of
            length 0 has one path, all −1, of score 0.
        start: (S,) or (B, S), scores of the first state; 0 if None.
        end: (S,) or (B, S), scores of the last state, at each chain's own end; 0 if None.
        omega: smooths every maximum; one of the simplex.

    A path is a tensor of states, (…, B, T), −1 after the end. States of −100 in a target are not observed: ``loss`` is
    then the value less the value over all paths that agree with the others. ``walk`` is (B, T−1, S, S): [t, i, j] is
    the probability of state i at step t given state j at step t + 1, so that columns sum to 1; zero after the end.

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

    _step = "chain"

    def __init__(
        self,
        unary: Tensor,
        transition: Tensor,
        lengths: Tensor | None = None,
        start: Tensor | None = None,
        end: Tensor | None = None,
        omega: Regularizer | None = None,
    ) -> None:
        unary, transition, lengths, start, end = self._copied(omega, unary, transition, lengths, start, end)
        super().__init__(unary, "unary", "(B, T, S)", omega)
        self.lengths = check_lengths(lengths, unary, "unary", unary.shape[1:2], least=0)
        self._inside = torch.arange(unary.shape[1], device=unary.device) < self.lengths.unsqueeze(-1)
        transition = _check_transition(transition, unary)
        start, end = _check_ends(start, "start", unary), _check_ends(end, "end", unary)
        dtype = self._inputs[0].dtype
        for each in (transition, start, end):
            dtype = torch.promote_types(dtype, each.dtype)
        self._inputs = (unary.to(dtype), transition.to(dtype), start.to(dtype), end.to(dtype))

    @property
    def transition_marginals(self) -> Tensor:
        """The probability of each pair of a state and the next one, (B, T−1, S, S); zero after the end of a chain."""
        unary, transition, start, end = self._inputs
        batch, steps, states = unary.shape
        every = transition.expand(batch, steps - 1, states, states)
        return self._returned(self._expected_path((unary, every, start, end))[1])

    def map(self) -> Tensor:
        # The best path can be exported: without kernels it is found in torch operations, step by step.
        return self._best() if torch.compiler.is_exporting() or traced() else self._best_outside()

    @torch.no_grad()
    def _best(self) -> Tensor:
        here = self._on_cpu()
        unary, transition, start, end = here._inputs
        states = viterbi(here._with_ends(unary, start, end), transition.double(), here.lengths)
        possible = here._score(states.clamp_min(0)) > -torch.inf
        return torch.where(possible.unsqueeze(-1), states, -1).to(self._device)

    _best_outside = stays_outside(_best)

    def __repr__(self) -> str:
        batch, steps, states = self._inputs[0].shape
        return f"LinearChain({batch} chains of up to {steps} steps, {states} states, omega={self.omega})"

    def _by_step(self, edges: Tensor) -> Tensor:
        _, steps, states = self._inputs[0].shape
        each = edges[:, states : states + (steps - 1) * states**2].reshape(len(edges), steps - 1, states, states)
        return torch.where(self._inside[:, 1:, None, None], each, 0.0 * each.detach())  # NaN stays NaN

    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        _, steps, states = self._inputs[0].shape
        return torch.where(self._inside & possible.unsqueeze(-1), edges[..., :steps] % states, -1)

    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        _, steps, states = self._inputs[0].shape
        path = torch.where(self._inside, path, 0).long().clamp_min(0)
        last = self._last_state(path)
        path = torch.where(self._inside, path, last)  # as the graph goes on after the end
        index = torch.arange(steps - 1, device=path.device)
        step = states + (index * states + path[..., :-1]) * states + path[..., 1:]
        end = states + (steps - 1) * states**2 + last
        return sum_over_edges(values, torch.cat([path[..., :1], step, end], -1))

    def _score(self, path: Tensor) -> Tensor:
        unary, transition, start, end = self._inputs
        _, steps, states = unary.shape
        inside = self._inside
        path = torch.where(inside, path, 0).long()
        each = unary.expand(*path.shape, states).gather(-1, path.unsqueeze(-1)).squeeze(-1)
        score = torch.where(inside, each.double(), 0.0).sum(-1)
        if steps > 1:
            pairs = (path[..., :-1] * states + path[..., 1:]).unsqueeze(-1)
            flat = transition.flatten(-2)
            if len(flat) == 1 and flat.shape[1] == 1:
                each = flat[0, 0][pairs.squeeze(-1)]
            else:
                each = flat.expand(*pairs.shape[:-1], states**2).gather(-1, pairs).squeeze(-1)
            score = score + torch.where(inside[:, 1:], each.double(), 0.0).sum(-1)
        for ends, state in ((start, path[..., :1]), (end, self._last_state(path))):
            each = ends.expand(*path.shape[:-1], states).gather(-1, state).squeeze(-1).double()
            score = score + torch.where(inside[:, 0], each, 0.0)
        return score

    @stays_outside
    def _reached(self, target: Tensor) -> Tensor:
        hidden = self._inside & (target == NOT_OBSERVED)
        if concrete(hidden) and not bool(hidden.any()):
            return self._score(target)
        unary, *rest = self._inputs
        shape, states = target.shape, unary.shape[-1]
        copies = target.shape[:-2].numel()
        target, hidden = target.reshape(-1, shape[-1]), hidden.reshape(-1, shape[-1])
        others = target.unsqueeze(-1) != torch.arange(states, device=target.device)
        unary = torch.where(others & ~hidden.unsqueeze(-1), -torch.inf, unary.repeat(copies, 1, 1))
        transition, start, end = (
            each if len(each) == 1 else each.repeat(copies, *(1,) * (each.dim() - 1)) for each in rest
        )
        agreeing = LinearChain(unary, transition, self.lengths.repeat(copies), start, end, self.omega)
        return agreeing._max().reshape(shape[:-1])

    def _last_state(self, path: Tensor) -> Tensor:
        """The last state of each path, (…, B, 1)."""
        return path.gather(-1, (self.lengths - 1).clamp_min(0).expand(path.shape[:-1]).unsqueeze(-1))

    def _blank(self, path: Tensor) -> Tensor:
        return (check_integers(path, "path") < 0).all(-1) & self._inside[:, 0]

    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        path = check_integers(path, name)
        batch, steps, states = self._inputs[0].shape
        if path.shape[-2:] != (batch, steps):
            raise ValueError(f"{name} must have shape (…, {batch}, {steps}): states; got {tuple(path.shape)}")
        if concrete(path):
            wrong = self._inside & ((path < 0) | (path >= states))
            # Without blanks this is the target of a loss.
            wrong = wrong & (path != NOT_OBSERVED if blank is None else ~blank.unsqueeze(-1))
            if bool(wrong.any()):
                hidden = f", or {NOT_OBSERVED} where it is not observed" if blank is None else ""
                raise ValueError(f"{name} must hold states in [0, {states - 1}]{hidden}; got {path[wrong][0].item()}")

    # -- the recursion -------------------------------------------------------------------------------

    def _forward(self, kernel: Any, inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        unary, transition, start, end = inputs
        value, walk = kernel.forward(unary, transition, (start, end), self._filled, *self._numbers, keep)
        return torch.where(self._inside[:, 0], value, 0.0), walk

    def _gradient(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        unary, transition, _, _ = inputs
        value = torch.where(self._inside[:, 0], value, -torch.inf)
        found = kernel.gradient(weight, value, walk, self._filled, unary.shape, transition.shape[1])
        return self._like_inputs(inputs, *found)

    def _hessian_product(
        self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        unary = self._with_ends(directions[0], *directions[2:])
        value = torch.where(self._inside[:, 0], value, -torch.inf)
        change, found = kernel.hessian_product(weight, value, walk, self._filled, unary, directions[1], *self._numbers)
        return change, self._like_inputs(inputs, *found)

    @property
    def _filled(self) -> Tensor:
        """Lengths for kernels, which take no empty chains: these count as one step, and are left out of the results."""
        return self.lengths.clamp_min(1)

    def _like_inputs(self, inputs: Inputs, states: Tensor, steps: Tensor) -> Inputs:
        """Results for states and steps in the shapes of the inputs, summed over the batch where it shares an input."""
        last = states[torch.arange(len(states), device=states.device), self.lengths - 1]
        found = [states, steps, states[:, 0], last]
        for i, each in enumerate(found):
            if len(inputs[i]) == 1 < len(each):
                found[i] = each.sum(0, keepdim=True)
        return tuple(found)

    def _with_ends(self, unary: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """The scores of the states, in double precision, with those of the ends added to the first and the last."""
        last = torch.arange(unary.shape[1], device=unary.device) == self.lengths.unsqueeze(-1) - 1
        unary = torch.cat([unary[:, :1].double() + start.unsqueeze(1), unary[:, 1:].double()], 1)
        return unary + torch.where(last.unsqueeze(-1), end.double().unsqueeze(1), 0.0)

    def _walk(self, inputs: Inputs, omega: Regularizer) -> Walk:
        unary, transition, start, end = map(Tensor.double, inputs)
        states = unary.shape[-1]
        inside, filled = self._inside[:, 1:], self._inside[:, :1]
        each = unary[:, 1:].unsqueeze(-2) + transition
        # After the end of a chain the walk stays where it is; an empty chain ends in state 0.
        stay = torch.where(torch.eye(states, dtype=torch.bool, device=unary.device), 0.0, -torch.inf).to(unary.dtype)
        each = torch.where(inside[..., None, None], each, stay)
        first, last = torch.where(filled, unary[:, 0] + start, stay[0]), torch.where(filled, end, 0.0)
        scores = torch.cat([first, each.flatten(1), last], -1)
        return walk(self._graph, scores, omega)

    @cached_property
    def _graph(self) -> Graph:
        return _graph(*self._inputs[0].shape[1:])

    def _collect(self, marginals: Tensor) -> Inputs:
        _, steps, states = self._inputs[0].shape
        first, between, _ = torch.split(marginals, [states, (steps - 1) * states**2, states], -1)
        first = torch.where(self._inside[:, :1], first, 0.0)
        between = between.reshape(len(marginals), steps - 1, states, states)
        each = torch.where(self._inside[:, 1:, None, None], between, 0.0)
        invalid = torch.where(marginals[:, :1].isnan(), torch.nan, 0.0).to(marginals.dtype).unsqueeze(-1)
        nodes = torch.cat([first.unsqueeze(1), each.sum(-2)], 1)
        return nodes + invalid, each + invalid.unsqueeze(-1)  # after the end of a chain too


@remembered()
def _graph(steps: int, states: int) -> Graph:
    """The graph of a chain. Nodes: source, [step, state], end. Edges: to the first states, between states, to the end.

    Edges between states are in the order [step, previous, current].
    """
    columns = np.arange(states)
    nodes = 1 + np.arange(steps * states).reshape(steps, states)
    last = 1 + steps * states
    between = np.broadcast_to(nodes[:-1, :, None], (steps - 1, states, states))
    towards = np.broadcast_to(nodes[1:, None, :], (steps - 1, states, states))
    sources = np.concatenate([0 * columns, between.reshape(-1), nodes[-1]])
    targets = np.concatenate([nodes[0], towards.reshape(-1), 0 * columns + last])
    levels = np.concatenate([[0], np.repeat(np.arange(1, steps + 1), states), [steps + 1]])
    return Graph(sources, targets, levels)


def _check_transition(transition: Tensor, unary: Tensor) -> Tensor:
    """Scores of steps, checked, as (1 or B, 1 or T−1, S, S)."""
    batch, steps, states = unary.shape
    check_floats(transition, "transition")
    full = transition[None, None] if transition.dim() == 2 else transition
    fits = full.dim() == 4 and full.shape[2:] == (states, states)
    if not fits or full.shape[0] not in (1, batch) or full.shape[1] not in (1, steps - 1):
        raise ValueError(
            f"transition must have shape ({states}, {states}) or ({batch} or 1, {steps - 1} or 1, {states}, {states}), "
            f"got {tuple(transition.shape)}"
        )
    return full


def _check_ends(scores: Tensor | None, name: str, unary: Tensor) -> Tensor:
    """Scores of the first or the last state, checked, as (1 or B, S); zeros if None."""
    batch, _, states = unary.shape
    if scores is None:
        return unary.new_zeros(1, states)
    if check_floats(scores, name).shape not in ((states,), (1, states), (batch, states)):
        raise ValueError(f"{name} must have shape ({states},) or ({batch}, {states}), got {tuple(scores.shape)}")
    return scores.reshape(-1, states)

"""Any directed graph without cycles: the smoothed recursion, its gradient, and Hessian-vector products.

Nodes are in topological order, edges in the order of their targets; scores are (edges, batch), so that loops run along
the batch. The walk holds the probability of every edge among those with its target.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import strict, strict_routine
from fenchel.kernels.cpu.dp.choices import KINDS, arrays, deficits, jacobian_product, smooth
from fenchel.kernels.cpu.threads import over_rows

# -- on tensors -------------------------------------------------------------------------------------------


def forward(scores: Tensor, first: Tensor, sources: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """The value at the last node, in double precision, and the walk.

    Args:
        scores: (E, B).
        first: (nodes + 1,), int64: the edges into node i are first[i], …, first[i + 1] − 1; none into node 0.
        sources: (E,), int64: where each edge comes from.
        alpha: of Tsallis's entropy, one of ``choices.KINDS``.
        gamma: the temperature.
    """
    value = torch.empty(scores.shape[1], dtype=torch.float64, device="cpu")
    walk = torch.empty(scores.shape, dtype=scores.dtype, device="cpu")
    given = arrays(scores, first, sources)
    results = (value.numpy(), walk.numpy())
    over_rows(_forward, len(value), scores.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return value, walk


def gradient(weight: Tensor, value: Tensor, walk: Tensor, first: Tensor, sources: Tensor) -> Tensor:
    """The expected path, (E, B), times weights (B,)."""
    edges = torch.empty(walk.shape, dtype=walk.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, first, sources)
    over_rows(_gradient, len(value), walk.numel(), *given, edges.numpy())
    return edges


def hessian_product(
    weight: Tensor,
    value: Tensor,
    walk: Tensor,
    first: Tensor,
    sources: Tensor,
    scores: Tensor,
    alpha: float,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of the scores, (E, B)."""
    change_of_value = torch.empty(len(value), dtype=torch.float64, device="cpu")
    edges = torch.empty(walk.shape, dtype=walk.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, first, sources, scores.double())
    results = (change_of_value.numpy(), edges.numpy())
    over_rows(_hessian_product, len(value), walk.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return change_of_value, edges


# -- on arrays --------------------------------------------------------------------------------------------


@strict_routine
def _degree(first):  # type: ignore[no-untyped-def]
    """The largest number of edges into a node, at least 1."""
    most = 1
    for node in range(first.size - 1):
        most = max(most, first[node + 1] - first[node])
    return most


@strict
def _forward(start, stop, scores, first, sources, settings, kind, value, walk):  # type: ignore[no-untyped-def]
    number = scores.dtype.type
    nodes, width, most = first.size - 1, stop - start, _degree(first)
    gamma = settings[0]
    inverse_gamma = 1.0 / gamma
    v = np.zeros((nodes, width))
    base = np.empty(width)
    bad = np.zeros(width, np.int64)
    x, q, work = (
        np.empty(most * width, scores.dtype),
        np.empty(most * width, scores.dtype),
        np.empty(3 * width, scores.dtype),
    )
    excess = np.empty(width, scores.dtype)
    for node in range(1, nodes):
        top = v[node]
        top[:] = -np.inf
        begin, choices = first[node], first[node + 1] - first[node]
        for d in range(choices):
            before, score = v[sources[begin + d]], scores[begin + d]
            for w in range(width):
                bad[w] += 0 if score[start + w] < np.inf else 1
                reached = before[w] + score[start + w]
                top[w] = reached if reached > top[w] else top[w]
        for w in range(width):
            base[w] = top[w] if top[w] > -np.inf else 0.0
        for d in range(choices):
            before, score = v[sources[begin + d]], scores[begin + d]
            for w in range(width):
                x[d * width + w] = number((before[w] + score[start + w] - base[w]) * inverse_gamma)
        smooth(kind, choices, width, x, q, excess, work)
        for d in range(choices):
            for w in range(width):
                walk[begin + d, start + w] = q[d * width + w]
        for w in range(width):
            top[w] += gamma * excess[w]
    for w in range(width):
        value[start + w] = np.nan if bad[w] > 0 else v[nodes - 1, w]


@strict
def _gradient(start, stop, weight, value, walk, first, sources, edges):  # type: ignore[no-untyped-def]
    nodes, width = first.size - 1, stop - start
    mass, gap = np.zeros((nodes, width)), np.empty(width)
    for w in range(width):
        mass[nodes - 1, w] = weight[start + w] if value[start + w] > -np.inf else 0.0
    for node in range(nodes - 1, 0, -1):
        here = mass[node]
        deficits(walk[first[node] : first[node + 1], start:stop], gap)
        for w in range(width):
            here[w] += here[w] * gap[w]
        for e in range(first[node], first[node + 1]):
            before = mass[sources[e]]
            for w in range(width):
                taken = here[w] * walk[e, start + w] if value[start + w] > -np.inf else 0.0
                before[w] += taken
                lost = np.isnan(value[start + w]) and weight[start + w] != 0.0
                edges[e, start + w] = np.nan if lost else taken


@strict
def _hessian_product(  # type: ignore[no-untyped-def]
    start, stop, weight, value, walk, first, sources, scores, settings, kind, change_of_value, edges
):
    nodes, width, most = first.size - 1, stop - start, _degree(first)
    inverse_gamma = 1.0 / settings[0]
    v, mass, mass_change = np.zeros((nodes, width)), np.zeros((nodes, width)), np.zeros((nodes, width))
    q = np.empty(most * width, walk.dtype)
    change, response, work = np.empty(most * width), np.empty(most * width), np.empty(2 * width)
    gap = np.empty(width)
    for node in range(1, nodes):
        here = v[node]
        for e in range(first[node], first[node + 1]):
            before = v[sources[e]]
            for w in range(width):
                here[w] += walk[e, start + w] * (before[w] + scores[e, start + w])
        deficits(walk[first[node] : first[node + 1], start:stop], gap)
        for w in range(width):
            here[w] += here[w] * gap[w]
    for w in range(width):
        possible = value[start + w] > -np.inf
        mass[nodes - 1, w] = weight[start + w] if possible else 0.0
        change_of_value[start + w] = v[nodes - 1, w] if possible else (np.nan if np.isnan(value[start + w]) else 0.0)
    for node in range(nodes - 1, 0, -1):
        begin, choices = first[node], first[node + 1] - first[node]
        deficits(walk[begin : begin + choices, start:stop], gap)
        for w in range(width):
            mass[node, w] += mass[node, w] * gap[w]
            mass_change[node, w] += mass_change[node, w] * gap[w]
        for d in range(choices):
            before = v[sources[begin + d]]
            for w in range(width):
                change[d * width + w] = before[w] + scores[begin + d, start + w]
                q[d * width + w] = walk[begin + d, start + w]
        jacobian_product(kind, choices, width, q, change, response, work)
        for d in range(choices):
            there, their = mass[sources[begin + d]], mass_change[sources[begin + d]]
            for w in range(width):
                possible = value[start + w] > -np.inf
                p = q[d * width + w]
                moved = mass_change[node, w] * p + mass[node, w] * response[d * width + w] * inverse_gamma
                moved = moved if possible else 0.0
                there[w] += mass[node, w] * p if possible else 0.0
                their[w] += moved
                edges[begin + d, start + w] = np.nan if np.isnan(value[start + w]) else moved

"""The dynamics that memories and layers share: one update, and updates until convergence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fenchel._checks import (
    check_callable,
    check_count,
    check_floats,
    check_kind,
    check_number,
    check_positive,
    check_real,
)
from fenchel._torch import concrete
from fenchel.regularizers.base import Regularizer
from fenchel.streaming.dot_product import attention


@dataclass(frozen=True)
class Path:
    """The states that queries reached by updates.

    Args:
        state: (…, E), after the last update.
        before: (…, E), the states before the last update: ``state`` is the average of patterns by their weights.
        steps: (…), how many updates changed the state; 0 for a query that is a fixed point.
        converged: (…), whether the last update moved the state by no more than the tolerance.

    Example:
        >>> import torch
        >>> from fenchel.hopfield import iterate, update
        >>> path = iterate(lambda q: update(q, torch.eye(2), beta=4.0), torch.tensor([[0.9, 0.2]]))
        >>> path.before, path.state
        (tensor([[1., 0.]]), tensor([[1., 0.]]))
    """

    state: Tensor
    before: Tensor
    steps: Tensor
    converged: Tensor


@overload
def update(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    omega: Regularizer | None = None,
    beta: float | Tensor = 1.0,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[False] = False,
) -> Tensor: ...


@overload
def update(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    omega: Regularizer | None = None,
    beta: float | Tensor = 1.0,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[True, "sparse"],
) -> tuple[Tensor, Tensor]: ...


def update(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    omega: Regularizer | None = None,
    beta: float | Tensor = 1.0,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: bool | Literal["sparse"] = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""One update of Hopfield's dynamics: the step of the concave-convex procedure on the energy.

    .. math:: \operatorname{argmax}_\Omega\big(\beta\, q K^\top\big)\, V

    It is :func:`fenchel.attention` at inverse temperature β, so a large matrix of queries × keys is never held.

    Args:
        query: (…, L, E), the states.
        key: (…, S, E), the stored patterns.
        value: (…, S, D), what is recalled; the keys if not given.
        omega: the regularizer; ``Tsallis(1.5)`` by default.
        beta: inverse temperature: a positive number, or a tensor that broadcasts to the queries, such as
            (heads, 1, 1); differentiable.
        attn_mask: broadcasts to (…, L, S); boolean (True = takes part) or added to the scores βqKᵀ.
        dropout_p: the share of weights to drop; the rest is scaled up.
        return_weights: True: also the weights, (…, L, S); ``"sparse"``: as one CSR matrix, rows flattened.

    Returns:
        (…, L, D), or a pair of it and the weights.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import update
        >>> update(torch.tensor([[0.9, 0.2]]), torch.eye(2), omega=fenchel.Gini(), beta=2.0)
        tensor([[1., 0.]])

    References: Ramsauer et al. (2021); Santos et al. (2024), Proposition 1.
    """
    value = key if value is None else value
    for name, given in (("query", query), ("key", key), ("value", value)):
        check_kind(given, name, Tensor, what="a tensor")
    beta = check_real(beta, "beta") if isinstance(beta, Tensor) else check_positive(beta, "beta")
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if isinstance(beta, Tensor) and narrow and query.dtype == key.dtype == value.dtype:
        # β times a query would be rounded in half precision, or overflow.
        options: Any = {"attn_mask": attn_mask, "dropout_p": dropout_p, "return_weights": return_weights}
        found: Any = update(query.float(), key.float(), value.float(), omega, beta, **options)
        return found.to(query.dtype) if return_weights is False else tuple(t.to(query.dtype) for t in found)
    if isinstance(beta, Tensor):
        query, scale = query * beta.to(query.dtype), 1.0
    else:
        scale = beta
    options = {"attn_mask": attn_mask, "scale": scale, "dropout_p": dropout_p, "return_weights": return_weights}
    averaged: Tensor | tuple[Tensor, Tensor] = attention(query, key, value, omega, **options)
    return averaged


def iterate(
    step: Callable[[Tensor], Tensor],
    query: Tensor,
    *,
    max_steps: int = 100,
    tol: float | None = None,
    independent: bool = False,
) -> Path:
    """Apply a step to states (…, E) until each has converged.

    A state is updated no more once an update has moved it by at most ``tol · max(1, ‖state‖)``. Under a sparse Ω
    patterns are reached exactly: the next update then moves the state by 0. Differentiable through the updates of each
    state. In graphs, where values cannot be read, all ``max_steps`` are made; updates after convergence have no effect.

    Args:
        step: maps states (…, E) to states.
        query: (…, E), where to begin.
        max_steps: the most updates to make.
        tol: 0 waits until states repeat to the last bit; by default eps^¾ of the dtype, 6e-6 in float32.
        independent: whether ``step`` may be called with some of the states alone, as rows (R, E). States that have
            converged are then left out.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import iterate, update
        >>> patterns = torch.eye(3)
        >>> path = iterate(lambda q: update(q, patterns, beta=4.0), torch.tensor([[0.9, 0.2, 0.1], [0.0, 0.0, 1.0]]))
        >>> path.state
        tensor([[1., 0., 0.],
                [0., 0., 1.]])
        >>> path.steps, path.converged
        (tensor([1, 0]), tensor([True, True]))
    """
    check_callable(step, "step", "a function of states (…, E)")
    check_floats(query, "query")
    check_count(max_steps, "max_steps", 0)
    if tol is None:
        tol = torch.finfo(query.dtype).eps ** 0.75
    else:
        check_number(tol, "tol", 0, ends="[]")
    state = before = query
    steps = torch.zeros(query.shape[:-1], dtype=torch.long, device=query.device)
    converged = torch.zeros_like(steps, dtype=torch.bool)
    moving = ~converged
    for _ in range(max_steps):
        readable = concrete(state, moving)
        if readable and not bool(moving.any()):
            break
        old, chosen = state, moving.unsqueeze(-1)
        if independent and readable and not bool(moving.all()):
            state = old.index_put((moving,), step(old[moving]))
        else:
            state = torch.where(chosen, step(old), old)
        before = torch.where(chosen, old, before)
        exact = torch.promote_types(state.dtype, torch.float32)
        new = state.detach().to(exact)
        gap = torch.linalg.vector_norm(new - old.detach().to(exact), dim=-1)
        near = gap <= tol * torch.linalg.vector_norm(new, dim=-1).clamp_min(1.0)
        steps = steps + (moving & (gap > 0))
        converged = converged | (moving & near)
        moving = moving & (gap > 0) & ~near  # a state that is NaN is not updated again, and has not converged
    return Path(state, before, steps, converged)

"""Subsets: of a size, up to a size, and of a size with scores for neighbours."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_count, check_number, check_real
from fenchel.kernels.compilation import run
from fenchel.regularizers.base import Regularizer, hold, show
from fenchel.regularizers.capped import KSubsets, k_subsets
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.rows import to_rows
from fenchel.structures.base import Array, Layers, Oracle, Searched, Sums, check_batch


@written_by("of")
@dataclass(frozen=True)
class Share:
    """A size for each row: a share of its unmasked parts, rounded, and at least one.

    Args:
        of: the share, above 0 and at most 1.

    Example:
        >>> import torch
        >>> from fenchel.structures import Share, Subsets
        >>> mask = torch.arange(6) < torch.tensor([[6], [4], [1]])
        >>> Subsets(Share(0.5)).map(torch.arange(6.0).expand(3, 6), mask)
        tensor([[0., 0., 0., 1., 1., 1.],
                [0., 0., 1., 1., 0., 0.],
                [1., 0., 0., 0., 0., 0.]])
    """

    of: float

    def __post_init__(self) -> None:
        check_number(self.of, "of", 0, 1, ends="(]")

    def size(self, count: int) -> int:
        """The number of parts that is the share of ``count`` parts."""
        return max(1, int(self.of * count + 0.5))


class _Sized(Searched):
    """Subsets with a size k."""

    k: int | Share

    def __init__(self, k: int | Share) -> None:
        super().__init__()
        self.k = k if isinstance(k, Share) else check_count(k, "k")

    def check(self, shape: torch.Size) -> None:
        if not isinstance(self.k, Share) and self.k > shape[-1]:
            raise ValueError(
                f"k must be at most the number of parts: k is {self.k}, the scores have shape {tuple(shape)}"
            )

    def most(self, parts: int) -> int:
        """The largest size that a row can have: that of a row without a mask."""
        return self.k.size(parts) if isinstance(self.k, Share) else self.k

    def budgets(self, parts: int) -> Array:
        """How many parts are chosen if 0, 1, …, ``parts`` are allowed."""
        allowed = np.arange(parts + 1)
        sizes = np.maximum(1, (self.k.of * allowed + 0.5).astype(np.int64)) if isinstance(self.k, Share) else self.k
        chosen: Array = np.minimum(allowed, sizes)
        return chosen

    def sizes(self, scores: Array) -> Array:
        """How many are chosen in each row of scores, −inf where forbidden."""
        sizes: Array = self.budgets(scores.shape[-1])[(scores > -np.inf).sum(-1)]
        return sizes

    def budget(self, scores: Tensor, mask: Tensor | None) -> float | Tensor:
        """The size as :func:`fenchel.k_subsets` takes it: a number, or one per row."""
        if not isinstance(self.k, Share):
            return self.k
        allowed = (to_rows(scores.detach(), -1, mask) != -torch.inf).sum(-1, keepdim=True)
        return (self.k.of * allowed.double() + 0.5).floor().clamp_min(1)

    def extra_repr(self) -> str:
        return f"k={self.k}"


class _Exact(_Sized):
    """Subsets of exactly k parts, or all of them where fewer are unmasked."""

    fixed_dims = 1

    @property
    def least(self) -> int:  # type: ignore[override]
        """k, unless it is a share."""
        return 0 if isinstance(self.k, Share) else self.k

    def regularizer(self, count: int | None = None) -> Regularizer | None:
        """``KSubsets``, if there are no higher-order scores, and if k is known."""
        if isinstance(self.k, Share):
            return None if self.has_higher or count is None else KSubsets(self.k.size(count))
        return None if self.has_higher else KSubsets(self.k)

    def marginals(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        return None if self.has_higher else k_subsets(scores, self.budget(scores, mask), mask=mask)


@written_by("k")
class Subsets(_Exact):
    """All subsets of exactly k parts. Scores (…, N).

    SparseMAP over it is :func:`fenchel.k_subsets`, in closed form. Rows with fewer than k unmasked parts choose all.

    Args:
        k: how many to choose: a number, or a :class:`Share` of the unmasked parts of each row.

    Example:
        >>> import torch
        >>> from fenchel.structures import Subsets
        >>> Subsets(2).map(torch.tensor([0.3, -1.0, 2.0, 0.5]))
        tensor([0., 0., 1., 1.])
    """

    def key(self) -> Hashable | None:
        return (Subsets, self.k) if type(self) is Subsets else None

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        def best(scores: Array, rows: Array) -> tuple[Array, Array]:
            places = _top(scores[rows], self.most(shape[-1]), -np.inf)
            if isinstance(self.k, Share):
                places[np.arange(places.shape[1]) >= self.sizes(scores[rows])[:, None]] = -1
            return places, np.zeros(len(rows))

        return best


@written_by("k")
class AtMost(_Sized):
    """All subsets of at most k parts, none included. Scores (…, N); only positive ones are worth choosing.

    Example:
        >>> import torch
        >>> from fenchel.structures import AtMost
        >>> AtMost(2).map(torch.tensor([0.3, -1.0, -2.0, -0.5]))
        tensor([1., 0., 0., 0.])
    """

    k: int

    def __init__(self, k: int) -> None:
        super().__init__(check_count(k, "k"))

    def key(self) -> Hashable | None:
        return (AtMost, self.k) if type(self) is AtMost else None

    def marginals(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        rows = to_rows(scores, -1, mask)
        allowed = rows != -torch.inf
        clipped = torch.where(allowed, rows, 0.0).clamp(0.0, 1.0)
        bad = (rows.isnan() | (rows == torch.inf)).any(-1, keepdim=True)
        full = clipped.sum(-1, keepdim=True) >= self.k
        # Rows that are not full go in as zeros: what they would give must not reach a derivative.
        chosen = k_subsets(torch.where(full | ~allowed, rows, 0.0), self.k)
        result = torch.where(full, chosen, clipped)
        return torch.where(bad, torch.nan, result).to(scores.dtype)

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        return lambda scores, rows: (_top(scores[rows], self.k, 0.0), np.zeros(len(rows)))


@written_by("k", "transition")
class SequentialSubsets(_Exact):
    r"""All subsets of exactly k positions of a sequence, with a score for each pair of neighbours in it.

    .. math:: \max_{y \in \{0,1\}^N, \sum_i y_i = k} \; \sum_i s_i y_i + \sum_i t_i y_i y_{i+1}

    Positive transitions ask for runs, negative ones for gaps. Dynamic programming, O(N k). SparseMAP regularizes
    :math:`\frac12\|y\|^2`, the chosen positions alone: with transitions of zero it is :func:`fenchel.k_subsets`. As a
    factor graph with two states per position, as in the paper, both states are regularized, ½‖y‖² + ½‖1 − y‖²: another
    temperature, for which take ``2 * SparseMAP(SequentialSubsets(k, t / 2))``, the same up to a constant.
    Masked positions are left out, and no transition crosses them; rows with fewer than k others choose all of these.

    Args:
        k: how many to choose: a number, or a :class:`Share` of the unmasked positions of each row.
        transition: a number, or (…, N−1), where leading dimensions broadcast to the batch; a parameter is trained, −inf
            forbids a pair.

    Example:
        >>> import torch
        >>> from fenchel.structures import SequentialSubsets
        >>> scores = torch.tensor([1.0, 0.4, 0.0, 0.8, 0.2])
        >>> SequentialSubsets(2).map(scores), SequentialSubsets(2, transition=1.0).map(scores)
        (tensor([1., 0., 0., 1., 0.]), tensor([1., 1., 0., 0., 0.]))

    References: Santos et al. (2024), section 4.2, Example 2.
    """

    transition_dims = 1
    patience = 512
    transition: float | Tensor

    def __init__(self, k: int | Share, transition: float | Tensor = 0.0) -> None:
        super().__init__(k)
        hold(self, "transition", check_real(transition, "transition"))

    @property
    def has_higher(self) -> bool:
        """Whether there are transitions other than the number 0."""
        return isinstance(self.transition, Tensor) or self.transition != 0

    def regularizer(self, count: int | None = None) -> Regularizer | None:
        """``KSubsets``, if transitions are the number 0, or, where there is a count, a tensor of zeros."""
        if count is not None and self.has_higher and not bool(self._scores().any()):
            return Subsets(self.k).regularizer(count)
        return super().regularizer(count)

    def check(self, shape: torch.Size) -> None:
        super().check(shape)
        t = self.transition
        if isinstance(t, Tensor) and t.dim():
            if t.shape[-1] not in (1, shape[-1] - 1):
                raise ValueError(
                    f"transition must be a number or have N − 1 = {shape[-1] - 1} entries along its last dimension for "
                    f"scores of shape {tuple(shape)}, got shape {tuple(t.shape)}"
                )
            check_batch(t, 1, shape[:-1], "transition", shape)

    def transitions(self, shape: torch.Size) -> Tensor | None:
        t = self.transition
        t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64, device="cpu")
        return t.expand(*t.shape[:-1], shape[0] - 1) if t.dim() else t.expand(shape[0] - 1)

    def with_transitions(self, transitions: Tensor) -> SequentialSubsets:
        return SequentialSubsets(self.k, transitions)

    def higher(self, structures: Tensor) -> Tensor | None:
        both = structures[..., :-1] * structures[..., 1:]
        t = self.transition
        if not isinstance(t, Tensor):
            if not self.has_higher:
                return None
            t = both.new_full((), t)
        if t.dim() and t.shape[-1] == 1:
            t = t.expand(*t.shape[:-1], both.shape[-1])
        # Where nothing is chosen a score of −inf must not count.
        return torch.where(both > 0, both * t.to(both), 0.0).sum(-1)

    def rows(self, batch: torch.Size, index: Tensor) -> SequentialSubsets:
        t = self.transition
        if not isinstance(t, Tensor) or t.dim() < 2:
            return self
        return SequentialSubsets(self.k, t.expand(*batch, t.shape[-1]).reshape(-1, t.shape[-1])[index])

    def broken(self) -> Tensor | None:
        t = self._scores()
        wrong = t.isnan() | (t == torch.inf)
        return wrong.any(-1) if t.dim() else wrong

    def _scores(self) -> Tensor:
        """The transition in double precision: a number must not pass through the default dtype."""
        return torch.as_tensor(
            self.transition, dtype=torch.float64, device=getattr(self.transition, "device", "cpu")
        ).detach()

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        from fenchel.kernels.cpu.structures.subsets import best_sequences

        n, k = shape[-1], self.most(shape[-1])
        between = self._between(batch, n)
        sizes: Array | None = None

        def best(scores: Array, rows: Array) -> tuple[Array, Array]:
            nonlocal sizes
            if sizes is None:
                sizes = self.sizes(scores)
            chosen, bonus = np.empty((len(rows), k), np.int32), np.empty(len(rows))
            run(best_sequences, len(rows), 2 * len(rows) * n * k, rows, scores, between, sizes, chosen, bonus)
            return chosen, bonus

        return best

    def explorer(self, batch: torch.Size, shape: torch.Size) -> tuple[Any, ...] | None:
        from fenchel.kernels.cpu.structures.exploration import explore_sequences

        n = shape[-1]
        return explore_sequences, self.most(n), self._between(batch, n), self.budgets(n)

    def sums(self, shape: torch.Size) -> Sums | None:
        n = shape[-1]
        return None if bool(self._scores().any()) else Sums(np.arange(n)[None], np.array([np.nan]), exact=True)

    def layers(self, batch: torch.Size, shape: torch.Size, theta: Array) -> Layers:
        n, k = shape[-1], self.most(shape[-1])
        # Node 2j: j of the positions so far are chosen, and this one is not; node 2j + 1: j are, and this one is.
        j, chosen = np.divmod(np.arange(2 * k + 2), 2)
        possible = (j <= np.arange(n)[:, None] + chosen) & (j >= chosen)
        parts = np.where(possible, np.where(chosen, np.arange(n)[:, None], -1), -2).astype(np.int32)
        following = np.stack([2 * j, 2 * j + 3], 1)
        linked = np.stack([np.zeros_like(chosen), chosen], 1)  # two neighbours are chosen
        inside = following < 2 * k + 2
        between = self._between(batch, n)
        return Layers(
            parts,
            np.concatenate([[0], inside.sum(1).cumsum()]),
            following[inside],
            linked[inside],
            np.stack([np.zeros_like(between), between], -1),
            j == self.sizes(theta)[:, None],
        )

    def _between(self, batch: torch.Size, n: int) -> Array:
        """Transitions (rows, N − 1), with one row if they are the same for all."""
        t = self._scores().cpu()
        lead = batch if t.dim() > 1 else ()
        return t.expand(*lead, n - 1).reshape(-1, n - 1).contiguous().numpy() if n > 1 else np.zeros((1, 1))

    def extra_repr(self) -> str:
        return f"k={self.k}, transition={show(self.transition)}"


def _top(scores: Array, k: int, least: float) -> Array:
    """The places of the k largest entries above ``least``, filled up with −1."""
    best = torch.from_numpy(scores).topk(k, -1)
    places = torch.where(best.values > least, best.indices, -1)
    result: Array = places.to(torch.int32).numpy()
    return np.ascontiguousarray(result)

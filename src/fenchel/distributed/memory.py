"""ShardedMemory: an associative memory whose patterns are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_positive
from fenchel.distributed.collectives import (
    Group,
    all_max,
    all_sizes,
    all_sum,
    broadcast,
    check_group,
    described,
    gather_rows,
    raise_together,
    rank_in,
)
from fenchel.hopfield.certificates import Certificate, certify_patterns
from fenchel.hopfield.dynamics import iterate
from fenchel.hopfield.memory import (
    Rows,
    check_further_rows,
    check_mass,
    check_rows,
    check_writable,
    energy_of,
    query_rows,
    rows_without,
)
from fenchel.regularizers.base import Regularizer, check_omega, hold, show, simplified
from fenchel.regularizers.tsallis import Tsallis
from fenchel.streaming import patterns as streams
from fenchel.streaming.plan import Needs, Plan, Shapes, plan_pairs
from fenchel.streaming.plan import plan as make_plan


@dataclass(frozen=True)
class ShardedRetrieval:
    """The result of ``ShardedMemory.retrieve``, equal on all ranks; (…) are the leading dimensions of the queries.

    Args:
        state: (…, D), the final state of each query.
        steps: (…), how many updates changed the state.
        converged: (…), whether the last update moved the state by no more than the tolerance.
        weights: (…, K), the weights of the patterns of the support, in descending order, 0 beyond it. None for an Ω
            that gives weight to every pattern, such as Shannon's.
        ranks: (…, K), the rank that has each of these patterns; −1 beyond the support. None as ``weights`` are.
        places: (…, K), its place among the patterns of that rank; −1 beyond the support. None as ``weights`` are.
    """

    state: Tensor
    steps: Tensor
    converged: Tensor
    weights: Tensor | None
    ranks: Tensor | None
    places: Tensor | None


@dataclass(frozen=True)
class _Support:
    """The patterns that may have weight, (R, K) each, equal on all ranks: scores in double precision, ranks, places."""

    scores: Tensor
    ranks: Tensor
    places: Tensor


class ShardedMemory(nn.Module):
    r"""A Hopfield-Fenchel-Young network whose patterns are spread over the ranks of a group.

    The same as :class:`fenchel.hopfield.Memory` of the patterns of all ranks, in the order of the ranks. Every rank
    finds the support of a query among its own patterns. The support among all patterns is part of these, so that few
    scores and no patterns are exchanged, and one sum of states per step.

    All ranks must call the methods together, with the same queries, but for :meth:`add` and :meth:`remove`. Nothing is
    differentiable here.

    Args:
        patterns: (n, D), this rank's patterns, finite; n may differ and be 0. A tensor or NumPy array is copied; a
            ``memmap`` is read in chunks and never written to.
        omega: the regularizer, equal on all ranks; ``Tsallis(1.5)`` by default. One with a level below which nothing
            has weight, such as entmax with alpha > 1, normmax and k_subsets, or Shannon's.
        beta: inverse temperature, a positive number.
        group: the process group; None for the default group.
        chunk_size: how many patterns are read at a time.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from fenchel.distributed import ShardedMemory
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> memory = ShardedMemory(torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, 1.0], [1.0, -1.0, 1.0]]))
        >>> found = memory.retrieve(torch.tensor([0.8, 0.5, -0.3]))
        >>> found.state, found.weights, found.ranks, found.places
        (tensor([ 1.,  1., -1.]), tensor([1.]), tensor([0]), tensor([0]))
        >>> distributed.destroy_process_group()

    References: Santos, Niculae, McNamee & Martins (2024).
    """

    patterns: Tensor
    beta: float | Tensor

    def __init__(
        self,
        patterns: Rows,
        omega: Regularizer | None = None,
        beta: float | Tensor = 1.0,
        *,
        group: Group = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        check_group(group)
        self.group = group
        device, problem = patterns.device if isinstance(patterns, Tensor) else torch.device("cpu"), None
        try:
            self._hold(patterns, omega, beta, chunk_size)
        except (TypeError, ValueError) as error:
            problem = error
        raise_together(problem, device, group)
        same = {"omega": described(self.omega), "beta": show(self.beta)}
        (widths,) = all_sizes([self.patterns.shape[1]], device, group, same)
        if len(set(widths)) > 1:
            shown = f"widths from {min(widths)} to {max(widths)}"
            raise ValueError(f"patterns must have one width on all ranks, got {shown}")

    def _hold(self, patterns: Rows, omega: Regularizer | None, beta: float | Tensor, chunk_size: int | None) -> None:
        """Check the arguments and keep them."""
        self.omega = Tsallis(1.5) if omega is None else check_omega(omega)
        shape = self.omega.parameter_shape
        if shape is not None and shape.numel() > 1:
            raise ValueError(f"omega must be one for all queries and patterns, got {self.omega!r}")
        self._associative()
        hold(self, "beta", check_positive(beta, "beta"))
        self.chunk_size = None if chunk_size is None else check_count(chunk_size, "chunk_size")
        self.in_file = isinstance(patterns, np.memmap)
        held = _check_part(patterns)
        held = held if held.is_floating_point() or self.in_file else held.to(torch.get_default_dtype())
        self.register_buffer("patterns", held.clone() if held is patterns else held, persistent=not self.in_file)

    def extra_repr(self) -> str:
        return f"{len(self.patterns)} × {self.patterns.shape[1]} on this rank, beta={show(self.beta)}"

    # -- stored patterns ---------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """How many patterns each rank has. All ranks must call it."""
        return all_sizes([len(self.patterns)], self.patterns.device, self.group)[0]

    def add(self, patterns: Rows) -> None:
        """Append patterns, (M, D) or one of shape (D,), to those of this rank. Other ranks need not take part."""
        check_writable(self.in_file)
        self.patterns = torch.cat([self.patterns, check_further_rows(patterns, "patterns", self.patterns).detach()])

    def remove(self, which: int | Sequence[int] | Tensor) -> None:
        """Remove patterns of this rank, given by their places or by a boolean mask. Other ranks need not take part."""
        check_writable(self.in_file)
        self.patterns = self.patterns[rows_without(which, self.patterns)]

    # -- energy, updates and retrieval -------------------------------------------------------------------------------

    def energy(self, query: Tensor) -> Tensor:
        """The energy of states (…, D), one value per state, (…); as that of :class:`fenchel.hopfield.Memory`.

        For Ω that are 0 at one-hot vectors each rank takes 8 bytes per pattern of all ranks, for max_Ω of equal scores.
        """
        given = self._check_query(query)
        rows = given.double()
        omega, beta = simplified(self.omega), float(self.beta)
        count = sum(self._all_sizes(query=rows))
        if self._associative():
            conjugate = omega.max(self._gathered_maxima(rows)[0], dim=0)
        else:
            conjugate = omega.max(self._support(rows).scores)

        def largest_norm() -> Tensor:
            blocks = self._stored(torch.float64).blocks(Plan().columns)
            norms = [torch.linalg.vector_norm(block, dim=-1).amax() for _, block in blocks]
            largest = torch.stack(norms).amax() if norms else rows.new_zeros(())
            return all_max(largest.to(rows.device).reshape(1), self.group)

        energy = energy_of(rows, conjugate, omega, beta, count, largest_norm)
        return energy.to(given.dtype).reshape(query.shape[:-1])

    def step(self, query: Tensor) -> Tensor:
        """One update of states (…, D): Xᵀ argmax_Ω(βXq)."""
        rows = self._check_query(query)
        self._all_sizes(query=rows)
        return self._update(rows).reshape(query.shape)

    def forward(self, query: Tensor) -> Tensor:
        """``step``."""
        return self.step(query)

    def retrieve(self, query: Tensor, max_steps: int = 100, tol: float | None = None) -> ShardedRetrieval:
        """Update states (…, D) until each of them has converged.

        Args:
            query: (…, D), equal on all ranks.
            max_steps: the most updates to make.
            tol: a state has converged when an update moves it by at most ``tol · max(1, ‖state‖)``; eps^¾ by default.
        """
        rows = self._check_query(query)
        check_count(max_steps, "max_steps")
        self._all_sizes(query=rows, max_steps=max_steps, tol=tol)
        path = iterate(self._update, rows, max_steps=max_steps, tol=tol, independent=True)
        batch = query.shape[:-1]
        state, steps = path.state.reshape(query.shape), path.steps.reshape(batch)
        weights = ranks = places = None
        if not self._associative():
            support = self._support(self._wide(path.before))
            p, order = simplified(self.omega).argmax(support.scores).sort(-1, descending=True)
            width = max(int((p > 0).sum(-1).max()) if len(p) else 0, 1)
            weights, some = p[:, :width].to(rows.dtype).reshape(*batch, -1), p[:, :width] > 0
            ranks, places = (
                torch.where(some, each.gather(-1, order)[:, :width], -1).reshape(*batch, -1)
                for each in (support.ranks, support.places)
            )
        return ShardedRetrieval(state, steps, path.converged.reshape(batch), weights, ranks, places)

    def certify(self) -> Certificate:
        """Certify which of this rank's patterns are retrieved exactly, and from how far, beside those of all ranks.

        See :class:`fenchel.hopfield.Certificate`. Blocks of patterns are sent from each rank to all others, once for
        every block of patterns that the largest rank has.
        """
        size = plan_pairs().columns
        sizes, rank = self._all_sizes(), rank_in(self.group)
        first = sum(sizes[:rank])
        wanted = torch.zeros(sum(sizes), dtype=torch.bool, device="cpu")
        wanted[first : first + sizes[rank]] = True

        def read() -> Iterator[tuple[int, Tensor]]:
            for r, count in enumerate(sizes):
                for start in range(0, count, size):
                    shape = min(size, count - start), self.patterns.shape[1]
                    if r == rank:
                        block = self.patterns[start : start + size].to(self._dtype())
                    else:
                        block = torch.empty(shape, dtype=self._dtype())
                    yield sum(sizes[:r]) + start, broadcast(block.contiguous(), r, self.group).cpu()

        def own() -> Iterator[tuple[int, Tensor]]:
            return ((first + start, block.cpu()) for start, block in self._stored(self._dtype()).blocks(size))

        with torch.no_grad():
            found = certify_patterns(read, sum(sizes), self.omega, float(self.beta), wanted, own)
            # All ranks have to send as often as the one with the most blocks asks.
            for _ in range(-(-max(sizes) // size) - -(-sizes[rank] // size)):
                for _ in read():
                    pass
        return found

    # -- parts of these ----------------------------------------------------------------------------------------------

    def _dtype(self) -> torch.dtype:
        return self.patterns.dtype if self.patterns.is_floating_point() else torch.float32

    def _stored(self, dtype: torch.dtype) -> streams.Stored:
        """This rank's patterns, with a function that converts some of their rows to a dtype."""
        return streams.Stored(self.patterns, partial(torch.Tensor.to, dtype=dtype))

    def _all_sizes(self, **same: Any) -> list[int]:
        """How many patterns each rank has; an error if there are none, or fewer than Ω chooses, or arguments differ."""
        (sizes,) = all_sizes([len(self.patterns)], self.patterns.device, self.group, same)
        if not sum(sizes):
            raise ValueError("a memory must have at least one pattern: no rank has any")
        check_mass(self.omega, sum(sizes), "patterns of all ranks")
        return sizes

    def _check_query(self, query: Tensor) -> Tensor:
        """Queries as rows (R, D), in the precision to compute in."""
        rows = query_rows(query, self.patterns.shape[1], self._dtype())
        if torch.is_grad_enabled() and query.requires_grad:
            raise ValueError("query must not require gradients: a ShardedMemory is not differentiable; detach it")
        return rows.detach()

    def _associative(self) -> bool:
        """Whether partial results are merged; else Ω must have a level below which nothing has weight."""
        omega, _ = self.omega.canonical()
        if not omega.associative and omega.line(torch.zeros(1, device="cpu")) is None:
            raise ValueError(
                "omega must have a level below which no pattern has weight, as entmax with alpha > 1, or be Shannon's, "
                f"got {self.omega}"
            )
        return omega.associative

    def _wide(self, rows: Tensor) -> Tensor:
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def _scaled(self, rows: Tensor) -> tuple[Tensor, streams.Stored, Plan]:
        """Queries times β, this rank's patterns, and how to read them."""
        needs = Needs("recall", rows.dtype, by_chunks=True, columns=self.chunk_size)
        shapes = Shapes(len(rows), max(len(self.patterns), 1), 2 * self.patterns.shape[1])
        return rows * float(self.beta), self._stored(rows.dtype), make_plan(self.omega, shapes, rows.device, needs)

    def _update(self, states: Tensor) -> Tensor:
        """One update of states (R, D)."""
        with torch.no_grad():
            rows, omega = self._wide(states), simplified(self.omega)
            if self._associative():
                maxima, means = self._gathered_maxima(rows)
                share = omega.argmax(maxima, dim=0)[rank_in(self.group)]
                found = share.unsqueeze(-1) * means
            else:
                support = self._support(rows)
                weights = omega.argmax(support.scores)
                weights = torch.where(support.ranks == rank_in(self.group), weights, 0.0)
                row, column = (weights != 0).nonzero(as_tuple=True)  # NaN too
                found = rows.new_zeros(rows.shape, dtype=torch.float64)
                held = self.patterns[support.places[row, column]].double()
                found.index_add_(0, row, weights[row, column].unsqueeze(-1) * held)
            return all_sum(found.contiguous(), self.group).to(states.dtype)

    def _gathered_maxima(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """max_Ω of every rank's patterns, (ranks, R), and this rank's mean of patterns, (R, D), in double precision."""
        query, keys, plan = self._scaled(rows)
        if len(self.patterns):
            padded = streams.pad_rows(query, plan.tile)
            gamma = self.omega.canonical()[1]
            top, means = streams.softmax_average(padded, keys, keys, gamma, plan)
            own, means = (gamma * top)[: len(rows)].double(), means[: len(rows)].double()
        else:
            own = rows.new_full((len(rows),), -torch.inf, dtype=torch.float64)
            means = rows.new_zeros(rows.shape, dtype=torch.float64)
        ranks = check_group(self.group)
        return gather_rows(own.unsqueeze(0), [1] * ranks, self.group), means

    def _support(self, rows: Tensor) -> _Support:
        """The patterns of all ranks that may have weight for queries (R, D)."""
        scores, places, broken = self._own_support(rows)
        ranks = check_group(self.group)
        # The level of any part is a lower bound of the whole's: what is below the highest of them is left out.
        level = scores.new_full((len(scores), 1), -torch.inf)
        if scores.shape[-1]:
            omega, gamma = simplified(self.omega), float(self.omega.canonical()[1])
            own = omega.line(scores)
            assert own is not None
            slack = 64 * torch.finfo(rows.dtype).eps * (scores.amax(-1, keepdim=True).abs() + gamma)
            level = torch.where(scores.amax(-1, keepdim=True) > -torch.inf, own - slack, level)
        shared = all_max(torch.cat([level, broken.unsqueeze(-1).to(level.dtype)], -1), self.group)
        scores = scores.masked_fill(scores < shared[:, :1], -torch.inf)
        count = (scores > -torch.inf).sum(-1)
        longest = torch.tensor([int(count.max()) if len(count) else 0], device=rows.device)
        width = max(int(all_max(longest, self.group)), 1)
        listed = torch.full((2, len(rows), width), -torch.inf, dtype=torch.float64, device=rows.device)
        listed[1] = -1
        own_width = min(width, scores.shape[-1])
        if own_width:
            top, order = scores.topk(own_width, -1)
            listed[0, :, :own_width] = top
            listed[1, :, :own_width] = places.gather(-1, order).double()
        every = gather_rows(listed.unsqueeze(0), [1] * ranks, self.group)  # (ranks, 2, R, width)
        all_scores = every[:, 0].movedim(0, -2).flatten(-2)
        all_places = every[:, 1].movedim(0, -2).flatten(-2).long()
        of = torch.arange(ranks, device=rows.device).repeat_interleave(width).expand_as(all_places)
        all_scores = torch.where(shared[:, 1:] > 0, torch.nan, all_scores)
        return _Support(all_scores, of, all_places)

    def _own_support(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (R, K) in double precision and places of this rank's support, and which queries are not finite."""
        query, keys, plan = self._scaled(rows)
        if not len(self.patterns) or not len(rows):
            nothing = rows.new_zeros(len(rows), 0, dtype=torch.float64)
            return nothing, nothing.long(), ~rows.isfinite().all(-1)
        padded = streams.pad_rows(query, plan.tile)
        found = streams.candidates(padded, keys, simplified(self.omega), plan)
        scores, places = found.score[: len(rows)].double(), found.place[: len(rows)]
        wide = found.too_wide[: len(rows)] & ~found.not_finite[: len(rows)]
        if bool(wide.any()):  # supports as large as a chunk: all scores of all queries
            scores = torch.cat([query @ block.T for _, block in keys.blocks(plan.columns)], -1).double()
            places = torch.arange(len(self.patterns), device=rows.device).expand_as(scores)
        return scores, places, found.not_finite[: len(rows)]


def _check_part(patterns: Any) -> Tensor:
    """Check a rank's patterns, (n, D), of which there may be none."""
    if isinstance(patterns, nn.Parameter):
        raise TypeError(
            "patterns must not be a parameter: a ShardedMemory is not differentiable; pass patterns.detach()"
        )
    if isinstance(patterns, (Tensor, np.ndarray)) and patterns.ndim == 2 and not len(patterns) and patterns.shape[1]:
        return patterns if isinstance(patterns, Tensor) else torch.from_numpy(np.array(patterns))
    return check_rows(patterns, "patterns").detach()

"""Memory: an associative memory of patterns, for any Ω and inverse temperature β."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_device, check_floats, check_one_of, check_positive, check_width
from fenchel._torch import concrete, is_batched, tracks
from fenchel.hopfield.certificates import Certificate, certify_associations, certify_patterns
from fenchel.hopfield.dynamics import iterate, update
from fenchel.hopfield.implicit import attach
from fenchel.regularizers.base import Regularizer, check_omega, hold, show, simplified
from fenchel.regularizers.tsallis import Tsallis
from fenchel.streaming import patterns as streams
from fenchel.streaming.plan import Needs, Plan, Shapes, Step, plan_pairs
from fenchel.streaming.plan import plan as make_plan

Rows = Tensor | np.ndarray[Any, Any]
Normalize = Literal["sphere", "layer"] | None


@dataclass(frozen=True)
class Retrieval:
    """The result of ``Memory.retrieve``; (…) are the leading dimensions of the queries.

    Args:
        state: (…, D), the final state of each query: its ``weights`` times the patterns.
        steps: (…), how many updates changed the state; 0 for a query that is a fixed point.
        converged: (…), whether the last update moved the state by no more than the tolerance.

    Example:
        >>> import torch, fenchel
        >>> memory = fenchel.hopfield.Memory(torch.eye(3), fenchel.Gini(), beta=4.0)
        >>> found = memory.retrieve(torch.tensor([0.8, 0.1, 0.0]))
        >>> found.state, found.weights, found.steps, found.converged
        (tensor([1., 0., 0.]), tensor([1., 0., 0.]), tensor(1), tensor(True))
    """

    state: Tensor
    steps: Tensor
    converged: Tensor
    _memory: Memory = field(repr=False)
    _before: Tensor = field(repr=False)
    _versions: Sequence[tuple[Any, int]] = field(repr=False)

    @cached_property
    def weights(self) -> Tensor:
        """The weights of the patterns in ``state``, (…, N), differentiable; computed at the first access."""
        return self._unchanged_memory().weights(self._before)

    @cached_property
    def value(self) -> Tensor:
        """The weights times the values, (…, V); the state if the memory has no values."""
        memory, before = self._unchanged_memory(), self._before
        if memory.values is None:
            return self.state
        recalled = memory._recall(before.reshape(-1, before.shape[-1]), "values")
        return recalled.reshape(*before.shape[:-1], recalled.shape[-1])

    def _unchanged_memory(self) -> Memory:
        """The memory, if neither its settings nor its tensors have changed since the retrieval."""
        now = self._memory._versions()
        if len(now) != len(self._versions) or any(map(_differ, now, self._versions)):
            raise RuntimeError("the memory has changed since this was retrieved: read weights and value before it does")
        return self._memory


def _in_full_precision(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method with autocast turned off: scores in half precision would lose the order of the patterns."""

    @wraps(method)
    def call(self: Memory, *args: Any, **kwargs: Any) -> Tensor:
        device = self.patterns.device.type
        if not torch.is_autocast_enabled(device):
            return method(self, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(self, *args, **kwargs)

    return call


class Memory(nn.Module):
    r"""A Hopfield-Fenchel-Young network: an associative memory for any Ω.

    .. math:: E(q) = \tfrac12\|q\|^2 - \beta^{-1} \big(\Omega^*(\beta X q) - \Omega^*(0)\big) + \tfrac12 M^2

    The energy E of a state q, with patterns X and their largest norm M, is never negative. An update,
    :math:`q \leftarrow X^\top \operatorname{argmax}_\Omega(\beta X q)`, is one step of the concave-convex procedure
    on E and never increases it. The formula is for an Ω over distributions that is zero at one-hot vectors, as Tsallis
    and norm entropies are. For any other Ω the two constants are left out, and the update is the same. A sparse Ω can
    retrieve patterns exactly; :meth:`certify` computes which ones, and from how far.

    Args:
        patterns: (N, D), finite. A tensor is copied: later changes to it do not change the memory, and gradients reach
            it through the copy. An ``nn.Parameter`` is not copied, and is trained if it requires a gradient. A NumPy
            array is copied, except a ``memmap``, which is read in chunks, never written to, and not in the
            ``state_dict``.
        omega: the regularizer; ``Tsallis(1.5)`` by default. Its parameters must be the same for all queries.
        beta: inverse temperature, a positive number or a tensor with one entry. A tensor is copied; an
            ``nn.Parameter`` is trained.
        chunk_size: how many patterns are read at a time, so that no matrix of queries × patterns is held. The results
            are exact. Entmax with alpha > 1, normmax, k_subsets and softmax take one pass per step. Any other Ω, such
            as SparseMAP over sequential k-subsets, is solved on all scores of a few queries at a time. Under ``vmap``
            all patterns are read at once.
        values: (N, V), recalled in place of the patterns (hetero-association); the same kinds as ``patterns``.
        normalize: ``"sphere"`` scales patterns, and states before they are compared with them, to norm 1; ``"layer"``
            to mean 0 and variance 1. The energy as a function of the scaled state never increases either.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import Memory
        >>> memory = Memory(torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, 1.0], [1.0, -1.0, 1.0]]))
        >>> found = memory.retrieve(torch.tensor([0.8, 0.5, -0.3]))
        >>> found.state, found.weights, found.steps, found.converged
        (tensor([ 1.,  1., -1.]), tensor([1., 0., 0.]), tensor(2), tensor(True))
        >>> memory.certify().radius
        tensor([0.7071, 0.7071, 0.7071], dtype=torch.float64)
        >>> Memory(torch.eye(4), fenchel.KSubsets(2), beta=4.0).step(torch.tensor([1.0, 0.8, 0.2, 0.0]))
        tensor([1., 1., 0., 0.])

    References: Santos, Niculae, McNamee & Martins (2024); Ramsauer et al. (2021).
    """

    patterns: Tensor
    values: Tensor | None
    beta: float | Tensor

    def __init__(
        self,
        patterns: Rows,
        omega: Regularizer | None = None,
        beta: float | Tensor = 1.0,
        chunk_size: int | None = None,
        *,
        values: Rows | None = None,
        normalize: Normalize = None,
    ) -> None:
        super().__init__()
        self.omega = Tsallis(1.5) if omega is None else check_omega(omega)
        self.chunk_size = None if chunk_size is None else check_count(chunk_size, "chunk_size")
        if normalize is not None:
            check_one_of(normalize, "normalize", "sphere", "layer")
        self.normalize = normalize
        beta = check_positive(beta, "beta")
        if isinstance(beta, Tensor):
            if beta.numel() != 1:
                raise ValueError(f"beta must be one number for the whole memory, got shape {tuple(beta.shape)}")
            beta = beta if isinstance(beta, nn.Parameter) else beta.clone()
        hold(self, "beta", beta)
        self.in_file = isinstance(patterns, np.memmap)
        self._store("patterns", patterns)
        if values is None:
            self.register_buffer("values", None)
        else:
            self._store("values", values)
            if len(values) != len(self.patterns):
                raise ValueError(f"values must be as many as the patterns, {len(self)}, got {len(values)}")
            check_device(self.patterns, "patterns", values=self.values)
        self._check_fit(len(self))

    # -- stored patterns -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of stored patterns."""
        return self.patterns.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that states are computed in, unless that of a query is more precise."""
        return self.patterns.dtype if self.patterns.is_floating_point() else torch.float32

    def add(self, patterns: Rows, values: Rows | None = None) -> None:
        """Append patterns, (M, D) or one of shape (D,), and their values if the memory has values.

        Patterns that are a parameter become a new parameter, which must be given to the optimizer again.
        """
        check_writable(self.in_file)
        if (values is None) != (self.values is None):
            raise ValueError(f"values must {'not ' if self.values is None else ''}be given: they go with all patterns")
        new = {"patterns": self._joined("patterns", patterns)}
        if values is not None:
            new["values"] = self._joined("values", values)
            if len(new["values"]) != len(new["patterns"]):
                raise ValueError("values must be as many as the patterns that are added")
        for name, held in new.items():
            self._replace(name, held)

    def remove(self, which: int | Sequence[int] | Tensor) -> None:
        """Remove patterns, given by their indices or by a boolean mask (N,), True = remove."""
        check_writable(self.in_file)
        kept = rows_without(which, self.patterns)
        if not bool(kept.any()):
            raise ValueError("a memory must keep at least one pattern")
        self._check_fit(int(kept.sum()))
        for name in ("patterns", "values"):
            held = getattr(self, name)
            if held is not None:
                self._replace(name, held.detach()[kept] if isinstance(held, nn.Parameter) else held[kept])

    # -- energy, updates and retrieval -----------------------------------------------------------------

    @_in_full_precision
    def energy(self, query: Tensor) -> Tensor:
        """The energy of states (…, D), one value per state, (…); not negative for Tsallis and norm entropies."""
        omega = simplified(self.omega)
        given = self._check_query(query)
        # In double precision: at a small β the conjugate is nearly log N, which leaves the difference no digits.
        rows = _normalized(given, self.normalize).double()
        beta = self._beta(rows)
        keys = self._stored("patterns", rows.dtype)
        conjugate = streams.maximum(rows * beta, keys, omega, self._plan("energy", rows))
        energy = energy_of(rows, conjugate, omega, beta, len(self), self._largest_norm)
        return energy.to(given.dtype).reshape(query.shape[:-1])

    def step(self, query: Tensor) -> Tensor:
        """One update of states (…, D): Xᵀ argmax_Ω(βXq)."""
        return self._recall(self._check_query(query)).reshape(query.shape)

    @_in_full_precision
    def weights(self, query: Tensor) -> Tensor:
        """The weights of the patterns for states (…, D): argmax_Ω(βXq), (…, N), dense."""
        given = self._check_query(query)
        rows = _normalized(given, self.normalize)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        keys = self._stored("patterns", rows.dtype)
        weights = streams.weights(rows * self._beta(rows), keys, self.omega, self._plan("energy", rows))
        return weights.to(given.dtype).reshape(*query.shape[:-1], len(self))

    def retrieve(
        self, query: Tensor, max_steps: int = 100, tol: float | None = None, *, implicit: bool = False
    ) -> Retrieval:
        """Update states (…, D) until each of them has converged.

        A state has converged when an update moves it by at most ``tol · max(1, ‖state‖)``, and is not updated again.
        Under a sparse Ω patterns are reached exactly: the next update then moves the state by 0. A query takes the same
        path alone and in a batch: without derivatives all matrix products have one shape, so that states differ in the
        last bit at most; with derivatives they agree up to rounding.

        Differentiable through the updates. With ``implicit=True`` the derivative is that of the fixed point, by one
        linear system per query and in constant memory: it is exact for the patterns, beta and the parameters of Ω, and
        zero for the query. It is of first order only, and an error if a query has not converged.

        Args:
            query: (…, D).
            max_steps: the most updates to make.
            tol: 0 waits until states repeat to the last bit; by default eps^¾ of the dtype, 6e-6 in float32.
            implicit: whether to differentiate through the fixed point in place of the updates.

        Returns:
            ``.state``, ``.weights``, ``.value``, ``.steps`` and ``.converged``, for each query.
        """
        rows = self._check_query(query)
        check_count(max_steps, "max_steps")
        tensors = (query, *self.parameters(), *self.buffers())
        # One plan, and so one algorithm, for all steps; in graphs, where nothing can be asked, there is none.
        step = partial(self._recall, plan=self._plan("recall", rows) if concrete(*tensors) else None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not implicit):
            path = iterate(step, rows, max_steps=max_steps, tol=tol, independent=True)
        state, before = path.state, path.before
        if implicit and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            if not bool(path.converged.all()):
                raise RuntimeError(
                    f"{int((~path.converged).sum())} of {len(rows)} queries have not converged after max_steps = "
                    f"{max_steps}: they have no implicit derivative; allow more steps, or pass implicit=False"
                )
            state = before = attach(step, state, rows)
        batch = query.shape[:-1]
        return Retrieval(
            state.reshape(query.shape),
            path.steps.reshape(batch),
            path.converged.reshape(batch),
            self,
            before.reshape(query.shape),
            self._versions(),
        )

    def certify(self, associations: Tensor | None = None) -> Certificate:
        """Certify which patterns are retrieved exactly, and from how far: see :class:`Certificate`.

        Args:
            associations: boolean (A, N), sets of patterns that are recalled together, for an Ω that chooses k patterns
                at once, or structures. Without them every pattern is certified on its own.
        """
        with torch.no_grad():
            read, beta = partial(self._read_on_cpu, plan_pairs().columns), float(self.beta)
            if associations is None:
                return certify_patterns(read, len(self), self.omega, beta)
            return certify_associations(read, len(self), self.omega, beta, associations)

    def forward(self, query: Tensor) -> Tensor:
        """``step``."""
        return self.step(query)

    def extra_repr(self) -> str:
        shown = [f"{len(self)} × {self.patterns.shape[1]}", f"beta={show(self.beta)}"]
        if self.values is not None:
            shown.append(f"values={self.values.shape[1]}")
        shown += [f"{n}={v!r}" for n in ("chunk_size", "normalize") if (v := getattr(self, n)) is not None]
        return ", ".join(shown)

    # -- parts of these --------------------------------------------------------------------------------

    def _by_chunks(self, rows: Tensor) -> bool:
        """Whether patterns are read some at a time. Where ``vmap`` maps, lists of candidates cannot be kept."""
        chunked = self.chunk_size is not None or self.in_file
        return chunked and not any(map(is_batched, (rows, *self.parameters(), *self.buffers())))

    def _check_query(self, query: Tensor) -> Tensor:
        """Queries as rows (R, D), in the precision to compute in."""
        rows = query_rows(query, self.patterns.shape[1], self.dtype)
        check_device(self.patterns, "patterns", query=query)
        self._check_fit(len(self))  # Ω may have been replaced, and patterns loaded
        return rows

    def _beta(self, rows: Tensor) -> float | Tensor:
        """β as a number, or as a scalar tensor with the dtype of the rows, which it then does not change."""
        return self.beta.to(rows.dtype).reshape(()) if isinstance(self.beta, Tensor) else self.beta

    def _plan(self, step: Step, rows: Tensor) -> Plan:
        """How scores of rows (R, D) are computed."""
        width = 2 * self.patterns.shape[1]
        needs = Needs(step, rows.dtype, by_chunks=self._by_chunks(rows), columns=self.chunk_size)
        return make_plan(self.omega, Shapes(len(rows), len(self), width), rows.device, needs)

    def _stored(self, name: str = "patterns", dtype: torch.dtype | None = None) -> streams.Stored:
        """The patterns or values, with a function that normalizes and converts some of their rows to a dtype."""
        return streams.Stored(getattr(self, name), partial(self._prepare, name=name, dtype=dtype))

    def _prepare(self, held: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
        """Rows of the patterns, normalized, or of the values, in a dtype; by default their own, or float32."""
        held = held.to(dtype or (held.dtype if held.is_floating_point() else torch.float32))
        # Only parameters and patterns in a file are not stored in normalized form.
        raw = isinstance(self.patterns, nn.Parameter) or self.in_file
        return _normalized(held, self.normalize) if raw and name == "patterns" else held

    def _read_on_cpu(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of ``size`` patterns, each with the index of its first, without gradient, in the CPU's memory."""
        return ((first, block.detach().cpu()) for first, block in self._stored().blocks(size))

    @_in_full_precision
    def _recall(self, states: Tensor, name: str = "patterns", plan: Plan | None = None) -> Tensor:
        """argmax_Ω(βXq) times the patterns, (R, D), or the values, (R, V), for checked states (R, D)."""
        rows = _normalized(states, self.normalize)
        learns = tracks(rows, *self.parameters(), *self.buffers())
        streamed = self._by_chunks(rows) or (not learns and concrete(rows, self.patterns))
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) if streamed else rows
        keys = self._stored("patterns", rows.dtype)
        values = keys if name == "patterns" else self._stored(name, rows.dtype)
        if streamed:
            plan = self._plan("recall", rows) if plan is None else plan
            recalled = streams.recall(rows * self._beta(rows), keys, values, self.omega, plan)
        else:  # attention keeps little for the derivative
            rows = streams.pad_rows(rows, Plan().tile)
            patterns = keys.prepare(keys.held)
            what = patterns if values is keys else values.prepare(values.held)
            recalled = update(rows, patterns, what, self.omega, self._beta(rows))[: len(states)]
        return recalled.to(states.dtype)

    def _largest_norm(self) -> Tensor:
        """The largest norm of a pattern, in double precision."""
        blocks = self._stored(dtype=torch.float64).blocks(Plan().columns)
        return torch.stack([torch.linalg.vector_norm(block, dim=-1).amax() for _, block in blocks]).amax()

    def _versions(self) -> list[tuple[Any, int]]:
        """The settings and tensors that weights depend on, and the version of each tensor."""
        versions: list[tuple[Any, int]] = [(self.omega, 0), (self.normalize, 0), (self.beta, 0)]
        for t in (*self.parameters(), *self.buffers()):
            versions.append((t, 0 if t.is_inference() else t._version))
        return versions

    def _check_fit(self, count: int) -> None:
        """Raise an error if Ω cannot choose among ``count`` patterns, or varies from query to query."""
        shape = self.omega.parameter_shape
        if shape is not None and shape[:-1].numel() > 1:
            raise ValueError(
                f"omega must be one for all queries, got {self.omega!r}: its tensors may only have the dimension of "
                "the patterns, the last"
            )
        omega, _ = self.omega.canonical()
        try:
            omega.dims(torch.empty(count, device="meta"), -1)
        except ValueError as error:
            raise ValueError(
                f"omega must choose along one dimension, the {count} patterns: {error}. If the patterns are the parts "
                "of a table, rearrange them in LPSparseMAP(lambda graph, u: graph.add(Structured(u[table], structure)))"
            ) from None
        check_mass(omega, count, "patterns")

    def _store(self, name: str, given: Rows) -> None:
        """Check patterns or values (N, D) and register them as a parameter or a buffer."""
        held = check_rows(given, name)
        if isinstance(held, nn.Parameter):
            self.register_parameter(name, held)
        elif isinstance(given, np.memmap):
            self.register_buffer(name, held, persistent=False)
        else:
            held = held if held.is_floating_point() else held.to(torch.get_default_dtype())
            held = _normalized(held, self.normalize) if name == "patterns" and not self.in_file else held
            self.register_buffer(name, held.clone() if held is given else held)

    def _joined(self, name: str, given: Rows) -> Tensor:
        """The stored rows, followed by the given ones."""
        held: Tensor = getattr(self, name)
        new = check_further_rows(given, name, held)
        if isinstance(held, nn.Parameter):
            return torch.cat([held.detach(), new.detach()])
        return torch.cat([held, _normalized(new, self.normalize if name == "patterns" else None)])

    def _replace(self, name: str, new: Tensor) -> None:
        """Replace patterns or values by other ones; a parameter is replaced by a new parameter."""
        old = getattr(self, name)
        setattr(self, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        counts = []
        for name in ("patterns", "values"):
            held, saved = getattr(self, name), state_dict.get(prefix + name)
            taken = held if saved is None or (self.in_file and name == "patterns") else saved
            counts += [len(taken)] if isinstance(held, Tensor) and isinstance(taken, Tensor) and taken.dim() else []
        if len(set(counts)) > 1:
            raise ValueError(
                f"values must be as many as the patterns: with this state_dict there would be {counts[0]} patterns and "
                f"{counts[1]} values"
            )
        # The number of patterns may differ: make tensors of the saved size first.
        for name in ("patterns", "values"):
            held, saved = getattr(self, name), state_dict.get(prefix + name)
            if self.in_file or not isinstance(held, Tensor) or not isinstance(saved, Tensor):
                continue
            if saved.dim() == 2 and saved.shape[0] != held.shape[0] and saved.shape[1] == held.shape[1]:
                self._replace(name, held.detach().new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.normalize is not None and not self.in_file and not isinstance(self.patterns, nn.Parameter):
            # Patterns that were saved normalized are not scaled again, so that they keep every bit.
            scaled, eps = _normalized(self.patterns, self.normalize), torch.finfo(self.patterns.dtype).eps
            if not torch.allclose(scaled, self.patterns, rtol=64 * eps, atol=64 * eps):
                self.patterns = scaled


def _differ(now: tuple[Any, int], then: tuple[Any, int]) -> bool:
    """Whether two settings or tensors, each with its version, are not the same."""
    number = isinstance(now[0], (float, str)) and now[0] == then[0]
    return now[1] != then[1] or not (number or now[0] is then[0])


def query_rows(query: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Queries (…, D) as rows (R, D) of the patterns' width, in their dtype or a more precise one."""
    check_width(check_floats(query, "query"), "query", width, "the patterns'")
    return query.reshape(-1, width).to(torch.promote_types(query.dtype, dtype))


def rows_without(which: int | Sequence[int] | Tensor, patterns: Tensor) -> Tensor:
    """Which of the patterns (N, D) are kept, (N,), if some are removed: their indices, or a boolean mask (N,)."""
    count = len(patterns)
    index = torch.as_tensor(which, device=patterns.device)
    if isinstance(which, Sequence) and not len(which):
        index = index.long()  # torch makes floats of an empty list
    kept = torch.ones(count, dtype=torch.bool, device=patterns.device)
    if index.dtype == torch.bool:
        if index.shape != kept.shape:
            raise ValueError(f"a mask of what to remove must have shape ({count},), got {tuple(index.shape)}")
        return kept & ~index
    if index.is_floating_point() or index.is_complex():
        raise TypeError(f"what to remove must be indices or a boolean mask, got {index.dtype}")
    wrong = index[(index < -count) | (index >= count)]
    if wrong.numel():
        raise IndexError(f"there are {count} patterns: cannot remove number {int(wrong.reshape(-1)[0])}")
    kept[index.reshape(-1).long()] = False
    return kept


def energy_of(
    rows: Tensor,
    conjugate: Tensor,
    omega: Regularizer,
    beta: float | Tensor,
    count: int,
    largest_norm: Callable[[], Tensor],
) -> Tensor:
    """The energy of states (R, D) in a memory, (R,), in double precision; see :class:`Memory`.

    Args:
        rows: the states.
        conjugate: (R,), Ω*(βXq).
        omega: the regularizer.
        beta: inverse temperature.
        count: the number of patterns.
        largest_norm: computes the largest norm of a pattern.
    """
    energy = rows.square().sum(-1) / 2
    if not omega.zero_at_vertices or omega.mass(count) != 1:
        return energy - conjugate / beta
    # max_Ω(s) − max_Ω(0) is at most the largest score, which is at most β M ‖q‖.
    least = omega.max(torch.zeros(count, dtype=torch.float64, device=rows.device))
    energy = energy + largest_norm().square() / 2 - (conjugate - least) / beta
    return energy + (energy.clamp_min(0) - energy).detach()  # rounding can make it slightly negative


def check_mass(omega: Regularizer, count: int, what: str) -> None:
    """Raise an error if Ω chooses more than ``count`` patterns; ``what`` names these in the error."""
    wanted, possible = omega.mass(2**40), omega.mass(count)
    if wanted is not None and bool(torch.as_tensor(wanted != possible, device="cpu").any()):
        raise ValueError(f"k must be at most the number of {what}, {count}, got {show(wanted)}")


def check_writable(in_file: bool) -> None:
    """Raise an error if the patterns of a memory are in a file."""
    if in_file:
        raise TypeError("patterns in a file are not changed: change the file and make a new memory")


def check_further_rows(given: Rows, name: str, held: Tensor) -> Tensor:
    """Check patterns or values, (M, D) or one of shape (D,), that are to be appended to those held, (N, D)."""
    if isinstance(given, (Tensor, np.ndarray)) and given.ndim == 1:
        given = given[None]
    new = check_rows(given, name).to(held)
    if new.shape[1] != held.shape[1]:
        raise ValueError(f"{name} must have width {held.shape[1]}, got shape {tuple(new.shape)}")
    return new


def check_rows(given: Rows, name: str) -> Tensor:
    """Check patterns or values, (N, D), finite; a NumPy array becomes a tensor."""
    if isinstance(given, np.ndarray):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            held = torch.from_numpy(np.asarray(given))
        if not isinstance(given, np.memmap):
            held = held.clone()
    elif isinstance(given, Tensor):
        held = check_floats(given, name)
    else:
        raise TypeError(f"{name} must be a tensor or a NumPy array, got {type(given).__name__}")
    if held.is_complex():
        raise TypeError(f"{name} must be real, got {held.dtype}")
    if held.dim() != 2 or 0 in held.shape:
        raise ValueError(f"{name} must have shape (N, D), neither of them 0, got {tuple(held.shape)}")
    if not held.is_floating_point() or not concrete(held):
        return held
    for first in range(0, len(held), Plan().columns):
        block = held.detach()[first : first + Plan().columns]
        if math.isfinite(block.sum().item()):  # the fast test: a sum with an entry that is not finite is not finite
            continue
        wrong = ~block.isfinite().all(-1)
        if bool(wrong.any()):
            raise ValueError(f"{name} must be finite: number {first + int(wrong.nonzero()[0])} is not")
    return held


def _normalized(rows: Tensor, how: Normalize) -> Tensor:
    """Rows scaled to norm 1 (sphere), or to mean 0 and variance 1 (layer); zeros if that is undefined."""
    if how is None:
        return rows
    if how == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    norm = norm if how == "sphere" else norm / rows.shape[-1] ** 0.5
    return rows / torch.where(norm > 0, norm, 1.0)

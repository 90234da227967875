"""Memory: patterns, an Ω and a temperature; what it does with a query follows from its energy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fenchel._checks import check_count
from fenchel._torch import concrete, tracks_forward
from fenchel.hopfield.certificates import Certificate, certify_associations, certify_patterns
from fenchel.hopfield.dynamics import check_beta, check_steps, check_tol, iterate, own, update
from fenchel.hopfield.implicit import attach
from fenchel.hopfield.margins import number
from fenchel.regularizers.base import Regularizer, check_omega, hold, show, simplified
from fenchel.regularizers.tsallis import Tsallis
from fenchel.streaming import patterns as streams
from fenchel.streaming.plan import Needs, Plan, Shapes, Step, plan
from fenchel.streaming.running_softmax import Stored

Rows = Tensor | np.ndarray[Any, Any]
Normalize = Literal["sphere", "layer"] | None


@dataclass(frozen=True)
class Retrieval:
    """What a memory recalled, as ``Memory.retrieve`` returns it. Leading dimensions are the queries'.

    Args:
        state: (…, D), where each query ended: its ``weights`` times the patterns.
        steps: (…), how many updates changed the state; 0 for a query that is a fixed point.
        converged: (…), whether the last update moved the state by no more than the tolerance.
    """

    state: Tensor
    steps: Tensor
    converged: Tensor
    _memory: Memory = field(repr=False)
    _before: Tensor = field(repr=False)
    _stamp: Sequence[tuple[Any, int]] = field(repr=False)

    @cached_property
    def weights(self) -> Tensor:
        """(…, N), the weights of the patterns in ``state``, differentiable. Computed when they are first asked for."""
        return self._source().weights(self._before)

    @cached_property
    def value(self) -> Tensor:
        """(…, V), the weights times the values: what is recalled if the memory has values, else the state."""
        memory = self._source()
        return self.state if memory.values is None else memory._recall(self._before)

    def _source(self) -> Memory:
        now = self._memory._stamp()
        same = len(now) == len(self._stamp)
        if not same or any(_differ(*pair) for pair in zip(now, self._stamp, strict=True)):
            raise RuntimeError(
                "the memory has changed since this was retrieved: ask for weights and value before it changes"
            )
        return self._memory


def _in_full_precision(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method without autocast: scores in half precision would lose the order of the patterns."""

    @wraps(method)
    def call(self: Memory, *args: Any) -> Tensor:
        device = self.patterns.device.type
        if not torch.is_autocast_enabled(device):
            return method(self, *args)
        with torch.autocast(device, enabled=False):
            return method(self, *args)

    return call


class Memory(nn.Module):
    r"""A Hopfield-Fenchel-Young network: an associative memory for any Ω.

    .. math:: E(q) = \tfrac12\|q\|^2 - \beta^{-1} \big(\Omega^*(\beta X q) - \Omega^*(0)\big) + \tfrac12 M^2

    with patterns X and their largest norm M, is never negative; the concave-convex procedure on it is
    :math:`q \leftarrow X^\top \operatorname{argmax}_\Omega(\beta X q)`. That is for an Ω over distributions that is
    zero at one-hot vectors, as Tsallis and norm entropies are; for any other Ω the two constants are left out, and the
    update is the same. Energies never increase along it. A sparse Ω retrieves whole patterns exactly, and
    :meth:`certify` says which, and from how far.

    Args:
        patterns: (N, D), finite. A tensor, which is copied: what happens to it later does not change the memory, and
            gradients reach it through the copy. An ``nn.Parameter`` is kept itself, and trained if it requires a
            gradient. A numpy array is copied, unless it is a ``memmap``: that is read a chunk at a time, never copied,
            left out of the ``state_dict`` and not written to.
        omega: the regularizer; ``Tsallis(1.5)`` by default. Of one value for all queries, along the N patterns.
        beta: inverse temperature, a positive number or a tensor with one value, copied; an ``nn.Parameter`` is trained.
        chunk_size: patterns to work on at a time, so that no matrix of queries × patterns is held. Exact all the same,
            in one pass a step, for entmax, normmax, k_subsets and softmax.
        values: (N, V), what is recalled in place of the patterns (hetero-association); of the kinds of ``patterns``.
        normalize: ``"sphere"`` scales patterns, and states before they are compared with them, to norm 1; ``"layer"``
            to mean 0 and variance 1. The energy, as a function of the scaled state, does not increase then either.

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
        if normalize not in (None, "sphere", "layer"):
            raise ValueError(f"normalize must be None, 'sphere' or 'layer', got {normalize!r}")
        self.normalize = normalize
        beta = check_beta(beta)
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"beta must be one number for the whole memory, got shape {tuple(beta.shape)}")
        hold(self, "beta", own(beta))
        self.in_file = isinstance(patterns, np.memmap)
        self._keep("patterns", patterns)
        if values is None:
            self.register_buffer("values", None)
        else:
            self._keep("values", values)
            if len(values) != len(self.patterns):
                raise ValueError(f"values must be as many as the patterns, {len(self)}, got {len(values)}")
        self._check_fit(len(self))
        self._plan("recall", self.patterns)  # refuses an Ω that needs all scores at once

    # -- what it holds ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many patterns are stored."""
        return self.patterns.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """What states are computed in, unless a query is more precise."""
        return self.patterns.dtype if self.patterns.is_floating_point() else torch.float32

    def add(self, patterns: Rows, values: Rows | None = None) -> None:
        """Store more patterns, (M, D) or one of (D,), behind those there are; with their values if it has values.

        Patterns that are a parameter become a new one, which an optimizer has to be told of.
        """
        self._check_writable()
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
        """Forget patterns: by their places, or by a boolean mask (N,), True = forget."""
        self._check_writable()
        index = torch.as_tensor(which, device=self.patterns.device)
        if isinstance(which, Sequence) and not len(which):
            index = index.long()  # no places: of no dtype either
        kept = torch.ones(len(self), dtype=torch.bool, device=self.patterns.device)
        if index.dtype == torch.bool:
            if index.shape != kept.shape:
                raise ValueError(f"a mask of what to remove must have shape ({len(self)},), got {tuple(index.shape)}")
            kept &= ~index
        else:
            if index.is_floating_point() or index.is_complex():
                raise TypeError(f"what to remove must be places or a boolean mask, got {index.dtype}")
            wrong = index[(index < -len(self)) | (index >= len(self))]
            if wrong.numel():
                raise IndexError(f"there are {len(self)} patterns: cannot remove number {int(wrong.reshape(-1)[0])}")
            kept[index.reshape(-1).long()] = False
        if not bool(kept.any()):
            raise ValueError("a memory must keep at least one pattern")
        self._check_fit(int(kept.sum()))
        for name in ("patterns", "values"):
            held = getattr(self, name)
            if held is not None:
                self._replace(name, held.detach()[kept] if isinstance(held, nn.Parameter) else held[kept])

    # -- what it does ----------------------------------------------------------------------------------

    @_in_full_precision
    def energy(self, query: Tensor) -> Tensor:
        """The energy of states (…, D), one value each; not negative for Tsallis and norm entropies."""
        omega = simplified(self.omega)
        entered = self._enter(query)
        count = len(entered)
        # In double precision: at a small β the conjugate is nearly log N, which leaves the difference no digits.
        rows = streams.tiled(entered, Plan().tile).double()
        chosen = self._plan("energy", rows)
        conjugate = streams.maximum(self._scaled(rows), self._stored("patterns", rows), omega, chosen)
        energy = rows.square().sum(-1) / 2
        mass = omega.mass(len(self))
        if omega.zero_at_vertices and mass == 1:
            # max_Ω(s) − max_Ω(0) is at most the largest score, which is at most β M ‖q‖.
            least = omega.max(torch.zeros(len(self), dtype=torch.float64, device=rows.device))
            energy = energy + self._largest_norm().square() / 2 - (conjugate - least) / self._beta(rows)
            energy = energy + (energy.clamp_min(0) - energy).detach()  # rounding can leave it a hair below zero
        else:
            energy = energy - conjugate / self._beta(rows)
        return energy[:count].to(entered.dtype).reshape(query.shape[:-1])

    def step(self, query: Tensor) -> Tensor:
        """One update of states (…, D): Xᵀ argmax_Ω(βXq)."""
        return self._recall(query, "patterns")

    @_in_full_precision
    def weights(self, query: Tensor) -> Tensor:
        """The weights that states (…, D) give to the patterns: argmax_Ω(βXq), (…, N), dense."""
        rows = self._enter(query)
        count, rows = len(rows), streams.tiled(rows, Plan().tile)
        exact = _exact(rows)
        chosen = self._plan("energy", exact)
        weights = streams.weights(self._scaled(exact), self._stored("patterns", exact), self.omega, chosen)
        return weights[:count].to(rows.dtype).reshape(*query.shape[:-1], len(self))

    def retrieve(
        self, query: Tensor, max_steps: int = 100, tol: float | None = None, *, implicit: bool = False
    ) -> Retrieval:
        """Update states until each of them stands still.

        A query stops when an update moves it by no more than ``tol · max(1, ‖state‖)``, and is left alone from then on.
        Patterns are reached exactly under a sparse Ω: an update then moves nothing at all. A query takes the
        same path alone and in a batch: without derivatives all products have one shape, so that no more than the last
        bit of a state can differ, and mostly none does; with derivatives states agree up to rounding.

        Differentiable through the updates; with ``implicit=True`` through the fixed point alone, by one linear system,
        in constant memory: right in the patterns, beta and the parameters of Ω, and zero in the query, which does not
        matter to where it ends. Queries that did not converge have no such derivative: an error. First order only.

        Args:
            query: (…, D).
            max_steps: the most updates to make.
            tol: 0 waits until states repeat to the last bit; by default eps^¾ of the dtype, 6e-6 in float32.
            implicit: whether to differentiate through the fixed point in place of the updates.

        Returns:
            ``.state``, ``.weights``, ``.value``, ``.steps`` and ``.converged``, for each query.
        """
        rows = self._check_query(query)
        check_steps(max_steps, 1)
        tol = check_tol(tol, rows.dtype)

        def step(states: Tensor) -> Tensor:
            return self._recall(states, "patterns")

        with torch.set_grad_enabled(torch.is_grad_enabled() and not implicit):
            path = iterate(step, rows, max_steps=max_steps, tol=tol, apart=True)
        state, before = path.state, path.before
        if implicit and torch.is_grad_enabled() and self._learns(query):
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
            self._stamp(),
        )

    def certify(self, associations: Tensor | None = None) -> Certificate:
        """What is retrieved exactly, and from how far: see :class:`Certificate`.

        Args:
            associations: boolean (A, N), sets of patterns that are to be recalled together, for an Ω that chooses k at
                once, or structures. Without them every pattern is certified on its own.
        """
        with torch.no_grad():
            beta = number(self.beta)
            if associations is None:
                return certify_patterns(self._read_on_host, len(self), self.omega, beta)
            return certify_associations(self._read_on_host, len(self), self.omega, beta, associations)

    def forward(self, query: Tensor) -> Tensor:
        """``step``."""
        return self.step(query)

    def extra_repr(self) -> str:
        shown = [f"{len(self)} × {self.patterns.shape[1]}", f"beta={show(self.beta)}"]
        if self.values is not None:
            shown.append(f"values={self.values.shape[1]}")
        shown += [f"{n}={v!r}" for n in ("chunk_size", "normalize") if (v := getattr(self, n)) is not None]
        return ", ".join(shown)

    # -- what they are made of -------------------------------------------------------------------------

    @property
    def _chunked(self) -> bool:
        return self.chunk_size is not None or self.in_file

    def _check_query(self, query: Tensor) -> Tensor:
        """Queries as rows (R, D), in the precision to compute in."""
        if not isinstance(query, Tensor):
            raise TypeError(f"query must be a torch.Tensor, got {type(query).__name__}")
        if not query.is_floating_point():
            raise TypeError(f"query must have a floating-point dtype, got {query.dtype}; convert with query.float()")
        width = self.patterns.shape[1]
        if query.dim() == 0 or query.shape[-1] != width:
            raise ValueError(
                f"query must have the patterns' width, {width}, along its last dimension, got shape "
                f"{tuple(query.shape)}"
            )
        self._check_fit(len(self))
        return query.reshape(-1, width).to(torch.promote_types(query.dtype, self.dtype))

    def _enter(self, query: Tensor) -> Tensor:
        """Queries as rows, normalised."""
        return _normalized(self._check_query(query), self.normalize)

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows * self._beta(rows)

    def _beta(self, rows: Tensor) -> float | Tensor:
        """β as a scalar, in the precision of rows, which it then does not change."""
        return self.beta.to(rows.dtype).reshape(()) if isinstance(self.beta, Tensor) else self.beta

    def _plan(self, step: Step, rows: Tensor) -> Plan:
        width = 2 * self.patterns.shape[1]
        needs = Needs(step, rows.dtype, by_chunks=self._chunked, columns=self.chunk_size)
        return plan(self.omega, Shapes(len(rows), len(self), width), rows.device, needs)

    def _stored(self, name: str, rows: Tensor) -> Stored:
        """The patterns, or values, as they are compared, in the precision of rows."""
        return Stored(getattr(self, name), lambda held: self._ready(held, name).to(rows.dtype))

    def _ready(self, held: Tensor, name: str) -> Tensor:
        """Patterns as they are compared: parameters and files are not normalised where they lie."""
        held = held if held.is_floating_point() else held.to(torch.float32)
        raw = isinstance(self.patterns, nn.Parameter) or self.in_file
        return _normalized(held, self.normalize) if raw and name == "patterns" else held

    def _read(self, size: int, name: str = "patterns") -> Iterator[tuple[int, Tensor]]:
        held = getattr(self, name)
        for first in range(0, len(self), size):
            yield first, self._ready(held[first : first + size], name)

    def _read_on_host(self, size: int) -> Iterator[tuple[int, Tensor]]:
        return ((first, block.detach().cpu()) for first, block in self._read(size))

    @_in_full_precision
    def _recall(self, query: Tensor, name: str = "values") -> Tensor:
        """argmax_Ω(βXq) times patterns, or values."""
        rows = self._enter(query)
        count, rows = len(rows), streams.tiled(rows, Plan().tile)
        if self._chunked or self._plain(rows):
            exact = _exact(rows)
            keys = self._stored("patterns", exact)
            values = keys if name == "patterns" else self._stored(name, exact)
            recalled = streams.recall(self._scaled(exact), keys, values, self.omega, self._plan("recall", exact))
        else:  # attention keeps little for the derivative
            held = self._stored("patterns", rows).all()
            what = held if name == "patterns" else self._stored(name, rows).all()
            recalled = update(rows, held, what, self.omega, self._beta(rows))
        return recalled[:count].to(rows.dtype).reshape(*query.shape[:-1], getattr(self, name).shape[1])

    def _plain(self, rows: Tensor) -> bool:
        """Whether no derivative is asked for: a query is then computed in one way, whatever the others are."""
        learns = torch.is_grad_enabled() and self._learns(rows)
        return not learns and not tracks_forward() and concrete(rows, self.patterns)

    def _largest_norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(block.double(), dim=-1).amax() for _, block in self._read(Plan().columns)]
        return torch.stack(norms).amax()

    def _learns(self, query: Tensor) -> bool:
        held = [*self.parameters(), *self.buffers()]
        return query.requires_grad or any(t.requires_grad for t in held)

    def _stamp(self) -> list[tuple[Any, int]]:
        """What weights depend on, and which version of it: settings, and tensors."""
        held = [*self.parameters(), *self.buffers()]
        numbers = [] if isinstance(self.beta, Tensor) else [self.beta]
        settings = [(each, 0) for each in (self.omega, self.normalize, *numbers)]
        return [*settings, *((t, 0 if t.is_inference() else t._version) for t in held)]

    def _check_fit(self, count: int) -> None:
        """Refuse an Ω that cannot choose among so many patterns."""
        for each in self.omega.modules():
            held = (*each.parameters(recurse=False), *each.buffers(recurse=False))
            if isinstance(each, Regularizer) and any(tensor.shape[:-1].numel() > 1 for tensor in held):
                raise ValueError(
                    f"omega must be one for all queries, got {each!r}: its tensors may only have the dimension of the "
                    "patterns, the last"
                )
        omega, _ = self.omega.canonical()
        try:
            omega.dims(torch.empty(count, device="meta"), -1)
        except ValueError as error:
            raise ValueError(f"omega must choose along one dimension, the {count} patterns: {error}") from None
        wanted, possible = omega.mass(2**40), omega.mass(count)
        if wanted is not None and bool(torch.as_tensor(wanted != possible, device="cpu").any()):
            raise ValueError(f"k must be at most the number of patterns, {count}, got {show(wanted)}")

    def _check_writable(self) -> None:
        if self.in_file:
            raise TypeError("patterns lie in a file, which is not written to: change it and build the memory anew")

    def _keep(self, name: str, given: Rows) -> None:
        held = _as_rows(given, name)
        _check_finite(held, name)
        if isinstance(held, nn.Parameter):
            self.register_parameter(name, held)
        elif isinstance(given, np.memmap):
            self.register_buffer(name, held, persistent=False)
        else:
            held = held if held.is_floating_point() else held.to(torch.get_default_dtype())
            held = _normalized(held, self.normalize) if name == "patterns" and not self.in_file else held
            self.register_buffer(name, held.clone() if held is given else held)

    def _joined(self, name: str, given: Rows) -> Tensor:
        """What is held and more of it."""
        held: Tensor = getattr(self, name)
        if isinstance(given, (Tensor, np.ndarray)) and given.ndim == 1:
            given = given[None]
        new = _as_rows(given, name).to(held)
        _check_finite(new, name)
        if new.shape[1] != held.shape[1]:
            raise ValueError(f"{name} must have width {held.shape[1]}, got shape {tuple(new.shape)}")
        if isinstance(held, nn.Parameter):
            return torch.cat([held.detach(), new.detach()])
        return torch.cat([held, _normalized(new, self.normalize if name == "patterns" else None)])

    def _replace(self, name: str, new: Tensor) -> None:
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
        # As many patterns as were saved: room is made for them first.
        for name in ("patterns", "values"):
            held, saved = getattr(self, name), state_dict.get(prefix + name)
            if self.in_file or not isinstance(held, Tensor) or not isinstance(saved, Tensor):
                continue
            if saved.dim() == 2 and saved.shape[0] != held.shape[0] and saved.shape[1] == held.shape[1]:
                self._replace(name, held.detach().new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.normalize is not None and not self.in_file and not isinstance(self.patterns, nn.Parameter):
            # What was saved normalised stays as it is, to the last bit.
            scaled, eps = _normalized(self.patterns, self.normalize), torch.finfo(self.patterns.dtype).eps
            if not torch.allclose(scaled, self.patterns, rtol=64 * eps, atol=64 * eps):
                self.patterns = scaled


def _differ(now: tuple[Any, int], then: tuple[Any, int]) -> bool:
    number = isinstance(now[0], (float, str)) and now[0] == then[0]
    return now[1] != then[1] or not (number or now[0] is then[0])


def _as_rows(given: Rows, name: str) -> Tensor:
    if isinstance(given, np.ndarray):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            held = torch.from_numpy(np.asarray(given))
        if not isinstance(given, np.memmap):
            held = held.clone()
    elif isinstance(given, Tensor):
        held = given
        if not held.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {held.dtype}; convert with {name}.float()")
    else:
        raise TypeError(f"{name} must be a tensor or a numpy array, got {type(given).__name__}")
    if held.is_complex():
        raise TypeError(f"{name} must be real, got {held.dtype}")
    if held.dim() != 2 or 0 in held.shape:
        raise ValueError(f"{name} must have shape (N, D), neither of them 0, got {tuple(held.shape)}")
    return held


def _check_finite(held: Tensor, name: str) -> None:
    if not held.is_floating_point() or not concrete(held):
        return
    size = Plan().columns
    for first in range(0, len(held), size):
        block = held.detach()[first : first + size]
        if math.isfinite(block.sum().item()):  # one look at most of them: nothing that is not finite has a finite sum
            continue
        wrong = ~block.isfinite().all(-1)
        if bool(wrong.any()):
            raise ValueError(f"{name} must be finite: number {first + int(wrong.nonzero()[0])} is not")


def _exact(rows: Tensor) -> Tensor:
    """In float32 or better: scores in half precision would lose the order of the patterns."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _normalized(rows: Tensor, how: Normalize) -> Tensor:
    """Rows on the unit sphere, or with mean 0 and variance 1; what has no direction stays zero."""
    if how is None:
        return rows
    if how == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    norm = norm if how == "sphere" else norm / rows.shape[-1] ** 0.5
    return rows / torch.where(norm > 0, norm, 1.0)

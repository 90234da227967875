"""Structure: a set of 0/1 vectors with an oracle that finds the one with the highest score, for SparseMAP.

A user's structure is a subclass with one method, ``map``. What else may be overridden:

* ``event_dim``: how many trailing dimensions of the scores are parts (1 by default);
* ``higher``: the higher-order score of structures, a differentiable function of the structure's own tensors;
* ``fixed_dims``: over how many trailing dimensions all structures have equally many parts, so that an offset of these
  scores changes nothing (0 by default);
* ``marginals``: SparseMAP's answer, where there is a closed form;
* ``rows``: the same structure for some rows of a batch, where its own tensors differ from row to row;
* ``transition_dims``, ``transitions`` and ``with_transitions``: the tensor behind ``higher``, if it is one; in a factor
  graph it then gets gradients;
* ``least``, ``key`` and ``regularizer``: what is known of all structures, of equal sets, and of an equal Ω.

Whatever the batch, ``map`` is given scores (B, parts) when the library calls it; ``higher`` takes structures with any
leading dimensions.

Built-in structures write ``oracle`` instead, which works on plain arrays and says which parts are chosen; ``map``
follows from it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fenchel._checks import broadcasts, check_floats
from fenchel._torch import concrete, on_cpu, readable
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.rows import apply_mask

M = TypeVar("M", bound=nn.Module)

Array = np.ndarray[Any, Any]

Oracle = Callable[[Array, Array], tuple[Array, Array]]
"""``oracle(scores, rows)``: the best structure of some rows of scores (R, parts), float64, −inf where forbidden.

Returns the places of its ones, int32 (n, L), filled up with −1, and its higher-order score, float64 (n,), which is
−inf where no structure is allowed and NaN where it is not known what is best.
"""


class Layers(NamedTuple):
    """Structures as paths through T layers of W nodes each, as ``kernels/cpu/structures/layers.py`` reads them.

    Args:
        parts: (T, W), int32, the part that a node stands for; −1 if none, −2 if there is no such node.
        begin: (W + 1,), int64: the edges that leave node w are begin[w], …, begin[w + 1] − 1, in every layer.
        ends: (E,), int64, the nodes of the next layer that edges lead to.
        kinds: (E,), int64, which of a layer's C scores an edge has.
        bonus: (R or 1, T − 1 or 1, C), float64, the scores of edges.
        final: (R or 1, W), bool, where paths may end.
    """

    parts: Array
    begin: Array
    ends: Array
    kinds: Array
    bonus: Array
    final: Array


class Sums(NamedTuple):
    """Sums of parts that all structures have within a bound.

    Args:
        groups: (G, L), int64, the parts of each sum, filled up with the number of parts.
        bounds: (G,), what the sum of a group is at most, or at least; NaN if it is the same for all structures.
        exact: whether mixtures are all that has these sums and entries between 0 and 1.
    """

    groups: Array
    bounds: Array
    exact: bool


class Structure(nn.Module):
    r"""A set :math:`\mathcal{Y}` of 0/1 vectors that a batched oracle can search.

    Subclass it and write ``map``; :class:`fenchel.SparseMAP` does the rest. The scores that ``map`` gets are finite,
    float64, of shape (B, parts): one flat batch dimension, whatever the dimensions of the batch, in every method of
    SparseMAP and in factor graphs. If parts are masked it is also given ``mask``, of the same shape, and must choose
    among the rest: what it returns is checked. A structure that never meets a mask may leave that argument out.

    Tensors that ``higher`` uses get their gradients, be they parameters, buffers or plain attributes.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.structures import Structure
        >>> class Runs(Structure):  # nothing, or one run of neighbours
        ...     def map(self, scores, mask=None):
        ...         n = scores.shape[-1]
        ...         runs = torch.stack([torch.arange(n).ge(i) & torch.arange(n).lt(j)
        ...                             for i in range(n) for j in range(i, n + 1)]).to(scores)
        ...         return runs[(scores @ runs.T).argmax(-1)]
        >>> fenchel.SparseMAP(Runs()).argmax(torch.tensor([0.6, -0.1, 0.7]))
        tensor([0.4667, 0.0333, 0.5667])
    """

    event_dim: int = 1
    """How many trailing dimensions of the scores are parts."""

    fixed_dims: int = 0
    """Over how many trailing dimensions all structures sum to the same, given the mask; 0 if they do not."""

    transition_dims: int | None = None
    """How many trailing dimensions of ``transitions`` belong to one row of a batch; None if ``higher`` is no function
    of one tensor, each entry of which counts at most about once."""

    least: int = 0
    """How many parts every structure has, where so many may be chosen; 0 if that is not known."""

    patience: int | None = None
    """How many structures SparseMAP tries before it looks at all of them at once, by ``layers``; None: never."""

    largest_graph: int = 10**8
    """Edges times nodes of the graph of ``layers``: one of more takes longer than trying structures."""

    @property
    def margin(self) -> float | None:
        """The lead over every other structure y′, in units of ½‖y − y′‖², at which SparseMAP returns y alone.

        1 where all structures have equally many parts (``fixed_dims``), else None: there the lead that is needed
        depends on the sizes, and ``SparseMAP.violation`` computes it.
        """
        return 1.0 if self.fixed_dims else None

    @property
    def has_higher(self) -> bool:
        """Whether structures have higher-order scores at all."""
        return type(self).higher is not Structure.higher

    @abstractmethod
    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """The highest-scoring structure, as zeros and ones of the shape of ``scores``.

        Args:
            scores: (…, parts); leading dimensions are batch, exactly one of them where the library calls a subclass.
            mask: boolean, broadcasts to ``scores``; True = may be chosen. Scores of −inf are masked too.
        """

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """The best structures; the same as ``map``."""
        return self.map(scores, mask)

    def higher(self, structures: Tensor) -> Tensor | None:
        """The higher-order score of structures (…, parts), one value each; None if there is none."""
        return None

    def marginals(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """SparseMAP's marginals in closed form, differentiable; None if there is no such form."""
        return None

    def transitions(self, shape: torch.Size) -> Tensor | None:
        """The tensor of higher-order scores, (…, own dimensions), for parts of a shape; None if they are not one."""
        return None

    def with_transitions(self, transitions: Tensor) -> Structure:
        """The same set of structures with other higher-order scores, of a shape as ``transitions`` returns."""
        raise NotImplementedError(f"{type(self).__name__} has no tensor of higher-order scores")

    def key(self) -> Hashable | None:
        """A hashable key: structures with equal keys are the same set. None if there is no such key."""
        return None

    def regularizer(self, count: int | None = None) -> Regularizer | None:
        """The Ω over vectors that SparseMAP over this structure is; None if it is none.

        Args:
            count: how many parts may be chosen, if that is the same in all rows.
        """
        return None

    def rows(self, batch: torch.Size, index: Tensor) -> Structure:
        """The same structure restricted to some rows of a batch of shape ``batch``, given by flat indices."""
        return self

    def check(self, shape: torch.Size) -> None:
        """Raise a ValueError if the shape of the scores does not fit."""

    def possible(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        """Which parts can be chosen at all, boolean, whatever the mask; None if all can."""
        return None

    def expand_target(self, target: Tensor, shape: torch.Size) -> Tensor:
        """Expand a target from a shorter form, such as heads of a tree, to zeros and ones like the scores."""
        return target

    def broken(self) -> Tensor | None:
        """Rows whose higher-order scores are NaN or +inf: boolean, broadcasts to the batch; None if none can be."""
        return None

    def explorer(self, batch: torch.Size, shape: torch.Size) -> tuple[Any, ...] | None:
        """A kernel for the whole search, the largest size of a structure, and the arguments; None if there is none."""
        return None

    def sums(self, shape: torch.Size) -> Sums | None:
        """Sums that mixtures keep, for parts of a shape; None where higher-order scores tell mixtures apart too."""
        if self.has_higher:
            return None
        length = shape[len(shape) - self.fixed_dims :].numel() if self.fixed_dims else 1
        groups = np.arange(shape.numel() if self.fixed_dims else 0).reshape(-1, length)
        return Sums(groups, np.full(len(groups), np.nan), exact=False)

    def layers(self, batch: torch.Size, shape: torch.Size, theta: Array) -> Layers:
        """The structures of rows of scores (R, parts) as paths through a layered graph, where they are such paths."""
        raise NotImplementedError(f"the structures of {type(self).__name__} are not paths")

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        """``map`` and ``higher`` on plain arrays, for scores of shape (*batch, *shape)."""

        def best(scores: Array, rows: Array) -> tuple[Array, Array]:
            chosen = self.rows(batch, torch.from_numpy(rows))
            theta = torch.from_numpy(scores[rows]).reshape(-1, *shape)
            allowed = theta > -torch.inf
            masked = {} if bool(allowed.all()) else {"mask": allowed}
            y = chosen.map(torch.where(allowed, theta, 0.0), **masked)
            _check_structures(y, theta, self)
            bonus = chosen.higher(y.to(theta.dtype))
            h = np.zeros(len(rows)) if bonus is None else bonus.detach().double().expand(len(rows)).numpy().copy()
            if bool(((y != 0) & ~allowed).any()):
                raise ValueError(
                    f"{type(self).__name__}.map chose a part that is masked or has a score of −inf: it must respect "
                    "its mask, or no structure is allowed and the row is infeasible"
                )
            return places(y), h

        return best


class Searched(Structure):
    """A structure whose oracle works on plain arrays; ``map`` is made from it."""

    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return best(self, scores, mask)


class Problem:
    """Scores on the CPU laid out for an oracle: rows of float64, −inf where nothing may be chosen.

    ``bad`` are the rows with NaN or +inf, ``live`` those that can be solved: not bad, and with something to choose.

    Args:
        structure: what is searched.
        scores: (…, parts).
        mask: boolean, broadcasts to the scores.
    """

    def __init__(self, structure: Structure, scores: Tensor, mask: Tensor | None) -> None:
        check_shape(structure, scores)
        # The first also raises an error if the memory of a tensor was freed, before torch reads it.
        if not concrete(scores, *own_tensors(structure)) and not readable(scores):
            raise RuntimeError(
                f"{type(structure).__name__} cannot be compiled, exported or mapped by vmap: how long it runs depends "
                "on the scores; leading dimensions are batch, so pass them at once"
            )
        self.structure, self.scores = structure, scores
        event = structure.event_dim
        self.batch, self.shape = scores.shape[:-event], scores.shape[-event:]
        kept = torch.where(free_parts(structure, scores, mask), scores.detach().double(), -torch.inf)
        self.theta: Array = kept.reshape(self.batch.numel(), self.shape.numel()).numpy()
        self.bad: Array = np.isnan(self.theta).any(-1) | (self.theta == np.inf).any(-1)
        broken = structure.broken()
        if broken is not None:
            self.bad = self.bad | broken.expand(self.batch).reshape(-1).numpy()
        empty = (self.theta == -np.inf).all(-1)
        self.bad &= ~empty
        self.live: Array = np.flatnonzero(~(self.bad | empty))

    def check_feasible(self, rows: Array, bonus: Array) -> None:
        """Raise a ValueError if there are rows in which no structure is allowed."""
        stuck = np.flatnonzero(bonus == -np.inf)
        if stuck.size:
            at = tuple(int(i) for i in np.unravel_index(int(rows[stuck[0]]), self.batch)) if self.batch else ()
            raise ValueError(
                f"{type(self.structure).__name__} is infeasible: no structure is allowed by the mask and the scores of "
                f"−inf in {stuck.size} of {self.theta.shape[0]} rows, the first at batch index {at}"
            )

    def dense(self, rows: Array, parts: Array) -> Tensor:
        """Structures as zeros and ones of the shape of the scores; NaN in bad rows, zero in empty ones."""
        y = np.zeros((self.theta.shape[0], self.theta.shape[1] + 1), dtype=np.float32)
        y[rows[:, None], parts] = 1.0  # −1 is the extra column
        y[self.bad] = np.nan
        return torch.from_numpy(y[:, :-1]).reshape(self.scores.shape).to(self.scores.dtype)


def best(structure: Structure, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """The highest-scoring structure for any batch dimensions: NaN in rows with NaN or +inf, zero in empty ones."""
    if isinstance(scores, Tensor) and not scores.is_cpu:
        return best(*copied(structure, scores, mask)).to(scores.device)
    problem = Problem(structure, scores, mask)
    live = problem.live
    if live.size == 0:
        return problem.dense(live, np.zeros((0, 1), np.int32))
    with torch.no_grad():
        parts, bonus = structure.oracle(problem.batch, problem.shape)(problem.theta, live)
    problem.check_feasible(live, bonus)
    return problem.dense(live, parts)


def copied(structure: Structure, scores: Tensor, mask: Tensor | None) -> tuple[Structure, Tensor, Tensor | None]:
    """A structure, scores and a mask in the CPU's memory; gradients go back to the tensors that they are copies of."""
    plain, (given, *rest) = module_on_cpu(structure, scores, *(() if mask is None else (mask,)))
    return plain, given, rest[0] if rest else None


def module_on_cpu(module: M, *tensors: Tensor) -> tuple[M, tuple[Tensor, ...]]:
    """A module and tensors in the CPU's memory, differentiable, copied together; the module itself if it is there."""
    own = own_tensors(module)
    found = on_cpu(*tensors, *own)
    count = len(tensors)
    if not all(t.is_cpu for t in own):
        module = copy.deepcopy(module, {id(old): new for old, new in zip(own, found[count:], strict=True)})
    return module, found[:count]


def own_tensors(structure: nn.Module) -> list[Tensor]:
    """Parameters, buffers and plain attributes of a structure, those in its lists, tuples and dicts too."""
    found: dict[int, Tensor] = {}
    values: list[object] = [*structure.parameters(), *structure.buffers()]
    for module in structure.modules():
        values += vars(module).values()
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict)):
            values += value.values() if isinstance(value, dict) else value
    return list(found.values())


def check_shape(structure: Structure, scores: Tensor) -> None:
    """Check scores for a structure: floating point, of a shape that fits."""
    check_floats(scores, "scores")
    event, name = structure.event_dim, type(structure).__name__
    if scores.dim() < event:
        raise ValueError(f"scores must have at least {event} dimensions for {name}, got shape {tuple(scores.shape)}")
    if 0 in scores.shape[-event:]:
        raise ValueError(f"scores must not be empty along their parts, got shape {tuple(scores.shape)} for {name}")
    structure.check(scores.shape)


def free_parts(structure: Structure, scores: Tensor, mask: Tensor | None) -> Tensor:
    """Which parts may be chosen: not masked, not −inf, and possible for the structure."""
    free = scores.detach() != -torch.inf
    if mask is not None:
        apply_mask(scores, mask)  # for its checks
        free = free & mask
    possible = structure.possible(scores.shape, scores.device)
    return free if possible is None else free & possible


def check_batch(value: Tensor, trailing: int, batch: Sequence[int], name: str, shape: torch.Size) -> None:
    """Refuse a tensor whose leading dimensions do not broadcast to the batch."""
    if not broadcasts(value.shape[: value.dim() - trailing], batch):
        raise ValueError(
            f"{name} must have leading dimensions that broadcast to the batch of the scores, {tuple(batch)}: it has "
            f"shape {tuple(value.shape)}, the scores {tuple(shape)}"
        )


def _check_structures(y: Tensor, theta: Tensor, structure: Structure) -> None:
    """Check that a user's ``map`` returned zeros and ones of the shape of the scores."""
    name = type(structure).__name__
    if not isinstance(y, Tensor) or y.shape != theta.shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"{name}.map must return a tensor of the shape of its scores, {tuple(theta.shape)}, got {got}")
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"{name}.map must return zeros and ones")


def places(y: Tensor) -> Array:
    """Where structures (n, …) have their ones: int32 (n, L), filled up with −1."""
    ones = (y.detach().flatten(1) == 1).numpy()
    counts = ones.sum(-1)
    found = np.full((len(ones), max(int(counts.max(initial=0)), 1)), -1, dtype=np.int32)
    row, part = np.nonzero(ones)
    found[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = part
    return found

"""DynamicProgram: the methods that chains, alignments and lattices share."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fenchel._checks import check_count, check_floats, check_integers
from fenchel._torch import concrete, from_cpu, on_cpu
from fenchel.dp.calculus import Inputs, Recursion, stays_outside
from fenchel.dp.graph import Walk
from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.regularizers.tsallis import Hard, Shannon
from fenchel.structures.base import module_on_cpu

SHANNON = Shannon()
"""The Ω of programs for which none is given. It has no tensors, and one object serves all programs."""


@dataclass(frozen=True)
class Paths:
    """The most probable paths.

    Args:
        paths: (B, k, …), most probable first; blank (−1, or False in a lattice) where there is none left.
        probs: (B, k), their probabilities, padded with 0.

    Example:
        >>> import torch, fenchel
        >>> unary = torch.tensor([[[1.0, 0.0], [0.3, 0.0]]])
        >>> best = fenchel.dp.LinearChain(unary, torch.zeros(2, 2), omega=fenchel.Gini()).top(2)
        >>> best.paths, best.probs
        (tensor([[[0, 0],
                 [0, 1]]]), tensor([[0.6500, 0.3500]]))
    """

    paths: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Bounds:
    """Bounds of the score of the best path (of an alignment, of its cost).

    Args:
        lower: (B,).
        upper: (B,).

    Example:
        >>> import torch, fenchel
        >>> unary = torch.tensor([[[1.0, 0.0], [0.3, 0.0]]])
        >>> fenchel.dp.LinearChain(unary, torch.zeros(2, 2), omega=fenchel.Gini()).bounds()
        Bounds(lower=tensor([0.9225]), upper=tensor([1.4225]))
    """

    lower: Tensor
    upper: Tensor


class DynamicProgram(Recursion):
    r"""The best path through a graph, smoothed: Bellman's recursion with :math:`\max_\Omega` in place of max.

    =======================  ======================================================================================
    ``d.value``              the smoothed maximum over all paths, one value per batch element
    ``d.marginals``          the expected path, which is the gradient of ``value``; differentiable itself
    ``d.map()``              the path of highest score
    ``d.sample(n)``          paths of the random walk whose steps are the recursion's choices
    ``d.top(k)``             its k most probable paths, with their probabilities
    ``d.log_prob(path)``     the log-probability of a path
    ``d.entropy()``          Shannon's entropy of the walk, in nats
    ``d.cross_entropy(e)``   the mean of −log-probabilities under another program
    ``d.kl_divergence(e)``   cross-entropy less entropy: 0 where both have the same distribution
    ``d.loss(target)``       value − score of the target path: never negative
    ``d.walk``               the probabilities of the walk's steps; differentiable
    ``d.bounds()``           bounds of the score of the best path, from ``value``
    =======================  ======================================================================================

    With ``Shannon()`` paths have Gibbs probabilities, proportional to exp(score); with ``Gini()`` most have none.
    Any Ω over the simplex that is zero at one-hot vectors can be used: ``Hard``, ``Shannon``, ``Gini``, ``Tsallis``,
    ``Norm``, ``Custom`` of a function that is zero there, classes of your own with ``zero_at_vertices = True``, and γ
    times one of them. An Ω of your own may depend on the number of entries and on their order; one that is alone is
    chosen without asking Ω.

    Scores of −inf forbid what they belong to. Where nothing is left the value is −inf, marginals are zero and paths
    blank; a score that is NaN or +inf makes its batch element NaN, and no other. Sums are kept in double precision.

    ``value`` and ``marginals`` are computed once, when they are first read, and again only if a score or a parameter of
    Ω has been changed in place (with an Ω of your own, each time). Each result has a graph of its own:
    ``d.value.sum().backward()`` may be followed by ``d.marginals[0, 0, 0].backward()``. What they need is kept as long
    as the program.

    On the CPU, ``value``, ``marginals`` and their derivatives run in compiled kernels for Hard, Shannon, Gini and
    Tsallis(1.5), at any temperature; the rest, derivatives beyond the second, forward mode and what is mapped over (by
    ``vmap``, or ``torch.autograd.functional`` with ``vectorize=True``) in torch operations. ``torch.compile`` leaves
    programs as they are: its graph breaks there, and with ``fullgraph=True`` it raises an error, as does
    ``torch.export``.

    On CUDA and ROCm devices with Triton, ``value``, ``marginals``, ``loss`` and their derivatives are computed on the
    device, by kernels: ``LinearChain`` of up to 128 states and ``Alignment`` where the shorter series has up to 2048
    entries, for Shannon and Gini. For everything else scores on another device are copied to the CPU when the program
    is made (where there is a kernel, when such a method is called), in one copy per dtype, for which the device is
    waited for; later changes of a score in place are then not seen. Each result is copied to the device, its gradient
    to the CPU in the backward pass, and the gradients of the scores to the device.

    Example:
        >>> import torch, fenchel
        >>> d = fenchel.dp.LinearChain(torch.tensor([[[1.0, 0.0], [0.3, 0.0]]]), torch.zeros(2, 2))
        >>> d.map(), d.value, d.loss(d.map())
        (tensor([[0, 0]]), tensor([2.1676]), tensor([0.8676]))
    """

    lengths: Tensor
    _dtype: torch.dtype
    _device = torch.device("cpu")

    def __init__(self, scores: Tensor, name: str, shape: str, omega: Regularizer | None) -> None:
        check_floats(scores, name)
        if scores.dim() != shape.count(",") + 1 or 0 in scores.shape[1:]:
            raise ValueError(f"{name} must have shape {shape}, none empty but the batch, got {tuple(scores.shape)}")
        self.omega = SHANNON if omega is None else check_choice(omega)
        if scores.is_cpu and self._device.type != "cpu":
            self.omega, _ = module_on_cpu(self.omega)
        self._dtype = scores.dtype
        self._inputs = (scores if scores.dtype.itemsize >= 4 else scores.float(),)
        self._results, self._results_version = {}, None

    @property
    def value(self) -> Tensor:
        """The smoothed maximum over all paths, (B,)."""
        return self._returned(self._signed(self._max(self._dtype)))

    @property
    def marginals(self) -> Tensor:
        """The expected path: the probability that each state, cell or edge is on the path."""
        return self._returned(self._signed(self._expected_path()[0]))

    def exact_maximum(self) -> Tensor:
        """The smoothed maximum of the scores (for an alignment, minus costs), in double precision, on the CPU, (B,)."""
        return on_cpu(self._max())[0]

    @property
    @stays_outside
    def walk(self) -> Tensor:
        """The probability of each edge given the node that it leads to, which is where the walk is: it goes backwards.

        Zero for edges into nodes that no path reaches; differentiable.
        """
        return self._returned(self._in_torch(_steps)[0])

    @stays_outside
    def bounds(self) -> Bounds:
        r"""Bounds of the best path's score, computed from ``value`` alone; of its cost, for an alignment.

        .. math:: \mathrm{value} - \max_{\text{paths}} \sum_{v \in \text{path}} U_v
                  \;\le\; \max_{\text{paths}} \mathrm{score} \;\le\; \mathrm{value},
                  \qquad U_v = {\max_\Omega}(0, \dots, 0) = \max_p -\Omega(p)

        with as many zeros as node v has possible incoming edges. Proof: let x be the scores of a choice. Ω is zero at
        one-hot vectors, so max_Ω(x) ≥ max(x); and ⟨p, x⟩ ≤ max(x), so max_Ω(x) ≤ max(x) + U_v. By induction over the
        nodes, value v_Ω and best score v satisfy v ≤ v_Ω ≤ v + C, where C is U of the node plus the largest C of the
        nodes before it. The lower bound is attained where every choice is between equal values, the upper one
        where every choice has a lead of Ω's margin. Both have the derivatives of ``value``; γ also enters the lower.

        Returns:
            Their ``lower`` and ``upper``, (B,).

        References: Mensch & Blondel (2018), who multiply the largest U by the number of nodes.
        """
        upper, slack = self._max(), self._in_torch(_slack)[0]
        return Bounds(*map(self._returned, self._ordered(upper - slack, upper)))

    @stays_outside
    @torch.no_grad()
    def map(self) -> Tensor:
        """The path of highest score; blank where no path is possible."""
        here = self._on_cpu()
        walk = here._walk(here._inputs, Hard())
        return here._path(walk.best(), walk.value > -torch.inf)[0].to(self._device)

    @stays_outside
    @torch.no_grad()
    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw n paths of each batch element: (n, B, …), blank where no path is possible.

        Args:
            n: the number of paths.
            generator: of the random numbers; torch's default if None.
        """
        n = check_count(n, "n")
        here = self._on_cpu()
        walk = here._walk(here._inputs, here.omega)
        return here._path(walk.sample(n, generator), walk.value > -torch.inf).to(self._device)

    @stays_outside
    @torch.no_grad()
    def top(self, k: int) -> Paths:
        """The k most probable paths, most probable first; for a sparse Ω the list ends where the support does."""
        k = check_count(k, "k")
        here = self._on_cpu()
        edges, logs = here._walk(here._inputs, here.omega).top(k)
        paths = here._path(edges, logs > -torch.inf)  # a probability may underflow to 0
        return Paths(paths.transpose(0, 1).to(self._device), self._returned(torch.nan_to_num(logs.exp(), 0.0).t()))

    @stays_outside
    def log_prob(self, path: Tensor) -> Tensor:
        """The log-probability of paths (…, B, …) under the random walk; −inf off its support, and for blank ones."""
        here = self._on_cpu()
        path, known = here._beside(path)
        blank = here._blank(path)
        here._check_path(known, "path", blank)
        total = here._total(path, here._walk(here._inputs, here.omega).log_probs())
        return self._returned(torch.where(blank, -torch.inf, total))

    @stays_outside
    def entropy(self) -> Tensor:
        """Shannon's entropy, in nats, of the distribution over paths, (B,)."""
        here = self._on_cpu()
        return self._returned(here._walk(here._inputs, here.omega).entropy())

    @stays_outside
    def cross_entropy(self, other: DynamicProgram) -> Tensor:
        """The mean over paths of −log-probability under another program of the same shape, in nats, (B,).

        +inf where a path with a probability here has none there, as sparse Ω allow; derivatives are then those of the
        remaining paths. Differentiable in both programs.

        Args:
            other: a program over the same paths, with the same lengths; Ω may be another one.

        Example:
            >>> import torch
            >>> from fenchel.dp import LinearChain
            >>> p, q = (LinearChain(torch.tensor([[[s, 0.0], [s, 0.0]]]), torch.zeros(2, 2)) for s in (1.0, 2.0))
            >>> p.cross_entropy(q), p.entropy() + p.kl_divergence(q)
            (tensor([1.3296]), tensor([1.3296]))
        """
        p, q = self._walks(other)
        return self._returned(p.cross_entropy(q), torch.promote_types(self._dtype, other._dtype))

    @stays_outside
    def kl_divergence(self, other: DynamicProgram) -> Tensor:
        """Kullback and Leibler's divergence from this distribution over paths to another one's, in nats, (B,).

        ``cross_entropy(other) − entropy()``, without its cancellation: never negative, exactly 0 for the same program,
        +inf where a path with a probability here has none there. Differentiable in both programs.

        Args:
            other: as in :meth:`cross_entropy`.

        Example:
            >>> import torch
            >>> from fenchel import Gini, Shannon
            >>> from fenchel.dp import LinearChain
            >>> unary, step = torch.tensor([[[2.0, 0.0], [0.0, 0.5]]]), torch.zeros(2, 2)
            >>> dense, sparse = (LinearChain(unary, step, omega=omega) for omega in (Shannon(), Gini()))
            >>> sparse.kl_divergence(dense), dense.kl_divergence(sparse)
            (tensor([0.1637]), tensor([inf]))
        """
        p, q = self._walks(other)
        return self._returned(p.divergence(q), torch.promote_types(self._dtype, other._dtype))

    def loss(self, target: Tensor) -> Tensor:
        """value − score of the target, never negative, one per batch element: the CRF's loss for a Shannon chain.

        Zero where the target leads by so much that it takes all; +inf for a target that is not possible. The gradient
        is the expected path less the target.
        """
        target, known = self._beside(target)
        self._check_path(known, "target", None)
        value, score = self._max(), self._reached(target)
        impossible = score == -torch.inf
        loss = torch.where(value == -torch.inf, 0.0, value) - torch.where(impossible, 0.0, score)
        loss = torch.where(impossible, loss, loss + (loss.clamp_min(0) - loss).detach())
        return self._returned(loss + torch.where(impossible, torch.inf, 0.0))

    def _copied(self, omega: Regularizer | None, *tensors: Any) -> Any:
        """The tensors that a program is made from where it is computed; results go to the device of the first.

        That is the device if there is a kernel for it, else the CPU. To be called before all else. What is not a tensor
        is returned as it is, to be checked later. Lengths on the meta device have no values: None takes their place.
        """
        for t in tensors:
            if isinstance(t, Tensor) and not t.is_cpu:
                break
        else:
            return tensors
        self._device = tensors[0].device if isinstance(tensors[0], Tensor) else torch.device("cpu")
        self._check_devices(*tensors)
        tensors = tuple(
            None if isinstance(t, Tensor) and t.is_meta and not t.is_floating_point() else t for t in tensors
        )
        scores = tuple(t for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
        omega = SHANNON if omega is None else omega
        if isinstance(omega, Regularizer) and scores and self._find(omega, scores) is not None:
            return tuple(each.to(self._device) if isinstance(each, Tensor) else each for each in tensors)
        found = iter(on_cpu(*(each for each in tensors if isinstance(each, Tensor))))
        return tuple(next(found) if isinstance(each, Tensor) else each for each in tensors)

    def _check_devices(self, *tensors: Any) -> None:
        """Check that tensors are on one device; integers and masks, which are copied anyway, may be on the CPU."""
        for t in tensors:
            wrong = isinstance(t, Tensor) and t.device != self._device and (t.is_floating_point() or not t.is_cpu)
            if wrong:
                raise ValueError(f"all tensors of a program must be on one device, got {self._device} and {t.device}")

    def _on_cpu(self) -> Self:
        if self._inputs[0].is_cpu:
            return self
        key = "on the CPU", torch.is_grad_enabled()
        if key not in self._cache():
            here = copy.copy(self)
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(here, name, value.cpu())
            here._inputs, here._results, here._results_version = on_cpu(*self._inputs), {}, None
            here.omega, _ = module_on_cpu(self.omega)
            self._results[key] = here
        found: Self = self._results[key]
        return found

    def _beside(self, path: Tensor) -> tuple[Tensor, Tensor]:
        """A path where the scores are, and the one to check: that of a meta tensor has no values that could be."""
        device = self._inputs[0].device
        if not isinstance(path, Tensor) or path.device == device:
            return path, path
        self._check_devices(path)
        here = on_cpu(path)[0].to(device)
        return here, path if path.is_meta else here

    def _returned(self, result: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A result in the dtype of the scores, on their device."""
        dtype = dtype or self._dtype
        return from_cpu(result if result.dtype is dtype else result.to(dtype), self._device)

    def _reached(self, target: Tensor) -> Tensor:
        """The score of a target, in double precision; max_Ω over all paths that agree with it if it is not complete."""
        return self._score(target)

    def _walks(self, other: DynamicProgram) -> tuple[Walk, Walk]:
        """The random walks of two programs over the same paths."""
        if type(other) is not type(self):
            raise TypeError(f"other must be a {type(self).__name__} as well, got {type(other).__name__}")
        mine, theirs = (tuple(each._inputs[0].shape) for each in (self, other))
        if mine != theirs:
            raise ValueError(f"other must have scores of the same shape, {mine}, got {theirs}")
        self._check_paths(other)
        p, q = self._on_cpu(), other._on_cpu()
        return p._walk(p._inputs, p.omega), q._walk(q._inputs, q.omega)

    def _forward(self, kernel: Any, inputs: Inputs, keep: bool) -> tuple[Tensor, Any]:
        value, walk = kernel.forward(inputs[0], self.lengths, *self._numbers, keep)
        return value, walk

    # -- what a subclass defines ---------------------------------------------------------------------

    def _signed(self, maximum: Tensor) -> Tensor:
        """A maximum of scores, or its gradient, with the sign that users expect: costs are minus scores."""
        return maximum

    def _ordered(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of a maximum of scores as users expect them: of costs, the other way round."""
        return lower, upper

    def _by_step(self, edges: Tensor) -> Tensor:
        """Probabilities of the edges (B, edges) in the shape of ``walk``."""
        return edges

    @abstractmethod
    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        """Edges (n, B, levels) of a walk as paths (n, B, …); blank where not ``possible`` (…, B)."""

    @abstractmethod
    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        """The sum over a path of values of the edges, (B, scores)."""

    @abstractmethod
    def _score(self, path: Tensor) -> Tensor:
        """The score of a path, in double precision."""

    @abstractmethod
    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        """Raise an error if this is not a path; elements that are ``blank`` (…, B) are not checked."""

    def _check_paths(self, other: DynamicProgram) -> None:
        """Raise an error unless another program, with scores of the same shape, is over the same paths."""
        mine, theirs = self.lengths, other.lengths
        if concrete(mine, theirs) and not bool((mine == theirs.to(mine.device)).all()):
            raise ValueError(f"other must have the same lengths, {mine.tolist()}, got {theirs.tolist()}")

    @abstractmethod
    def _blank(self, path: Tensor) -> Tensor:
        """Which paths (…, B) are blank, as ``sample`` and ``top`` return them where no path is possible."""


def sum_over_edges(values: Tensor, edges: Tensor) -> Tensor:
    """The sums of values (B, E) over the edges of paths (…, B, L); negative edges are padding."""
    none = edges < 0
    found = values.expand(*edges.shape[:-1], values.shape[-1]).gather(-1, edges.clamp_min(0))
    return torch.where(none, 0.0, found).sum(-1)


def _steps(program: Recursion, walk: Walk) -> Inputs:
    assert isinstance(program, DynamicProgram)
    return (program._by_step(walk.probs()),)


def _slack(_: Recursion, walk: Walk) -> Inputs:
    return (walk.slack(),)


def check_lengths(lengths: Tensor | None, scores: Tensor, name: str, sizes: tuple[int, ...], least: int = 1) -> Tensor:
    """Check the lengths of each batch element, (B,) for one size and (B, 2) for two; return them as int64.

    Args:
        lengths: integers; the sizes if None.
        scores: (B, …).
        name: of the scores, for errors.
        sizes: the longest lengths.
        least: the shortest length.
    """
    shape = (scores.shape[0], len(sizes))[: len(sizes)]
    if len(sizes) == 1:
        longest = torch.full(shape, sizes[0], device=scores.device)
    else:
        longest = torch.tensor(sizes, device=scores.device).expand(shape)
    if lengths is None:
        return longest
    lengths = check_integers(lengths, "lengths").to(scores.device)
    if lengths.shape != shape:
        raise ValueError(f"lengths must have shape {shape}, one row per batch element, got {tuple(lengths.shape)}")
    wrong = (lengths < least) | (lengths > longest)
    if concrete(lengths) and bool(wrong.any()):
        allowed = " and ".join(f"[{least}, {size}]" for size in sizes)
        raise ValueError(f"lengths must be in {allowed}, the shape of {name}, got {lengths[wrong][0].item()}")
    return lengths


def check_choice(omega: Regularizer) -> Regularizer:
    """Check the Ω of a program: over the simplex, zero at one-hot vectors, with one parameter for all choices."""
    base, gamma = check_omega(omega).canonical()
    for mass in (base.mass(1), base.mass(2)):
        if isinstance(mass, Tensor) or mass != 1:
            raise TypeError(
                "omega must be over the simplex, for every step of a path is one choice: use Hard, Shannon, Gini, "
                f"Tsallis, Norm or a multiple of one of them; got {omega}, whose choices do not sum to 1 for "
                "every number of entries"
            )
    if not base.zero_at_vertices:
        raise TypeError(
            "omega must be zero at one-hot vectors, so that the value is not below the score of the best path: Hard, "
            f"Shannon, Gini, Tsallis, Norm or a multiple of one of them; got {omega}. {_at_vertices(base)}"
        )
    for name, parameter in ((base.parameter_name, base.parameter), ("gamma", gamma)):
        if isinstance(parameter, Tensor) and parameter.numel() != 1:
            raise ValueError(
                f"omega must have one {name} for all choices, got a tensor of shape {tuple(parameter.shape)}"
            )
    return omega


def _at_vertices(omega: Regularizer) -> str:
    """A sentence on the values of an Ω at one-hot vectors, and on what to do about them."""
    values = []
    for n in (2, 3):
        try:
            with torch.no_grad():
                values += omega(torch.eye(n, dtype=torch.float64)).flatten().tolist()
        except Exception as error:
            return (
                f"It cannot be computed for {n} entries ({type(error).__name__}: {error}), but nodes differ in how "
                "many choices they have"
            )
    low, high = min(values), max(values)
    if high - low > 1e-12 or low != low:
        return f"Its values at one-hot vectors differ, from {low:g} to {high:g}: no constant can be subtracted"
    if abs(low) > 1e-12:
        return f"It is {low:g} there: subtract {low:g}"
    return (
        "Its value there is zero, but not every choice may be one-hot, or it does not say so: a class of your own sets "
        "zero_at_vertices = True"
    )

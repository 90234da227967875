"""Continuous attention: expected values under a density over time or over an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, MixtureSameFamily

from fenchel._checks import check_broadcast, check_count, check_floats, check_number, check_shape
from fenchel.continuous.basis import as_basis, grid_positions, word_positions
from fenchel.continuous.deformed import inverse_softplus
from fenchel.continuous.density import BetaGaussian
from fenchel.continuous.integrals import expected_functions
from fenchel.continuous.matrices import matrix_root
from fenchel.continuous.radial import check_one_alpha
from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.tsallis import Shannon


@dataclass(frozen=True)
class Focus:
    """The parameters of the attention densities of all heads.

    Args:
        loc: (…, heads, K, D): the centres μ of K densities.
        sigma: (…, heads, K, D, D): the Σ of their scores; double precision is best, even if ``loc`` has less.
        shares: (…, heads, K): the mixture weights of the K densities; None if K is 1.
        discrete: (…, heads, L): the discrete attention that the densities were matched to, if any.

    Example:
        >>> import torch
        >>> from fenchel.continuous import Focus
        >>> focus = Focus(torch.tensor([[[0.5]]]), torch.tensor([[[[0.01]]]]))  # one head, one density on the line
        >>> focus.loc.shape, focus.sigma.shape
        (torch.Size([1, 1, 1]), torch.Size([1, 1, 1, 1]))
    """

    loc: Tensor
    sigma: Tensor
    shares: Tensor | None = None
    discrete: Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """The result of continuous attention.

    Args:
        context: (…, width), the heads concatenated.
        weights: (…, heads, L): the weight of each value in the context. They may be negative and need not sum to 1:
            values are smoothed by the regression. With ``combined=True`` the discrete attention is added.
        focus: the parameters of the densities; means and covariances of densities that were given as such.
        alpha: the α of the densities of ``focus``.
        given: the densities that were given, with batch shape (…, heads), or (…) for one head.

    Example:
        >>> import torch
        >>> from fenchel.continuous import ContinuousAttention, GaussianBasis
        >>> attention = ContinuousAttention(GaussianBasis.line(32), alpha=2.0)
        >>> found = attention.attend(torch.randn(50, 16), loc=torch.tensor([0.5]), sigma=torch.tensor([[0.01]]))
        >>> found.context.shape, found.weights.shape, found.density.support_radius.shape
        (torch.Size([16]), torch.Size([1, 50]), torch.Size([1]))
    """

    context: Tensor
    weights: Tensor
    focus: Focus
    alpha: float
    given: Distribution | None = None

    @property
    def density(self) -> Distribution:
        """The density of each head, with batch shape (…, heads); a mixture if K > 1. One that was given is itself."""
        if self.given is not None:
            return self.given
        loc = self.focus.loc.to(torch.promote_types(self.focus.loc.dtype, torch.float32))
        root = matrix_root(self.focus.sigma.double()).to(loc.dtype)
        if self.focus.shares is None:
            return BetaGaussian(loc.squeeze(-2), root.squeeze(-3), alpha=self.alpha)
        members = BetaGaussian(loc, root, alpha=self.alpha)
        return MixtureSameFamily(Categorical(self.focus.shares), members, validate_args=False)


class Encoder(nn.Module):
    """Base class of modules that compute densities from a query; subclasses define ``forward``.

    It returns a ``Focus``, or a density with batch shape (…, heads) that has ``expectation(basis)``, such as
    ``Triangular`` or ``ScoreDensity``.

    Example:
        >>> import torch
        >>> from fenchel.continuous import ContinuousAttention, Encoder, Focus, GaussianBasis
        >>> class Middle(Encoder):  # the query (…, 1) is a time
        ...     def forward(self, query, positions, mask):
        ...         return Focus(query[..., None, None, :], torch.full((*query.shape[:-1], 1, 1, 1, 1), 0.01))
        >>> attention = ContinuousAttention(GaussianBasis.line(32), encoder=Middle())
        >>> attention(torch.randn(2, 50, 16), torch.rand(2, 1)).shape
        torch.Size([2, 16])
    """

    num_heads: int = 1
    reads_scores: bool = False
    """Whether the query holds one score per value, (…, L), and not a vector."""

    width: int | None = None
    """The width of the query, if it is a vector of a fixed width."""

    exact: bool = False
    """Whether densities are to have the covariances of the ``Focus``; else these are the Σ of their scores."""

    def forward(self, query: Tensor, positions: Tensor, mask: Tensor | None) -> Focus | Distribution:
        """The densities for a query, positions (…, L, D) of the values, and a mask (…, L), True for values."""
        raise NotImplementedError


@written_by("width", "dim", "num_heads", "components", "eps")
class PooledEncoder(Encoder):
    r"""Densities computed from a vector (…, width), such as a pooled document: :math:`\mu = \mathrm{sigmoid}(W_1 v)`.

    On the line :math:`\sigma^2 = \mathrm{softplus}(w_2^\top v)`. In more dimensions Σ = L Lᵀ with a lower triangular L
    whose diagonal is a softplus. With several components attention is multimodal; their weights are a softmax.

    The first densities are about as wide as the text. With σ² = softplus(0) ≈ 0.69 most of their mass would lie outside
    of [0, 1], where the value function extrapolates: of 280 words those at the ends had 34 times the average weight.

    Args:
        width: of the query v, (…, width).
        dim: D.
        num_heads: the number of heads, each with its own density.
        components: the number of densities in the mixture of each head.
        eps: a number ≥ 0 that is added to the variances.
        initial_width: w, the half-width of a truncated parabola (α = 2) for a query of zeros: σ² = ⅔ w³. None for
            σ² = softplus(0) on the line, σ = softplus(0) in more dimensions.

    Example:
        >>> import torch
        >>> from fenchel.continuous import PooledEncoder
        >>> PooledEncoder(16, num_heads=2)(torch.randn(3, 16), torch.rand(3, 50, 1), None).loc.shape
        torch.Size([3, 2, 1, 1])
    """

    width: int

    def __init__(
        self,
        width: int,
        *,
        dim: int = 1,
        num_heads: int = 1,
        components: int = 1,
        eps: float = 1e-6,
        initial_width: float | None = 0.4,
    ) -> None:
        super().__init__()
        self.width, self.dim = check_count(width, "width"), check_count(dim, "dim")
        self.num_heads, self.components = check_count(num_heads, "num_heads"), check_count(components, "components")
        self.eps = check_number(eps, "eps", 0, ends="[)")
        each = self.num_heads * self.components
        self.loc = nn.Linear(self.width, each * self.dim)
        self.spread = nn.Linear(self.width, each * self.dim * (self.dim + 1) // 2)
        self.shares = nn.Linear(self.width, each) if self.components > 1 else None
        if initial_width is not None:
            variance = check_number(initial_width, "initial_width", 0) ** 3 * 2 / 3
            first = inverse_softplus(variance if self.dim == 1 else math.sqrt(variance))
            with torch.no_grad():  # the first entries are the diagonal
                self.spread.bias.reshape(each, -1)[:, : self.dim].fill_(first)

    def forward(self, query: Tensor, positions: Tensor, mask: Tensor | None) -> Focus:
        check_shape(query, "query", "…", self.width)
        shape = (*query.shape[:-1], self.num_heads, self.components)
        loc = torch.sigmoid(self.loc(query)).reshape(*shape, self.dim)
        spread = self.spread(query).reshape(*shape, -1)
        if self.dim == 1:
            sigma = F.softplus(spread).unsqueeze(-1)
        else:
            rows, columns = torch.tril_indices(self.dim, self.dim, -1, device=query.device)
            # In double precision, because the product of a thin root may not be positive definite in less.
            spread = spread.double()
            root = torch.diag_embed(F.softplus(spread[..., : self.dim]))
            below = torch.zeros_like(root).flatten(-2)
            below = below.index_add(-1, rows * self.dim + columns, spread[..., self.dim :])
            root = root + below.reshape(root.shape)
            sigma = root @ root.mT
        shares = None if self.shares is None else torch.softmax(self.shares(query).reshape(shape), -1)
        return Focus(loc, sigma + self.eps * torch.eye(self.dim, dtype=sigma.dtype, device=sigma.device), shares)


@written_by("omega", "num_heads", "eps", "exact")
class MatchedEncoder(Encoder):
    r"""Densities matched to discrete attention p by its moments: :math:`\mu = \mathbb{E}_p[t]`, Σ = Cov_p[t].

    p is argmax_Ω of the query, which holds one score per value. The encoder has no parameters but those of Ω.

    Args:
        omega: Ω of the discrete attention; Shannon's if None.
        num_heads: the number of heads: the query is (…, num_heads, L), or (…, L) for one head.
        eps: a number ≥ 0 that is added to the variances, which are zero where p is one-hot.
        exact: whether the covariance of the density is matched; by default it is Σ of its score, as in the paper.

    Example:
        >>> import torch
        >>> from fenchel.continuous import MatchedEncoder
        >>> positions = torch.tensor([[0.25], [0.75]])
        >>> MatchedEncoder()(torch.zeros(2), positions, None).loc.flatten()
        tensor([0.5000])
    """

    reads_scores = True

    def __init__(
        self, omega: Regularizer | None = None, *, num_heads: int = 1, eps: float = 1e-6, exact: bool = False
    ) -> None:
        super().__init__()
        self.omega = Shannon() if omega is None else check_omega(omega)
        self.num_heads, self.eps = check_count(num_heads, "num_heads"), check_number(eps, "eps", 0, ends="[)")
        self.exact = exact

    def forward(self, query: Tensor, positions: Tensor, mask: Tensor | None) -> Focus:
        sizes = (positions.shape[-2],) if self.num_heads == 1 else (self.num_heads, positions.shape[-2])
        check_shape(query, "query (scores of the values)", "…", *sizes)
        scores = query.unsqueeze(-2) if self.num_heads == 1 else query
        p = self.omega.argmax(scores, mask=None if mask is None else mask.unsqueeze(-2))
        # Σ stays in double precision: if p has few non-zero entries, it is singular before eps is added.
        loc, sigma = _moments(p.double(), positions.double())
        loc = loc.to(p.dtype)
        sigma = sigma + self.eps * torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
        return Focus(loc.unsqueeze(-2), sigma.unsqueeze(-3), None, p)


def _moments(p: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Means (…, heads, D) and covariances (…, heads, D, D) of positions (…, L, D) under weights (…, heads, L)."""
    dim = positions.shape[-1]
    t = positions - 0.5  # centred at the middle of [0, 1], so that the difference of squares keeps its precision
    squares = (t.unsqueeze(-1) * t.unsqueeze(-2)).flatten(-2)
    found = p @ torch.cat([torch.ones_like(t[..., :1]), t, squares], -1)
    mass = found[..., :1]
    found = found[..., 1:] / torch.where(mass == 0, 1.0, mass)
    mean = found[..., :dim]
    second = found[..., dim:].reshape(*mean.shape, dim)
    return mean + 0.5, second - mean.unsqueeze(-1) * mean.unsqueeze(-2)


class Where(TypedDict, total=False):
    """The keyword arguments of ``ContinuousAttention.attend``."""

    loc: Tensor | None
    sigma: Tensor | None
    density: Distribution | None
    positions: Tensor | None
    shape: Sequence[int] | None


@written_by("basis", "alpha", "encoder", "combined", "ridge")
class ContinuousAttention(nn.Module):
    r"""Attention with a density: the context (…, width) is the expectation of a value function of time or space.

    .. math:: c = \mathbb{E}_p[V(t)], \qquad p = \operatorname{argmax}_p \; \mathbb{E}_p[f(t)] - \Omega_\alpha(p)

    V is the ridge regression of the values on a basis, f a quadratic score whose μ and Σ an encoder computes from the
    query. With α > 1 the density selects an interval or an ellipse. The coefficients of V are never computed: one
    weight per value is computed from the expected basis functions, and the rest costs as much as discrete attention.

    Args:
        basis: Gaussian functions of one or two dimensions; or another ``Basis``, or any module that returns ψ(t),
            (…, n), at points (…, 1), whose expectations are computed by quadrature.
        alpha: 1 for Gaussians, more for compact support.
        encoder: ``PooledEncoder(width)``, ``MatchedEncoder(omega)``, or another ``Encoder``; None if ``loc`` and
            ``sigma``, or a density, are passed to each call.
        combined: whether to add the context of the discrete attention that the encoder matched.
        ridge: λ of the regression. The paper's code has 0.01, with which words at the ends get up to four times the
            weight if a density reaches beyond them (30 functions, 280 words: 15.1 times the average in place of 3.6).

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> from fenchel.continuous import ContinuousAttention, GaussianBasis, MatchedEncoder, PooledEncoder
        >>> words, lengths = torch.randn(2, 50, 16), torch.tensor([50, 30])
        >>> mask = torch.arange(50) < lengths.unsqueeze(-1)
        >>> basis = GaussianBasis.line(32)
        >>> attention = ContinuousAttention(basis, alpha=2.0, encoder=PooledEncoder(16))
        >>> attention(words, words.amax(1), mask).shape  # query: a pooled vector
        torch.Size([2, 16])
        >>> both = ContinuousAttention(basis, encoder=MatchedEncoder(Gini()), combined=True)
        >>> both(words, torch.randn(2, 50), mask).shape  # query: scores of the words
        torch.Size([2, 16])

    References: Martins et al. (2020), sections 3 and 4.
    """

    def __init__(
        self,
        basis: nn.Module,
        alpha: float = 2.0,
        encoder: Encoder | None = None,
        *,
        combined: bool = False,
        ridge: float = 0.1,
    ) -> None:
        super().__init__()
        if not isinstance(basis, nn.Module):
            raise TypeError(f"basis must be a GaussianBasis or another module, got {type(basis).__name__}")
        if encoder is not None and not isinstance(encoder, Encoder):
            raise TypeError(f"encoder must be an Encoder, such as PooledEncoder(64), got {type(encoder).__name__}")
        if combined and encoder is None:
            raise ValueError("combined=True adds the discrete attention of an encoder: pass encoder=MatchedEncoder()")
        self.basis, self.encoder, self.combined = as_basis(basis), encoder, combined
        self.alpha, self.ridge = check_one_alpha(alpha, self.basis.dim), check_number(ridge, "ridge", 0)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}, combined={self.combined}, ridge={self.ridge:g}"

    def forward(
        self, values: Tensor, query: Tensor | None = None, mask: Tensor | None = None, **where: Unpack[Where]
    ) -> Tensor:
        """The context (…, width); arguments as in ``attend``."""
        return self.attend(values, query, mask, **where).context

    def attend(
        self,
        values: Tensor,
        query: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        loc: Tensor | None = None,
        sigma: Tensor | None = None,
        density: Distribution | None = None,
        positions: Tensor | None = None,
        shape: Sequence[int] | None = None,
    ) -> Attended:
        """The context, the weights and the densities.

        Args:
            values: (…, L, width); heads take equal parts of the width.
            query: the argument of the encoder.
            mask: boolean (…, L); True = there is a value. A row without values gives zeros.
            loc: μ, (…, D), in place of an encoder: one head, one density.
            sigma: Σ, (…, D, D), with ``loc``.
            density: in place of an encoder: one head with a density of batch shape (…) that has ``expectation(basis)``:
                ``BetaGaussian``, ``Triangular``, ``LocationScale`` or ``ScoreDensity``.
            positions: (…, L, D), the positions of the values; the middles of L cells of [0, 1] if None.
            shape: (h, w) for the L pixels of an image, row by row.
        """
        check_floats(values, "values", "…", "L", "width")
        sizes = tuple(values.shape[-2:-1]) if shape is None else tuple(shape)
        if math.prod(sizes) != values.shape[-2]:
            raise ValueError(f"the product of shape must be the number of values, {values.shape[-2]}, got {sizes}")
        solver = self.basis.weights(sizes, mask, positions, ridge=self.ridge)
        found = self._found(query, mask, loc, sigma, density, self._positions(sizes, mask, positions))
        expected = self._expected(found)
        focus = found if isinstance(found, Focus) else self._described(found)
        given = "query" if query is not None else "loc" if density is None else "density"
        check_broadcast(f"the batch dimensions of {given} and values", expected.shape[:-2], values.shape[:-2])
        heads = expected.shape[-2]
        if values.shape[-1] % heads:
            raise ValueError(f"values must have a width that {heads} heads divide, got {tuple(values.shape)}")
        weights = expected.to(values.dtype) @ solver.to(values.dtype).mT
        if self.combined:
            if focus.discrete is None:
                raise ValueError(
                    "combined=True needs an encoder that computes discrete attention, such as MatchedEncoder()"
                )
            weights = weights + focus.discrete.to(weights.dtype)
        if mask is not None:
            values = torch.where(mask.unsqueeze(-1), values, 0.0)
        parts = values.reshape(*values.shape[:-1], heads, -1).movedim(-2, -3)
        context = (weights.unsqueeze(-2) @ parts).squeeze(-2).flatten(-2)
        return Attended(context, weights, focus, self.alpha, None if isinstance(found, Focus) else found)

    def _described(self, density: Distribution) -> Focus:
        """The means and covariances of densities."""
        mean, covariance = density.mean, getattr(density, "covariance_matrix", None)
        if not density.event_shape:
            mean = mean.unsqueeze(-1)
        if covariance is None:
            covariance = density.variance.reshape(*mean.shape[:-1], 1, 1)
        focus = Focus(mean.unsqueeze(-2), covariance.unsqueeze(-3))
        return focus if self.encoder is not None else Focus(focus.loc.unsqueeze(-3), focus.sigma.unsqueeze(-4))

    def _expected(self, found: Focus | Distribution) -> Tensor:
        """Expected basis functions (…, heads, n)."""
        if not isinstance(found, Focus):
            if not hasattr(found, "expectation"):
                raise TypeError(
                    "density must have expectation(basis), as BetaGaussian, Triangular, LocationScale and ScoreDensity "
                    f"do; got {type(found).__name__}"
                )
            expected: Tensor = found.expectation(self.basis)
            return expected if self.encoder is not None else expected.unsqueeze(-2)
        expected = expected_functions(found.loc, found.sigma, self.basis, self.alpha)
        if found.shares is None:
            return expected.squeeze(-2)
        return (found.shares.unsqueeze(-2).to(expected.dtype) @ expected).squeeze(-2)

    def _positions(self, sizes: tuple[int, ...], mask: Tensor | None, positions: Tensor | None) -> Tensor:
        if positions is not None:
            return positions
        return grid_positions(sizes, self.basis.like) if mask is None or len(sizes) > 1 else word_positions(mask)

    def _found(
        self,
        query: Tensor | None,
        mask: Tensor | None,
        loc: Tensor | None,
        sigma: Tensor | None,
        density: Distribution | None,
        positions: Tensor,
    ) -> Focus | Distribution:
        """The densities of all heads: of the encoder, or as given."""
        if self.encoder is None:
            if query is not None or (loc is None) != (sigma is None) or (loc is None) == (density is None):
                raise ValueError("without an encoder pass loc and sigma, or a density, and no query")
            if loc is None or sigma is None:
                assert density is not None
                return density
            return Focus(loc.unsqueeze(-2).unsqueeze(-2), sigma.unsqueeze(-3).unsqueeze(-3))
        if query is None or loc is not None or sigma is not None or density is not None:
            raise ValueError("with an encoder pass a query, and neither loc and sigma nor a density")
        found: Focus | Distribution = self.encoder(query, positions, mask)
        if isinstance(found, Focus) and self.encoder.exact:
            matched = BetaGaussian.from_moments(found.loc, found.sigma, self.alpha)
            found = Focus(found.loc, matched.sigma, found.shares, found.discrete)
        return found

"""Distances between time series, and their means, by smoothed alignments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fenchel._checks import broadcasts, check_count, check_floats, check_integers, check_kind, check_positive
from fenchel._torch import concrete, from_cpu, on_cpu
from fenchel.dp.alignment import Alignment
from fenchel.dp.costs import Cost, squared_distances
from fenchel.dp.program import SHANNON
from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.structures.base import module_on_cpu


def dtw(
    x: Tensor,
    y: Tensor,
    gamma: float | Tensor = 1.0,
    omega: Regularizer | None = None,
    band: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    r"""Dynamic time warping with a smoothed minimum, on squared Euclidean distances.

    .. math:: {\min_{\gamma\Omega}}_{\text{alignments } A} \; \sum_{(i,j) \in A} \|x_i - y_j\|^2

    by the recursion of :class:`Alignment`: soft-DTW for ``Shannon()``, plain DTW for ``Hard()``. The smoothed minimum
    is below the minimum, and negative for series that are alike; :func:`dtw_divergence` is not.

    Args:
        x: (…, N, D), with one batch dimension or more; for series of numbers D is 1.
        y: (…, M, D), whose batch dimensions broadcast with those of x: ``dtw(x[:, None], y)`` compares every x with
            every y.
        gamma: the temperature; towards 0 it is plain DTW. A number, or a tensor that broadcasts with the batch
            dimensions, one temperature per pair; differentiable.
        omega: smooths every minimum; Shannon's if None.
        band: as in :class:`Alignment`.
        lengths: (…, 2), integers: how much of each x and each y there is; batch dimensions may be 1. All if None.

    Returns:
        One value per pair, of the shape that the batch dimensions broadcast to; differentiable in x and y.

    Example:
        >>> import torch, fenchel
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [0.1], [1.0], [2.0]])
        >>> fenchel.dp.dtw(x[None], y[None], omega=fenchel.Hard()), fenchel.dp.dtw(x[None], y[None], gamma=0.1)
        (tensor([0.0100]), tensor([0.0099]))
        >>> many = torch.stack([x, x + 1, x + 2])
        >>> fenchel.dp.dtw(many[:, None], many, omega=fenchel.Hard())
        tensor([[ 0.,  2., 10.],
                [ 2.,  0.,  2.],
                [10.,  2.,  0.]])

    References: Cuturi & Blondel (2017); Mensch & Blondel (2018), section 4.2.
    """
    return smoothed_dtw(x, y, gamma, omega, band, lengths)


def dtw_divergence(
    x: Tensor,
    y: Tensor,
    gamma: float | Tensor = 1.0,
    omega: Regularizer | None = None,
    band: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    r"""Smoothed DTW less its bias: zero for equal series, and not negative.

    .. math:: \mathrm{dtw}(x, y) - \tfrac12 \mathrm{dtw}(x, x) - \tfrac12 \mathrm{dtw}(y, y)

    For ``Hard()`` that is DTW itself. For ``Shannon()`` it is the soft-DTW divergence: Blondel, Mensch & Vert prove it
    not negative under conditions on the cost; for the squared distance we know of no proof, but in all our experiments
    it was positive, and what rounding leaves below zero is set to 0. For any other Ω the difference can fall below zero
    for series that differ little: of 384,000 random pairs of up to 10 points the lowest had −0.045 γ under ``Gini()``
    and −0.015 γ under ``Tsallis(1.5)``. There the positive part is taken, and such series count as equal.

    Arguments and result as in :func:`dtw`.

    Example:
        >>> import torch, fenchel
        >>> x, y = torch.tensor([[[0.0], [1.0], [2.0]]]), torch.tensor([[[0.0], [0.1], [1.0], [2.0]]])
        >>> fenchel.dp.dtw_divergence(x, y), fenchel.dp.dtw_divergence(x, x)
        (tensor([0.3410]), tensor([0.]))

    References: Blondel, Mensch & Vert (2021).
    """
    return smoothed_dtw(x, y, gamma, omega, band, lengths, normalize=True)


def barycenter(
    series: Tensor | Sequence[Tensor],
    *,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
    gamma: float = 1.0,
    omega: Regularizer | None = None,
    band: int | None = None,
    max_iter: int = 50,
    init: Tensor | None = None,
) -> Tensor:
    r"""The mean of a set of series under smoothed DTW, or the means of a batch of sets.

    .. math:: \min_z \sum_k \frac{w_k}{T_k} \, \mathrm{dtw}(z, x_k)

    Found by gradient descent (L-BFGS with line search), from the mean of the series stretched to one length. The
    problem is not convex: another start may lead elsewhere.

    Args:
        series: (…, K, T, D), sets of K series; for series of numbers D is 1. One set may also be a list of K tensors
            (T_k, D) or (T_k,).
        weights: (K,) or (…, K), not negative; all equal if None. Their sums are set to 1.
        lengths: (K,) or (…, K), how much of each series there is; all if None. For a tensor of series only.
        gamma: the temperature. Larger ones make the problem smoother, and the mean too.
        omega: smooths every minimum; Shannon's if None.
        band: as in :class:`Alignment`.
        max_iter: the largest number of steps of descent.
        init: (N, D) or (…, N, D), where to start; the mean has its length. T long if None. (N,) goes with a list of
            (T_k,).

    Returns:
        (…, N, D), one mean for each set; (N,) for a list of (T_k,). Without a graph.

    Example:
        >>> import torch, fenchel
        >>> bumps = torch.exp(-(torch.arange(12.0) - torch.tensor([[3.0], [7.0]])).square())
        >>> mean = fenchel.dp.barycenter(bumps.unsqueeze(-1), gamma=0.01)
        >>> mean.shape, mean.max() > 0.9  # one bump; the plain mean has two of half its height
        (torch.Size([12, 1]), tensor(True))

    References: Petitjean, Ketterlin & Gançarski (2011); Cuturi & Blondel (2017), section 3.
    """
    max_iter = check_count(max_iter, "max_iter")
    omega = _times_gamma(omega, gamma)
    padded, lengths, flat = _check_set(series, lengths)
    device = padded.device
    omega, (padded, lengths) = module_on_cpu(omega, padded.detach(), lengths)  # not once in every step of the descent
    *batch, many, longest, depth = padded.shape
    weights = _check_weights(weights, padded)
    if init is not None:
        init = _check_init(init, padded, flat).to(padded.device)
    with torch.inference_mode(False), torch.enable_grad():  # the descent has derivatives, whatever the caller wants
        sets = padded.double().clone().reshape(-1, many, longest, depth)
        found = padded.new_empty((len(sets), longest if init is None else init.shape[-2], depth))
        parts = (weights.clone().reshape(-1, many), lengths.clone().reshape(-1, many))
        starts = [None] * len(sets) if init is None else init.detach().double().clone().reshape(-1, *found.shape[1:])
        for i, (each, share, size, start) in enumerate(zip(sets, *parts, starts, strict=True)):
            mean = torch.einsum("k,ktd->td", share, _stretched(each, size)) if start is None else start
            found[i] = _descend(mean.clone(), each, share, size, omega, band, max_iter)
    found = found.reshape(*batch, *found.shape[1:]).to(device)
    return found.squeeze(-1) if flat else found


def smoothed_dtw(
    x: Tensor,
    y: Tensor,
    gamma: float | Tensor,
    omega: Regularizer | None,
    band: int | None,
    lengths: Tensor | None,
    cost: Cost = squared_distances,
    normalize: bool = False,
) -> Tensor:
    """``dtw``, or ``dtw_divergence`` if ``normalize``, for any cost: it maps (B, N, D) and (B, M, D) to (B, N, M)."""
    lengths = _check_pair(x, y, lengths)
    dtype = torch.promote_types(x.dtype, y.dtype)
    omega, each = _separated(omega, gamma)

    def exact(a: Tensor, b: Tensor, which: list[int]) -> Tensor:
        return _exact(a, b, None if lengths is None else lengths[..., which], omega, each, band, cost)

    value = exact(x, y, [0, 1])
    if not normalize:
        return from_cpu(value.to(dtype), x.device)
    difference = value - 0.5 * exact(x, x, [0, 0]) - 0.5 * exact(y, y, [1, 1])
    base, _ = omega.canonical()
    not_smoothed = not isinstance(base.margin, Tensor) and base.margin == 0
    if base.associative or not_smoothed:  # what is below zero is rounding: the gradient is right as it is
        difference = difference + (difference.clamp_min(0) - difference).detach()
    else:
        difference = difference.clamp_min(0)
    return from_cpu(difference.to(dtype), x.device)


def _exact(
    x: Tensor,
    y: Tensor,
    lengths: Tensor | None,
    omega: Regularizer,
    gamma: Tensor | None,
    band: int | None,
    cost: Cost,
) -> Tensor:
    """Smoothed DTW in double precision, on the CPU; gamma is None or a tensor that broadcasts with the batch."""
    if gamma is None:
        d, shape = _alignments(x, y, lengths, omega, band, cost)
        return 0.0 - d.exact_maximum().reshape(shape)  # and no −0
    # min_γΩ(c) = γ min_Ω(c/γ): kernels take one γ, and no gradient in it.
    try:
        x, y, lengths, shape = _expanded(x, y, lengths, gamma.shape)
    except RuntimeError:
        raise ValueError(
            f"gamma must broadcast with the batch dimensions of the series, {tuple(_broadcast(x, y, lengths))}, got "
            f"shape {tuple(gamma.shape)}"
        ) from None
    gamma = gamma.expand(shape).reshape(-1)
    costs = cost(x, y)
    infinite = costs.isinf()
    scaled = torch.where(infinite, costs, torch.where(infinite, 0.0, costs) / gamma.to(costs.device)[:, None, None])
    value = 0.0 - Alignment(scaled, lengths, omega, band).exact_maximum()
    infinite = value.isinf()
    (gamma,) = on_cpu(gamma)
    return torch.where(infinite, value, torch.where(infinite, 0.0, value) * gamma).reshape(shape)


def _descend(
    mean: Tensor, padded: Tensor, weights: Tensor, lengths: Tensor, omega: Regularizer, band: int | None, max_iter: int
) -> Tensor:
    """Descend from one mean (N, D) to a better one, by L-BFGS."""
    many, mean = len(padded), mean.requires_grad_()
    pairs = torch.stack([torch.full_like(lengths, len(mean)), lengths], -1)
    search = torch.optim.LBFGS([mean], max_iter=max_iter, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        search.zero_grad()
        each = _alignments(mean.expand(many, *mean.shape), padded, pairs, omega, band)[0].value
        total = (weights / lengths * each).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(cost)  # type: ignore[no-untyped-call]
    return mean.detach()


def _alignments(
    x: Tensor,
    y: Tensor,
    lengths: Tensor | None,
    omega: Regularizer,
    band: int | None,
    cost: Cost = squared_distances,
) -> tuple[Alignment, torch.Size]:
    """One alignment per pair, flattened, and the shape that the batch dimensions broadcast to."""
    x, y, lengths, shape = _expanded(x, y, lengths)
    return Alignment(cost(x, y), lengths, omega, band), shape


def _expanded(
    x: Tensor, y: Tensor, lengths: Tensor | None, others: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor | None, torch.Size]:
    """Series (B, N, D) and (B, M, D) of all pairs, their lengths (B, 2), and the batch dimensions that B stands for."""
    shape = _broadcast(x, y, lengths, others)
    if lengths is not None:
        lengths = lengths.expand(*shape, 2).reshape(-1, 2)
    x, y = (each.expand(*shape, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (x, y))
    if lengths is not None:  # values after the end may be NaN
        x, y = (_cut(each, lengths[:, i]) for i, each in enumerate((x, y)))
    return x, y, lengths, shape


def _broadcast(x: Tensor, y: Tensor, lengths: Tensor | None, others: Sequence[int] = ()) -> torch.Size:
    """The shape that the batch dimensions of series and lengths, and other dimensions, broadcast to."""
    pairs = () if lengths is None else lengths.shape[:-1]
    shape: torch.Size = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        x.shape[:-2], y.shape[:-2], pairs, tuple(others)
    )
    return shape


def _cut(series: Tensor, lengths: Tensor) -> Tensor:
    """Series (B, N, D) with zeros after their ends."""
    there = torch.arange(series.shape[1], device=series.device) < lengths.to(series.device).unsqueeze(-1)
    return torch.where(there.unsqueeze(-1), series, 0.0)


def _times_gamma(omega: Regularizer | None, gamma: float | Tensor) -> Regularizer:
    """γΩ, where Ω is Shannon's if None."""
    omega = SHANNON if omega is None else check_omega(omega)
    return omega if isinstance(gamma, (float, int)) and gamma == 1 else gamma * omega


def _separated(omega: Regularizer | None, gamma: float | Tensor) -> tuple[Regularizer, Tensor | None]:
    """γΩ and None for a number γ; Ω and γ for a tensor."""
    if not isinstance(gamma, Tensor):
        return _times_gamma(omega, gamma), None
    each = check_positive(gamma, "gamma")
    assert isinstance(each, Tensor)
    return _times_gamma(omega, 1.0), each


def _check_series(series: Tensor, name: str, shape: str) -> None:
    """Check (…, N, D) with a batch dimension: two dimensions could be one series or many series of numbers."""
    check_floats(series, name)
    if series.dim() < 3:
        raise ValueError(
            f"{name} must have shape {shape}, three dimensions or more, got {tuple(series.shape)}: for one series "
            f"(N, D) pass {name}[None], for series of numbers (B, N) pass {name}[..., None]"
        )
    if 0 in series.shape[-2:]:
        raise ValueError(f"{name} must have shape {shape}, none empty but the batch, got {tuple(series.shape)}")


def _check_pair(x: Tensor, y: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Check series (…, N, D) and (…, M, D) and their lengths (…, 2); return the lengths as int64, or None."""
    _check_series(x, "x", "(…, N, D)")
    _check_series(y, "y", "(…, M, D)")
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"x and y must agree in D, their last dimension, got shapes {tuple(x.shape)} and {tuple(y.shape)}"
        )
    try:
        shape = _broadcast(x, y, None)
    except RuntimeError:
        raise ValueError(
            "x and y must have batch dimensions that broadcast, all but the last two, got shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        ) from None
    if lengths is None:
        return None
    lengths = check_integers(lengths, "lengths")
    if lengths.dim() != len(shape) + 1 or lengths.shape[-1] != 2 or not broadcasts(lengths.shape[:-1], shape):
        raise ValueError(
            f"lengths must have shape {(*shape, 2)}, a pair for each x and y, where batch dimensions may be 1, "
            f"got {tuple(lengths.shape)}"
        )
    return lengths.to(x.device)


def _check_set(series: Tensor | Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """Checked series (…, K, T, D), their lengths (…, K), and whether they were given as a list without D."""
    flat = False
    if not isinstance(series, Tensor):
        if lengths is not None:
            raise ValueError("lengths go with a tensor of series; those of a list are known")
        check_kind(series, "series", Sequence, what="a tensor or a list of tensors")
        if not series or not all(isinstance(each, Tensor) and each.dim() in (1, 2) and len(each) for each in series):
            raise ValueError("series must be a tensor or a list of tensors (length, D) or (length,), none empty")
        if len({(each.shape[1:], each.dtype) for each in series}) > 1:
            kinds = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in series)
            raise ValueError(f"series must agree in all but their lengths, got {kinds}")
        lengths = torch.tensor([len(each) for each in series], device="cpu")
        series = pad_sequence(list(series), batch_first=True)
        flat = series.dim() == 2
        series = series.unsqueeze(-1) if flat else series
    _check_series(series, "series", "(…, K, T, D)")
    *batch, many, longest, _ = series.shape
    if many == 0:
        raise ValueError(f"series must not be empty, got shape {tuple(series.shape)}")
    each = (*batch, many)
    if lengths is None:
        return series, torch.full(each, longest, device="cpu"), flat
    lengths = check_integers(lengths, "lengths")
    if lengths.dim() == 0 or lengths.shape[-1] != many or not broadcasts(lengths.shape, each):
        raise ValueError(f"lengths must have shape {each}, one per series, got {tuple(lengths.shape)}")
    if concrete(lengths) and bool(((lengths < 1) | (lengths > longest)).any()):
        raise ValueError(f"lengths must be in [1, {longest}], got {lengths.tolist()}")
    return series, lengths.to(series.device).expand(each), flat


def _check_weights(weights: Tensor | None, series: Tensor) -> Tensor:
    """Checked weights (…, K) that sum to 1."""
    each = series.shape[:-2]
    if weights is None:
        return torch.full(each, 1.0 / each[-1], dtype=torch.float64, device=series.device)
    check_floats(weights, "weights")
    weights = weights.detach().to(series.device).double()
    if weights.dim() == 0 or weights.shape[-1] != each[-1] or not broadcasts(weights.shape, each):
        raise ValueError(f"weights must have shape {tuple(each)}, one per series, got {tuple(weights.shape)}")
    total = weights.sum(-1, keepdim=True)
    if not bool((weights >= 0).all()) or not bool((total > 0).all()):
        raise ValueError(f"weights must be at least 0, and not all of them 0, got {weights.tolist()}")
    return (weights / total).expand(each)


def _check_init(init: Tensor, series: Tensor, flat: bool) -> Tensor:
    """A checked start (…, N, D)."""
    *batch, _, _, depth = series.shape
    check_floats(init, "init")
    full = init.unsqueeze(-1) if flat else init
    filled = full.dim() > 1 and full.shape[-2] > 0 and full.shape[-1] == depth
    if not filled or not broadcasts(full.shape[:-2], tuple(batch)):
        wanted = "(N,)" if flat else f"(N, {depth}) or {(*batch, 'N', depth)}"
        raise ValueError(f"init must have shape {wanted}, got {tuple(init.shape)}")
    return full.expand(*batch, *full.shape[-2:])


def _stretched(series: Tensor, lengths: Tensor) -> Tensor:
    """Series (K, T, D) stretched from their lengths to T, by linear interpolation."""
    size = series.shape[1]
    place = torch.linspace(0, 1, size, dtype=series.dtype, device=series.device) * (lengths - 1).unsqueeze(-1)
    left = place.floor().long()
    right = torch.minimum(left + 1, (lengths - 1).unsqueeze(-1))
    share = (place - left).unsqueeze(-1)

    def at(index: Tensor) -> Tensor:
        return series.gather(1, index.unsqueeze(-1).expand(-1, -1, series.shape[2]))

    return (1 - share) * at(left) + share * at(right)

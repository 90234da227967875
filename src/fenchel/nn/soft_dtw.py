"""A layer that compares series: soft-DTW, or its divergence, one value per pair."""

from __future__ import annotations

from torch import Tensor, nn

from fenchel._checks import check_count, check_flag, check_positive
from fenchel.dp.costs import Cost, cost_function
from fenchel.dp.program import check_choice
from fenchel.dp.series import smoothed_dtw
from fenchel.regularizers.base import Regularizer

_NO_CUDA = "there is no argument use_cuda here, as results are on the device of the series"


class SoftDTW(nn.Module):
    r"""Soft dynamic time warping between pairs of series: the smoothed minimum of the cost over all alignments.

    .. math:: -\gamma \log \sum_{\text{alignments } A} \exp\Big(-\tfrac1\gamma \sum_{(i,j) \in A} c(x_i, y_j)\Big)

    with ``Shannon()``, and ``min_{γΩ}`` by the recursion of :class:`fenchel.dp.Alignment` for any other Ω. Values can
    be negative; with ``normalize=True`` no negative one is known. O(N M) time per pair.

    The arguments are those of the package pytorch-softdtw-cuda without its first, ``use_cuda``: results are on the
    device of the series.

    Args:
        gamma: the temperature, a positive number, or a tensor (B,) with one per pair, which may be a parameter.
        normalize: True subtracts half of the values of x with itself and of y with itself:
            :func:`fenchel.dp.dtw_divergence`, which is 0 for equal series. Lengths may differ.
        bandwidth: the largest distance of a cell from the diagonal, the line between the corners of the table:
            :class:`fenchel.dp.Alignment`'s ``band``. None allows all cells, and 0 the diagonal alone. (In that package
            the cells with abs(i − j) ≤ bandwidth are allowed, so that series whose lengths differ by more have no
            alignment, and 0 means no band.)
        omega: smooths every minimum; ``Shannon()`` if None. With ``Gini()`` few cells are in the expected alignment.
        cost: of aligning two points: "sqeuclidean" (‖x − y‖²), "euclidean" (‖x − y‖), "l1" (Σ|x − y|), "cosine"
            (1 − cos), or a function of (B, N, D) and (B, M, D) that returns (B, N, M).

    Shape:
        - x: (B, N, D), y: (B, M, D); batch dimensions broadcast, so that ``module(x[:, None], y)`` compares all pairs.
        - lengths: (B, 2), integers: how much of each x and each y there is; all if None.
        - Output: (B,).

    Example:
        >>> import torch, fenchel
        >>> x, y = torch.tensor([[[0.0], [1.0], [2.0]]]), torch.tensor([[[0.0], [0.1], [1.0], [2.0]]])
        >>> fenchel.nn.SoftDTW()(x, y), fenchel.nn.SoftDTW(gamma=0.01)(x, y)
        (tensor([-1.5492]), tensor([0.0100]))
        >>> fenchel.nn.SoftDTW(normalize=True)(x, y), fenchel.nn.SoftDTW(normalize=True)(x, x)
        (tensor([0.3410]), tensor([0.]))

    References: Cuturi & Blondel (2017); Blondel, Mensch & Vert (2021).
    """

    gamma: float | Tensor

    def __init__(
        self,
        gamma: float | Tensor = 1.0,
        normalize: bool = False,
        bandwidth: int | None = None,
        *,
        omega: Regularizer | None = None,
        cost: str | Cost = "sqeuclidean",
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown:
            raise TypeError(
                f"SoftDTW takes gamma, normalize, bandwidth, omega and cost, got {', '.join(unknown)}"
                + (f": {_NO_CUDA}" if "use_cuda" in unknown else "")
            )
        if isinstance(gamma, bool):
            raise TypeError(f"gamma must be a positive number or a tensor, got {gamma}: {_NO_CUDA}; gamma is the first")
        given = check_positive(gamma, "gamma")
        if isinstance(given, Tensor) and not isinstance(gamma, nn.Parameter):
            self.register_buffer("gamma", given, persistent=False)
        else:
            self.gamma = gamma if isinstance(gamma, nn.Parameter) else given
        self.normalize = check_flag(normalize, "normalize")
        self.bandwidth = None if bandwidth is None else check_count(bandwidth, "bandwidth", 0)
        self.omega = None if omega is None else check_choice(omega)
        self.cost = cost
        self._cost = cost_function(cost)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The values of all pairs, (B,)."""
        return smoothed_dtw(x, y, self.gamma, self.omega, self.bandwidth, lengths, self._cost, self.normalize)

    def extra_repr(self) -> str:
        gamma = f"{self.gamma:g}" if isinstance(self.gamma, float) else tuple(self.gamma.shape)
        cost = repr(self.cost) if isinstance(self.cost, str) else getattr(self.cost, "__name__", repr(self.cost))
        return f"gamma={gamma}, normalize={self.normalize}, bandwidth={self.bandwidth}, cost={cost}"

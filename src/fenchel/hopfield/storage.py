"""How many patterns a memory can hold, and how much noise it tolerates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fenchel._checks import check_count, check_number, check_positive
from fenchel.hopfield.certificates import as_number, needed_lead
from fenchel.regularizers.base import Regularizer, check_omega


@dataclass(frozen=True)
class Capacity:
    r"""How many patterns a memory can hold so that each is retrieved in one update. Lower bounds, as logarithms.

    Args:
        angle: what must lie between any two patterns on the sphere, in radians: :math:`M^2(1 - \cos\theta) = m/\beta +
            2M\epsilon`.
        noise: the largest ε that patterns 60° apart can stand, :math:`M/4 - m/(2\beta M)`; negative if they are not
            even stationary.
        random_noise: the largest ε at which ``count`` patterns drawn at random are all retrieved with probability 1 −
            p: :math:`\frac{M}{2}(1 - \cos\frac{1}{\zeta}) - m/(2\beta M)` with :math:`\zeta^{D-1} = N^2 \kappa_{D-1} /
            (2p)`; negative if the bound does not even make them stationary, inf for a single pattern, None without a
            ``count``.
        log_equidistant: log of how many can be placed that far apart: :math:`\sqrt{2\pi D} \cos\theta /
            \sin^{D-1}\theta`, up to a factor that tends to 1 as D grows.
        log_random: log of how many can be drawn at random, so that all are retrieved with probability 1 − p:
            :math:`\sqrt{2p/\kappa_{D-1}}\, \theta^{-(D-1)/2}`. Holds for every D.

    Example:
        >>> import fenchel
        >>> found = fenchel.hopfield.capacity(64, 1.0, fenchel.Gini(), norm=8.0)
        >>> round(found.noise, 4), found.equidistant > 1e6
        (1.9375, True)
    """

    angle: float
    noise: float
    random_noise: float | None
    log_equidistant: float
    log_random: float

    @property
    def equidistant(self) -> float:
        """How many patterns can be placed; inf if that is no number of the machine."""
        return _exp(self.log_equidistant)

    @property
    def random(self) -> float:
        """How many patterns can be drawn at random."""
        return _exp(self.log_random)


def capacity(
    dim: int,
    beta: float,
    omega: Regularizer,
    *,
    norm: float = 1.0,
    noise: float = 0.0,
    failure: float = 0.01,
    count: int | None = None,
) -> Capacity:
    r"""How many patterns of one norm a memory retrieves exactly, in one update, from queries within ``noise`` of them.

    With ``count``, also the reverse: the noise from which that many patterns, drawn at random on the sphere, are
    retrieved. The number of patterns grows exponentially with the dimension. All are lower bounds, and loose: they use
    no more than ‖x_i − x_j‖ ≤ 2M.

    Args:
        dim: D, the width of a pattern, at least 2.
        beta: inverse temperature.
        omega: an Ω with a margin, for the simplex.
        norm: M, of every pattern.
        noise: ε, how far a query may be from its pattern.
        failure: p, the probability that patterns drawn at random are not all retrieved.
        count: N, how many patterns drawn at random ``random_noise`` is for.

    Example:
        >>> import fenchel
        >>> from fenchel.hopfield import capacity
        >>> found = capacity(64, beta=10.0, omega=fenchel.Tsallis(1.5), norm=2.0, noise=0.1)
        >>> round(found.angle, 4), round(found.noise, 4), f"{found.equidistant:.2g}", f"{found.random:.2g}"
        (0.5548, 0.45, '5.9e+18', '7.2e+07')
        >>> round(capacity(64, beta=10.0, omega=fenchel.Tsallis(1.5), norm=2.0, count=1_000_000).random_noise, 4)
        0.1453

    References: Santos et al. (2024), Proposition 3 and Equation 11; Brauchart et al. (2018) for patterns at random.
    """
    dim = check_count(dim, "dim", 2)
    norm = check_number(norm, "norm", 0)
    noise = check_number(noise, "noise", 0, ends="[)")
    failure = check_number(failure, "failure", 0, 1)
    lead = needed_lead(check_omega(omega), torch.ones(1, dtype=torch.long, device="cpu"))
    if lead is None or not math.isfinite(float(lead)):
        raise ValueError(f"omega must have a finite margin, as entmax with alpha > 1 and normmax do, got {omega}")
    needed = float(lead) / as_number(check_positive(beta, "beta"), "beta") / norm**2
    cosine = 1 - needed - 2 * noise / norm
    angle = math.acos(cosine) if cosine >= -1 else math.nan
    gamma = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)
    log_kappa = gamma - math.log(dim - 1) - math.log(math.pi) / 2
    apart = at_random = 0.0  # one pattern is always retrieved
    if 0 < cosine < 1:
        apart = math.log(2 * math.pi * dim) / 2 + math.log(cosine) - (dim - 1) * math.log(math.sin(angle))
    if -1 <= cosine < 1:
        at_random = (math.log(2 * failure) - log_kappa - (dim - 1) * math.log(angle)) / 2
    if cosine == 1:
        apart = at_random = math.inf
    random_noise = None
    if count is not None:
        # Two of N patterns are closer than an angle with probability at most κ/2 · N² times its power D − 1.
        log_angle = (math.log(2 * failure) - log_kappa - 2 * math.log(check_count(count, "count"))) / (dim - 1)
        within = math.inf if count == 1 else 1 - math.cos(min(math.exp(log_angle), math.pi))
        random_noise = norm / 2 * (within - needed)
    return Capacity(angle, norm / 4 - needed * norm / 2, random_noise, max(apart, 0.0), max(at_random, 0.0))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf

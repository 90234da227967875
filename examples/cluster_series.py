"""Cluster series: k-means in which the distance is the soft-DTW divergence and the mean a barycenter.

Twelve noisy series have one bump or two, at places that differ from series to series: a Euclidean distance tells the
places apart, an alignment the shapes. It prints:

    one bump   0 0 0 0 0 0
    two bumps  1 1 1 1 1 1
    bumps of the means  1 2
"""

import torch

from fenchel.dp import barycenter
from fenchel.nn import SoftDTW

generator = torch.Generator().manual_seed(0)
time = torch.arange(40.0)


def bump(place: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(time - place).square() / 8)


shift = 8 * torch.rand(12, 1, generator=generator)
series = torch.cat([bump(10 + shift[:6]), bump(6 + shift[6:]) + bump(22 + shift[6:])])
series = (series + 0.05 * torch.randn(12, 40, generator=generator)).unsqueeze(-1)  # (series, steps, 1)

distance = SoftDTW(gamma=0.05, normalize=True)
means = series[[0, 6]]
for _ in range(3):
    group = distance(series[:, None], means).argmin(-1)  # every series with every mean
    means = torch.stack([barycenter(series[group == k], gamma=0.05, max_iter=20) for k in range(2)])

print("one bump  ", *group[:6].tolist())
print("two bumps ", *group[6:].tolist())
high = means[..., 0] > 0.5
print("bumps of the means ", *(high[:, 1:] & ~high[:, :-1]).sum(-1).tolist())

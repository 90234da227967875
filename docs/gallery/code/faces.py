import torch
from fenchel.mixed import GaussianSparsemax

y = GaussianSparsemax(torch.zeros(3), scale=torch.ones(3))
values = y.rsample((1000,))
sizes = (values > 0).sum(-1)
print("on a vertex, an edge, inside:", [f"{(sizes == n).float().mean():.0%}" for n in (1, 2, 3)])

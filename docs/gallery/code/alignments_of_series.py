import torch, fenchel
from fenchel.dp import Alignment

x, y = torch.sin(torch.linspace(0, 6, 12)), torch.sin(torch.linspace(-0.5, 6, 10))
costs = (x[:, None] - y).square()[None]  # (pairs, steps of x, steps of y)
for omega in (fenchel.Shannon(), fenchel.Gini()):
    cells = Alignment(costs, omega=omega).marginals
    print(f"{omega}: {int((cells > 0).sum())} of {cells.numel()} cells may be on the path")

import torch
from fenchel.continuous import BetaGaussian

for alpha in (1.0, 1.5, 2.0):
    p = BetaGaussian(torch.tensor([0.0]), sigma=torch.tensor([[1.0]]), alpha=alpha)
    print(f"alpha {alpha}: zero beyond {p.support_radius.item():.3g}, entropy {p.entropy().item():.3f}")

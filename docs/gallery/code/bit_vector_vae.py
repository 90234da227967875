import torch
from fenchel.mixed import HardConcrete

bits = HardConcrete(torch.zeros(5, 2), temperature=0.5, stretch=1.2)
print(bits.rsample()[:, 1])  # exact zeros and ones, and something between

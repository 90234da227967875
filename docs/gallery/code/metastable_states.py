import torch, fenchel
from fenchel.hopfield import Memory

patterns = torch.nn.functional.normalize(torch.randn(200, 20), dim=-1)
for beta in (1.0, 4.0, 16.0):
    found = Memory(patterns, fenchel.Tsallis(1.5), beta=beta).retrieve(patterns)
    sizes = fenchel.support_size(found.weights).float()
    print(f"beta {beta:4}: states mix {sizes.mean():.1f} of 200 patterns on average")

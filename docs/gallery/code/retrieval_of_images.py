import torch, fenchel
from fenchel.hopfield import Memory
from sklearn.datasets import load_digits

images = torch.tensor(load_digits().data[:100], dtype=torch.float32) / 16
centred = images - images.mean(0)
half = centred.clone()
half[:, 32:] = 0  # the lower half is missing
found = Memory(centred, fenchel.Gini(), beta=4.0).retrieve(half)
print(f"{(found.weights.argmax(-1) == torch.arange(100)).float().mean():.0%} of the images found from their upper half")

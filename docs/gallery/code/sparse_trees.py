import torch, fenchel
from fenchel.structures import DependencyTree

torch.manual_seed(2)
arcs = torch.randn(5, 6)  # [word, head]; head 0 is the root
mixture = fenchel.SparseMAP(DependencyTree()).solve(arcs)
for tree, weight in zip(mixture.structures, mixture.weights, strict=True):
    if weight > 0.005:
        print(f"{weight:.2f}  heads {tree.argmax(-1).tolist()}")

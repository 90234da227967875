"""One query attends to five words: softmax spreads over all of them, sparse maps pick."""

import torch

import fenchel

words = ["the", "cat", "sat", "quietly", "down"]
scores = torch.tensor([0.1, 2.0, 1.4, -0.3, 0.2])
maps = {
    "softmax": fenchel.softmax(scores),
    "1.5-entmax": fenchel.entmax(scores, alpha=1.5),
    "sparsemax": fenchel.sparsemax(scores),
    "∞-normmax": fenchel.normmax(scores, alpha=torch.inf),
}
print(" " * 12 + "".join(f"{word:>9}" for word in words))
for name, p in maps.items():
    print(f"{name:<12}" + "".join(f"{v:9.3f}" if v else f"{'·':>9}" for v in p.tolist()))

"""A decoder reads five words, and none for longer than its fertility: what was spent on a word lowers its bound."""

import torch

import fenchel

words = ["<start>", "the", "cat", "sat", "<sink>"]
scores = torch.tensor([0.0, 0.7, 2.0, 1.3, -2.0])  # the same at every step: without bounds it would repeat itself
left = torch.tensor([0.5, 0.5, 1.0, 1.5, 9.0])  # how much attention each word may still receive
print(" " * 12 + "".join(f"{word:>9}" for word in words))
print(f"{'sparsemax':<12}" + "".join(f"{v:9.3f}" if v else f"{'·':>9}" for v in fenchel.sparsemax(scores).tolist()))
for step in range(1, 6):
    p = fenchel.constrained_sparsemax(scores, upper=left)
    print(f"step {step:<7}" + "".join(f"{v:9.3f}" if v else f"{'·':>9}" for v in p.tolist()))
    left = left - p

"""Semi-Markov segmentation on a lattice: where to cut a signal, with the probability of every cut.

Node i stands before sample i; an edge from i to j is a segment, scored by how flat the signal is inside it, less the
price of a segment. A path cuts the signal into segments of any length.
"""

import torch

from fenchel import Gini
from fenchel.dp import Lattice

signal = torch.tensor([0.1, 0.0, 0.2, 2.1, 1.9, 2.0, 2.2, 0.9, 1.1, 1.0])
n, price = len(signal), 0.3

pairs = torch.combinations(torch.arange(n + 1), 2)
sources, targets = pairs.unbind(-1)
spread = torch.stack([(signal[i:j] - signal[i:j].mean()).square().sum() for i, j in pairs.tolist()])

d = Lattice(sources, targets, -(4 * spread + price).unsqueeze(0), n + 1, omega=0.3 * Gini())

print("best cuts:", sources[d.map()[0]][1:].tolist())
top = d.top(5)
for path, probability in zip(top.paths[0], top.probs[0].tolist(), strict=True):
    if probability > 0:
        print(f"  {probability:.3f}  cuts at {sources[path][1:].tolist()}")
cuts = torch.zeros(n + 1).index_add(0, sources, d.marginals[0])[1:n]
print("probability of a cut before each sample:", [f"{p:.2f}" for p in cuts.tolist()])

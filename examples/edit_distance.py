"""Edit distance on a lattice: costs of edits that are learnt, since the expected number of each is the gradient.

Nodes are the cells of the table of prefixes; edges insert, delete, or replace a letter (for nothing if it stays).
"""

import torch

from fenchel import Hard, Shannon
from fenchel.dp import Lattice

first, second = "sparse", "space"
rows, columns = len(first) + 1, len(second) + 1

edges, kinds = [], []  # kinds: 0 insert, 1 delete, 2 replace, 3 keep
for i in range(rows):
    for j in range(columns):
        here = i * columns + j
        if j + 1 < columns:
            edges.append((here, here + 1))
            kinds.append(0)
        if i + 1 < rows:
            edges.append((here, here + columns))
            kinds.append(1)
        if i + 1 < rows and j + 1 < columns:
            edges.append((here, here + columns + 1))
            kinds.append(3 if first[i] == second[j] else 2)
sources, targets = torch.tensor(edges).unbind(-1)
kind = torch.tensor(kinds)

costs = torch.tensor([1.0, 1.0, 1.0, 0.0], requires_grad=True)
hard = Lattice(sources, targets, -costs[kind].unsqueeze(0), rows * columns, omega=Hard())
print(f"edit distance of {first!r} and {second!r}: {-hard.value.item():.0f}")
names = ["insert", "delete", "replace", "keep"]
print("edits:", [names[k] for k in kind[hard.map()[0]].tolist() if k != 3])

soft = Lattice(sources, targets, -costs[kind].unsqueeze(0), rows * columns, omega=0.3 * Shannon())
(counts,) = torch.autograd.grad(-soft.value.sum(), costs)
print("expected edits:", {name: round(count, 2) for name, count in zip(names, counts.tolist(), strict=True)})

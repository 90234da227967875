import torch, fenchel
from fenchel import factors

graph = fenchel.FactorGraph()
arcs = graph.variables(torch.randn(6, 7))  # [word, head]
graph.add(factors.DependencyTree(arcs))
for head in range(1, 7):
    graph.add(factors.Budget(arcs[:, head], 2))  # no word has more than two modifiers
graph.solve()
print(arcs.value)

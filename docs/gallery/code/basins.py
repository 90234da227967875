import torch, fenchel
from fenchel.hopfield import Memory

patterns = torch.tensor([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]])
queries = torch.tensor([[0.5, 0.1], [-0.2, 0.4], [0.0, -0.6]])
for omega in (fenchel.Shannon(), fenchel.Gini()):
    memory = Memory(patterns, omega, beta=3.0)
    found = memory.retrieve(queries)
    print(f"{omega}: energy {memory.energy(found.state)}, equal to a pattern:", (found.weights.amax(-1) == 1).tolist())

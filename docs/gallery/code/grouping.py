import torch, fenchel

scores = torch.tensor([0.1, 1.0, 0.9, 1.1, -0.5, 0.95])
print(fenchel.sparsemax(scores))
print(fenchel.fusedmax(scores, strength=0.2))  # neighbours share
print(fenchel.oscarmax(scores, strength=0.05))  # equals share, wherever they are

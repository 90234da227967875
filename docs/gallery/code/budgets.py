import torch, fenchel

scores = torch.tensor([2.0, 1.4, 0.2, 0.1, -0.3])
print(fenchel.constrained_sparsemax(scores, upper=torch.full((5,), 0.4)))  # nobody gets more than 0.4
print(fenchel.k_subsets(scores, k=2))  # two at once: weights in [0, 1] that sum to 2

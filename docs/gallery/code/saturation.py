import torch, fenchel

for alpha in (1.0, 1.25, 1.5, 2.0, 4.0):
    lead = fenchel.Tsallis(alpha).margin
    below = fenchel.entmax(torch.tensor([min(lead, 20.0) - 0.01, 0.0], dtype=torch.float64), alpha)
    print(f"alpha {alpha}: one-hot from a lead of {lead:.3g}; just below it, the other class has {below[1]:.1e}")

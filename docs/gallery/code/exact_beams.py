import torch, fenchel

logits = 4 * torch.randn(1000, 30)  # one row per step of a decoder
for alpha in (1.0, 1.5, 2.0):
    sizes = fenchel.support_size(fenchel.entmax(logits, alpha)).float()
    print(f"alpha {alpha}: {sizes.mean():.1f} of 30 continuations have probability")

import torch, fenchel

hidden, weight = torch.randn(64, 128), torch.randn(10_000, 128, requires_grad=True)
target = torch.randint(10_000, (64,))
loss = fenchel.linear_entmax_loss(hidden, weight, target)  # no matrix of 64 × 10,000
loss.backward()
print(f"{(weight.grad.abs().sum(-1) > 0).float().mean():.1%} of the words received a gradient")

"""Learn alpha per head: each head of an attention layer chooses between dense and sparse weights.

The target is the value of one key plus the mean of all values, so a sparse head and a dense one serve best. It prints:

    step   0  loss 1.51  alpha 1.51, 7.2 of 8 keys; alpha 1.49, 7.5 of 8 keys
    step 100  loss 0.28  alpha 1.59, 3.6 of 8 keys; alpha 1.71, 3.0 of 8 keys
    step 200  loss 0.14  alpha 1.56, 3.8 of 8 keys; alpha 1.89, 1.9 of 8 keys
"""

import torch

import fenchel

torch.manual_seed(0)
omega = fenchel.Tsallis(1.5, learnable=True, shape=(2, 1, 1))  # one alpha per head, in (1, 2)
layer = fenchel.nn.MultiheadAttention(16, 2, batch_first=True, omega=omega)
read = torch.nn.Linear(16, 4)
weights = [each for name, each in layer.named_parameters() if "alpha" not in name]
groups = [{"params": [*weights, *read.parameters()]}, {"params": omega.parameters(), "lr": 0.05}]
optimizer = torch.optim.Adam(groups, lr=5e-3)
for step in range(201):
    code, value = torch.randn(64, 8, 12), torch.randn(64, 8, 4)
    wanted = torch.randint(8, (64,))
    query = torch.cat([code[torch.arange(64), wanted], torch.zeros(64, 4)], -1).unsqueeze(1)
    output, weights = layer(query, *[torch.cat([code, value], -1)] * 2, average_attn_weights=False)
    target = value.mean(1) + value[torch.arange(64), wanted]
    loss = (read(output[:, 0]) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        alpha = omega.alpha.flatten().tolist()
        size = fenchel.support_size(weights).float().mean((0, 2)).tolist()
        heads = "; ".join(f"alpha {a:.2f}, {n:.1f} of 8 keys" for a, n in zip(alpha, size, strict=True))
        print(f"step {step:3d}  loss {loss:.2f}  {heads}")

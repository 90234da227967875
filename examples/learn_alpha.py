"""Let a classifier choose its own sparsity: alpha is trained with the weights."""

import torch
from sklearn.datasets import load_digits

import fenchel

torch.manual_seed(0)
images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
images = images.float() / 16
attend = fenchel.nn.Entmax(1.5, learnable=True)  # alpha stays inside (1, 2)
keys, values = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)
criterion = fenchel.nn.EntmaxLoss(1.5)
parameters = [*attend.parameters(), *keys.parameters(), *values.parameters()]
optimizer = torch.optim.Adam(parameters, lr=0.02)
for step in range(101):
    weights = attend(keys(images))  # each image chooses among 32 learned prototypes
    scores = values(weights)
    loss = criterion(scores, labels)
    if step % 25 == 0:
        accuracy = (scores.argmax(-1) == labels).float().mean()
        size = fenchel.support_size(weights).float().mean()
        print(
            f"step {step:3d}  loss {loss:.3f}  accuracy {accuracy:.3f}  "
            f"alpha {attend.omega.alpha.item():.3f}  prototypes used {size:.1f} of 32"
        )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

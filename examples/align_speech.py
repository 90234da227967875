"""Align speech frames: which frames of a recording belong to which phoneme, as text-to-speech models train on.

The scores are log-likelihoods of frames under one Gaussian per phoneme. `map()` is the alignment that Glow-TTS searches
for; with a smoothed maximum the durations are differentiable, and the means are trained through them. It prints:

    true durations  [4, 7, 3, 6]
    best alignment  [4, 7, 3, 6]
    expected        [4.0, 7.0, 2.9, 6.1]
    sparse          [4.0, 7.0, 3.0, 6.0]
    loss before and after training  4.69 0.02
"""

import torch

from fenchel import Gini
from fenchel.dp import Monotonic

generator = torch.Generator().manual_seed(1)
durations = torch.tensor([4, 7, 3, 6])
sounds = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.0, 0.0], [2.0, 2.0]])  # one vector per phoneme
frames = sounds.repeat_interleave(durations, 0) + 0.6 * torch.randn(20, 2, generator=generator)


def log_likelihood(means: torch.Tensor) -> torch.Tensor:
    """Scores (1, tokens, frames)."""
    return -0.5 * torch.cdist(means, frames).square().unsqueeze(0)


scores = log_likelihood(sounds)
print("true durations ", durations.tolist())
print("best alignment ", Monotonic(scores).durations(hard=True)[0].tolist())
print("expected       ", [round(d, 1) for d in Monotonic(scores).durations()[0].tolist()])
print("sparse         ", [round(d, 1) for d in Monotonic(scores, omega=Gini()).durations()[0].tolist()])

path = torch.arange(4).repeat_interleave(durations).unsqueeze(0)
means = torch.nn.Parameter(sounds + torch.randn(4, 2, generator=generator))
optimizer = torch.optim.Adam([means], lr=0.1)
losses = []
for _ in range(50):
    loss = Monotonic(log_likelihood(means)).loss(path).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss before and after training ", f"{losses[0]:.2f} {losses[-1]:.2f}")

"""An operator of your own: write Ω, get the map, its loss and its gradients. In this one neighbours hold together."""

import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

import fenchel


def omega(p: torch.Tensor) -> torch.Tensor:
    """Half the squared norm, as for sparsemax, plus a spring between neighbours."""
    return 0.5 * p.square().sum(-1) + 0.5 * p.diff().square().sum(-1)


springs = fenchel.Custom(omega)

scores = torch.tensor([0.1, 0.9, 0.3, -0.4, 0.8, -0.6], requires_grad=True)
loss = springs.loss(scores, torch.tensor(1))
loss.backward()
print("sparsemax ", [f"{v:.3f}" for v in fenchel.sparsemax(scores).tolist()])
print("springs   ", [f"{v:.3f}" for v in springs.argmax(scores).tolist()])
print(f"loss of class 1: {loss.item():.3f}, gradient", [f"{v:.3f}" for v in scores.grad.tolist()])

temperatures = torch.logspace(-1, 1, 200)
figure = Figure(figsize=(8, 3), layout="constrained")
for axes, (name, path) in zip(
    figure.subplots(1, 2, sharey=True),
    {"sparsemax": fenchel.Gini(), "with springs between neighbours": springs}.items(),
    strict=True,
):
    lines = axes.plot(temperatures, path.argmax(scores.detach() / temperatures[:, None]))
    axes.set(title=name, xscale="log", xlabel="temperature")
figure.axes[0].set_ylabel("probability")
figure.axes[1].legend(lines, [f"entry {i}: {s:.1f}" for i, s in enumerate(scores.tolist())], fontsize="small")
picture = Path(tempfile.gettempdir()) / "custom_omega.png"
figure.savefig(picture, dpi=150)
print("the paths as the temperature rises:", picture)

"""A Lightning module with an entmax loss, whose alpha is trained, saved and restored with the model.

Needs ``pip install lightning``. It prints:

    accuracy 0.87, 1.9 possible classes
    alpha per head: [1.54, 1.56, 1.55, 1.56]
"""

import logging
import tempfile
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fenchel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Digits(lightning.LightningModule):
    """A network that attends to the rows of a picture, with one learned alpha per head, and a sparse output."""

    def __init__(self) -> None:
        super().__init__()
        omega = fenchel.Tsallis(1.5, learnable=True, bounds=(1, 2), shape=(4, 1, 1))
        self.embed = nn.Linear(8, 32)
        self.attention = fenchel.nn.MultiheadAttention(32, 4, omega=omega, batch_first=True)
        self.output = nn.Linear(32 * 8, 10)
        self.loss = fenchel.nn.EntmaxLoss(1.5)  # in the place of nn.CrossEntropyLoss()

    def forward(self, pictures: Tensor) -> Tensor:
        rows = self.embed(pictures)
        return self.output((rows + self.attention(rows, rows, rows, need_weights=False)[0]).flatten(1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


lightning.seed_everything(0, verbose=False)
digits = load_digits()
pictures, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
model, data = Digits(), DataLoader(TensorDataset(pictures[:1500], labels[:1500]), batch_size=64, shuffle=True)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", **quiet)
    trainer.fit(model, data)
    trainer.save_checkpoint(Path(folder) / "digits.ckpt")
    restored = Digits.load_from_checkpoint(Path(folder) / "digits.ckpt").eval()
with torch.no_grad():
    scores = restored(pictures[1500:])
    p = fenchel.entmax(scores, 1.5)
    accuracy, possible = (p.argmax(-1) == labels[1500:]).float().mean(), (p > 0).sum(-1).float().mean()
    print(f"accuracy {accuracy:.2f}, {possible:.1f} possible classes")
    print("alpha per head:", [round(a, 2) for a in restored.attention.omega.alpha.flatten().tolist()])

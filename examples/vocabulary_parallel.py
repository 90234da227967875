"""Train a small language model whose output layer is spread over ranks (vocabulary parallelism).

    torchrun --nproc-per-node 2 examples/vocabulary_parallel.py

Each rank has a part of the vocabulary. The hidden states are equal on all ranks, so is the loss, and no rank ever has
the logits of all words.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel.distributed import entmax, linear_entmax_loss

TEXT = "the quick brown fox jumps over the lazy dog while the lazy dog dreams of the quick brown fox " * 8
CONTEXT = 8


class Model(nn.Module):
    """Predicts the next character from the last few."""

    def __init__(self, characters: int, ranks: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # what is not spread must be equal on all ranks
        self.embedding = nn.Embedding(characters, 16)
        self.body = nn.Linear(16 * CONTEXT, 64)
        whole = 0.1 * torch.randn(characters, 64)
        self.weight = nn.Parameter(torch.tensor_split(whole, ranks)[rank].clone())  # parts may differ in size

    def forward(self, context: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embedding(context).flatten(-2)))


def main() -> None:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    letters = sorted(set(TEXT))
    codes = torch.tensor([letters.index(c) for c in TEXT])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    context, target = windows[:, :-1], windows[:, -1]
    model = Model(len(letters), ranks, rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(101):
        loss = linear_entmax_loss(model(context), model.weight, target, alpha=1.5)
        optimizer.zero_grad()
        loss.backward()  # the gradient of the hidden states is summed over the ranks here
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        hidden = model(context)
        probabilities = entmax(F.linear(hidden, model.weight))  # this rank's part of the vocabulary
        support = (probabilities > 0).sum(-1).double().mean()
        dist.all_reduce(support)
    if rank == 0:
        print(
            f"{len(letters)} characters on {ranks} ranks; on average {support.item():.2f} have probability", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Sorting tokens by how often they came: sequences, and models that read them chunk by chunk with a memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fenchel
from fenchel.continuous import GaussianBasis, LongMemory
from fenchel.nn import ChunkOutput, ChunkState, LongMemoryAttention, MultiheadAttention
from fenchel.seq2seq.checkpoints import CHECKPOINT, Checkpoint, check_finite, step


@dataclass(frozen=True)
class Setting:
    """The task, the size of a model and its training.

    Args:
        tokens: in the vocabulary.
        length: of a sequence.
        chunk: the number of tokens that are read together.
        memory: the number of vectors that a layer remembers: tokens, compressed tokens or basis functions.
        rate_of_compression: tokens per vector of the compressive memory.
        contraction: of the long memory; None for equal shares.
        width: of vectors.
        heads: of attention.
        layers: of a model: the first has a memory, the others see what was written alone.
        batch: sequences per step.
        steps: of training.
        rate: of learning.
        penalty: the weight of the long memory's penalty in the loss.
    """

    tokens: int = 20
    length: int = 4000
    chunk: int = 256
    memory: int = 128
    rate_of_compression: int = 4
    contraction: float | None = 0.95
    width: int = 48
    heads: int = 4
    layers: int = 2
    batch: int = 16
    steps: int = 2000
    rate: float = 3e-3
    penalty: float = 1e-6


# -- sequences -------------------------------------------------------------------------------------------------------


def sequences(setting: Setting, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (count, length), and their tokens by falling frequency (count, tokens).

    A token is drawn from a mixture of two distributions, whose share moves from the first to the second in a straight
    line: what came last tells little about what came before.
    """
    first, last = torch.empty(2, count, setting.tokens).exponential_(generator=generator).unbind()
    first, last = first / first.sum(-1, keepdim=True), last / last.sum(-1, keepdim=True)
    share = torch.linspace(0, 1, setting.length)
    is_last = torch.rand(count, setting.length, generator=generator) < share
    draws = [torch.multinomial(p, setting.length, replacement=True, generator=generator) for p in (first, last)]
    tokens = torch.where(is_last, draws[1], draws[0])
    counts = torch.zeros(count, setting.tokens, dtype=torch.long).scatter_add(-1, tokens, torch.ones_like(tokens))
    return tokens, counts.argsort(dim=-1, descending=True, stable=True)


# -- models ----------------------------------------------------------------------------------------------------------


class RecentAttention(nn.Module):
    """Causal attention to a chunk (B, L, D) and to the ``recent`` inputs before it; what is older is forgotten."""

    def __init__(self, width: int, heads: int, recent: int) -> None:
        super().__init__()
        self.recent = recent
        self.attention = MultiheadAttention(width, heads, batch_first=True, omega=fenchel.Shannon())

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output, and a penalty of zero."""
        inputs = x if state is None else torch.cat([state, x], 1)
        return _causal(self.attention, x, inputs), x.new_zeros(len(x))

    def remember(self, x: Tensor, state: Tensor | None) -> Tensor:
        """The inputs to remember."""
        return (x if state is None else torch.cat([state, x], 1))[:, -self.recent :]


class CompressiveAttention(nn.Module):
    """The same with a second memory: old inputs are averaged, ``rate`` of them to one vector.

    Args:
        width: of vectors.
        heads: of attention.
        recent: the number of inputs, and of averages, that are remembered.
        rate: inputs per average.
    """

    def __init__(self, width: int, heads: int, recent: int, rate: int) -> None:
        super().__init__()
        self.recent, self.rate = recent, rate
        self.attention = MultiheadAttention(width, heads, batch_first=True, omega=fenchel.Shannon())

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """The output, and a penalty of zero."""
        return _causal(self.attention, x, torch.cat([*(state or ()), x], 1)), x.new_zeros(len(x))

    def remember(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """The averages and inputs to remember."""
        averages, recent = (x[:, :0], x[:, :0]) if state is None else state
        inputs = torch.cat([recent, x], 1)
        old = max(0, inputs.shape[1] - self.recent) // self.rate * self.rate
        new = inputs[:, :old].reshape(len(x), old // self.rate, self.rate, x.shape[-1]).mean(2)
        return torch.cat([averages, new], 1)[:, -self.recent :], inputs[:, old:]


class LongAttention(nn.Module):
    """The same with a long memory for what is not recent."""

    def __init__(self, memory: LongMemory, recent: int) -> None:
        super().__init__()
        self.attention = LongMemoryAttention(memory, recent=recent)

    def forward(self, x: Tensor, state: ChunkState | None) -> tuple[Tensor, Tensor]:
        """The output, and the penalty."""
        found: ChunkOutput = self.attention(x, state)
        return found.output, found.penalty

    def remember(self, x: Tensor, state: ChunkState | None) -> ChunkState:
        """The state for the next chunk."""
        return self.attention.remember(x, state)


def _causal(attention: MultiheadAttention, x: Tensor, inputs: Tensor) -> Tensor:
    size, total = x.shape[1], inputs.shape[1]
    hidden = torch.ones(size, total, dtype=torch.bool).triu(total - size + 1)
    output: Tensor = attention(x, inputs, inputs, need_weights=False, attn_mask=hidden)[0]
    return output


def _short(setting: Setting) -> nn.Module:
    return RecentAttention(setting.width, setting.heads, 2 * setting.memory)


def _compressive(setting: Setting) -> nn.Module:
    return CompressiveAttention(setting.width, setting.heads, setting.memory, setting.rate_of_compression)


def _long(setting: Setting, **options: Any) -> nn.Module:
    basis = GaussianBasis.line(setting.memory, widths=(2 / setting.memory, 8 / setting.memory))
    options = {"contraction": setting.contraction, "prior": 0.3} | options
    memory = LongMemory(basis, setting.width, setting.heads, alpha=1.0, **options)
    return LongAttention(memory, recent=setting.memory)


KINDS: dict[str, Callable[[Setting], nn.Module]] = {
    "short-term": _short,
    "compressive": _compressive,
    "long memory": _long,
    "long memory, equal shares": lambda setting: _long(setting, contraction=None),
}
"""What layers attend with, by the name of the model."""


class Layer(nn.Module):
    """Attention and a network, each added to its input."""

    def __init__(self, attention: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """The output (B, L, D) and the penalty (B,)."""
        output, penalty = self.attention(self.norms[0](x), state)
        x = x + output
        return x + self.network(self.norms[1](x)), penalty


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Sorter(nn.Module):
    """Reads a sequence chunk by chunk, then writes its tokens by falling frequency.

    The first layer has a memory. The others see the tokens that are written alone, so that nothing but the memory of
    the first has to be computed while the sequence is read.

    Args:
        kind: a name of ``KINDS``.
        setting: sizes.
    """

    def __init__(self, kind: str, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.embedding = nn.Embedding(setting.tokens + 1, setting.width)
        plain = [RecentAttention(setting.width, setting.heads, 0) for _ in range(setting.layers - 1)]
        memory, width = KINDS[kind](setting), setting.width
        # A wider network makes up for the parameters that a long memory has and the others do not.
        missing = _parameters(_long(setting)) - _parameters(memory)
        first = Layer(memory, width, 2 * width + round(missing / (2 * width + 1)))
        self.layers = nn.ModuleList([first, *(Layer(each, width, 2 * width) for each in plain)])
        self.norm = nn.LayerNorm(setting.width)
        self.output = nn.Linear(setting.width, setting.tokens)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Scores (B, L, tokens) of what follows each of the written tokens (B, L), and the penalty (B,)."""
        x, penalty = self.layers[0](self.embedding(tokens), state)
        for layer in self.layers[1:]:
            x, _ = layer(x, None)
        return self.output(self.norm(x)), penalty

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Any:
        """The memory after a sequence (B, length), without gradients."""
        state: Any = None
        first: Any = self.layers[0]
        for chunk in torch.split(tokens, self.setting.chunk, 1):
            state = first.attention.remember(first.norms[0](self.embedding(chunk)), state)
        return state

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of the sorted tokens, each given those before it."""
        start = torch.full_like(target[:, :1], self.setting.tokens)
        scores, penalty = self(torch.cat([start, target[:, :-1]], 1), self.read(tokens))
        loss: Tensor = F.cross_entropy(scores.flatten(0, 1), target.flatten()) + self.setting.penalty * penalty.mean()
        return loss

    @torch.no_grad()
    def write(self, tokens: Tensor) -> Tensor:
        """The tokens (B, tokens) that the model puts out, each given its own before it."""
        state, last = self.read(tokens), torch.full_like(tokens[:, :1], self.setting.tokens)
        found: list[Tensor] = []
        for _ in range(self.setting.tokens):
            scores = self(torch.cat([last, *found], 1), state)[0][:, -1]
            found.append(scores.argmax(-1, keepdim=True))
        return torch.cat(found, 1)


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a trained model does.

    Args:
        accuracy: the share of places with the right token.
        pairs: the share of pairs of tokens that are put out in the right order.
        losses: of the steps of training.
    """

    accuracy: float
    pairs: float
    losses: tuple[float, ...]


def trained(
    kind: str,
    setting: Setting,
    seed: int,
    progress: Callable[[float], None],
    folder: Path | None = None,
    start: Sorter | None = None,
    every: int = 20,
) -> tuple[Sorter, list[float]]:
    """A trained model, and its losses.

    Args:
        kind: a name of ``KINDS``.
        setting: sizes and training.
        seed: of the parameters and of the sequences.
        progress: called with the share that is done.
        folder: for a checkpoint, written every ``every`` steps, and gone on from.
        start: a model whose parameters are the first ones.
        every: steps between checkpoints.
    """
    torch.manual_seed(seed)
    model = Sorter(kind, setting)
    if start is not None:
        model.load_state_dict(start.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate)
    checkpoint, done, losses = None, 0, list[float]()
    if folder is not None:
        what = {"model": {"kind": kind, **asdict(setting)}, "training": {"seed": seed, "continued": start is not None}}
        checkpoint = Checkpoint(folder / CHECKPOINT, what)
        checkpoint.prepare()
        if (kept := checkpoint.resume(model, optimizer)) is not None:
            done, losses = int(kept[0]["epoch"]), [float(each) for each in kept[0]["losses"]]
    for number in range(done, setting.steps):
        # Of the step alone, so that a run that was interrupted sees the same sequences.
        generator = torch.Generator().manual_seed(1_000_003 * seed + number)
        warm = min(1.0, (number + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * warm * (1 - number / setting.steps)
        losses.append(step(model.loss(*sequences(setting, setting.batch, generator)), optimizer, clip=1.0))
        progress((number + 1) / setting.steps)
        if checkpoint is not None and ((number + 1) % every == 0 or number + 1 == setting.steps):
            checkpoint.keep(model, model.state_dict(), optimizer, {"epoch": number + 1, "losses": losses})
    check_finite(model)
    return model.eval(), losses


def tested(model: Sorter, count: int, seed: int, losses: list[float]) -> Outcome:
    """How a model sorts ``count`` new sequences, the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    right, ordered = 0.0, 0.0
    for start in range(0, count, model.setting.batch):
        tokens, target = sequences(model.setting, min(model.setting.batch, count - start), generator)
        found = model.write(tokens)
        right += float((found == target).float().mean(-1).sum())
        ordered += float(pairs_in_order(found, target).sum())
    return Outcome(right / count, ordered / count, tuple(losses))


def pairs_in_order(found: Tensor, target: Tensor) -> Tensor:
    """The share (B,) of pairs of tokens that stand in the same order in both (B, n); missing tokens come last.

    Example:
        >>> pairs_in_order(torch.tensor([[2, 0, 1]]), torch.tensor([[2, 1, 0]]))
        tensor([0.6667])
    """
    size = target.shape[-1]
    places = torch.full_like(target, size).scatter_reduce(
        -1, found, torch.arange(size).expand_as(found).contiguous(), "amin"
    )
    place = places.gather(-1, target)  # in the order of the target
    ahead = place.unsqueeze(-1) < place.unsqueeze(-2)
    return ahead.triu(1).sum((-2, -1)) / (size * (size - 1) / 2)

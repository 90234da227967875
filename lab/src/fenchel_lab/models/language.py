"""A small Transformer that predicts the next word; ways to make its scores probabilities, and measures of these."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fenchel
from fenchel.seq2seq.checkpoints import check_finite, step

UNKNOWN, END = 0, 1
"""The numbers of a word that is not in the vocabulary, and of the end of a text."""
EPSILONS = (1e-6, 1e-5, 1e-4, 1e-3)
"""ε of the ε-perplexity, to choose from on validation texts."""


@dataclass(frozen=True)
class Size:
    """How large a model is, and how long it is trained.

    Args:
        width: of the states.
        heads: of attention.
        layers: of the Transformer.
        context: words that are read before the next one is predicted, at most.
        dropout: in training.
        batch: windows of ``context`` words per step.
        steps: of Adam, with a rate that falls to zero in a straight line from …
        rate: … this.
    """

    width: int = 128
    heads: int = 4
    layers: int = 2
    context: int = 128
    dropout: float = 0.1
    batch: int = 16
    steps: int = 2_000
    rate: float = 1e-3


class Words:
    """Words as numbers, the most frequent ones of some texts.

    Example:
        >>> words = Words([("a", "film"), ("a", "plot")], most=3)
        >>> words.stream([("a", "dull", "film")]).tolist(), words.names[:3]
        ([2, 0, 3, 1], ['<unk>', '<end>', 'a'])
    """

    def __init__(self, texts: Sequence[Sequence[str]], most: int) -> None:
        counts = Counter(word for text in texts for word in text)
        self.names = ["<unk>", "<end>", *(word for word, _ in counts.most_common(most))]
        self.rows = {word: row for row, word in enumerate(self.names)}

    def stream(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """All texts, one after the other, with an end behind each."""
        return torch.tensor([row for text in texts for row in (*(self.rows.get(w, UNKNOWN) for w in text), END)])


class LanguageModel(nn.Module):
    """Scores (batch, length, words) of the next word.

    Args:
        words: how many there are.
        size: of the layers.
        alpha: of the loss that it is trained by: cross-entropy at 1.
    """

    def __init__(self, words: int, size: Size, alpha: float) -> None:
        super().__init__()
        self.size, self.alpha = size, alpha
        self.words, self.places = nn.Embedding(words, size.width), nn.Embedding(size.context, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, size.dropout, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.output = nn.Linear(size.width, words)

    def states(self, tokens: Tensor) -> Tensor:
        """The states (batch, length, width) from which the next words are predicted."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        embedded = self.words(tokens) + self.places.weight[:length]
        states: Tensor = self.body(embedded, mask=mask, is_causal=True)
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.output(self.states(tokens))
        return scores

    def loss(self, window: Tensor) -> Tensor:
        """The mean Fenchel-Young loss of the words of windows (batch, length + 1), each given those before it."""
        states = self.states(window[:, :-1])
        return fenchel.linear_entmax_loss(states, self.output.weight, window[:, 1:], self.output.bias, alpha=self.alpha)


def trained(stream: Tensor, model: LanguageModel, progress: Callable[[float], None]) -> LanguageModel:
    """Train a model on windows of a stream of words, drawn at random, and return it in evaluation mode."""
    size = model.size
    optimizer = torch.optim.Adam(model.parameters(), lr=size.rate)
    for done in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = size.rate * (1 - done / size.steps)
        starts = torch.randint(len(stream) - size.context, (size.batch, 1))
        step(model.loss(stream[starts + torch.arange(size.context + 1)]), optimizer, clip=1.0)
        progress((done + 1) / size.steps)
    check_finite(model)
    return model.eval()


Rule = Callable[[Tensor], Tensor]
"""Turns scores (…, words) into the probabilities that words are sampled from."""


def greedy(scores: Tensor) -> Tensor:
    """All probability for the highest score."""
    return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)


def top(scores: Tensor, k: int) -> Tensor:
    """Softmax of the k highest scores."""
    values, rows = scores.topk(min(k, scores.shape[-1]), -1)
    return torch.zeros_like(scores).scatter(-1, rows, values.softmax(-1))


def nucleus(scores: Tensor, share: float) -> Tensor:
    """Softmax of the fewest words that have so large a share of the probability together.

    Example:
        >>> nucleus(torch.tensor([0.5, 0.3, 0.2]).log(), 0.7)
        tensor([0.6250, 0.3750, 0.0000])
    """
    probabilities, rows = scores.softmax(-1).sort(-1, descending=True)
    kept = probabilities * (probabilities.cumsum(-1) - probabilities < share)
    return torch.zeros_like(scores).scatter(-1, rows, kept / kept.sum(-1, keepdim=True))


@torch.no_grad()
def measured(model: LanguageModel, stream: Tensor, rule: Rule, windows: int, near: int = 32) -> dict[str, float]:
    """What the probabilities of the next words of a stream are like, each given the words that are really before it.

    Args:
        model: in evaluation mode.
        stream: of words, of which so many windows are read.
        rule: that makes probabilities.
        windows: how many.
        near: words before the next one among which it counts as a repetition.

    Returns:
        Means over words: the sparsemax score, the Jensen-Shannon divergence from the word that follows (nats), the size
        of the support, the share of sampled words that are among those just before, and that of the words that really
        follow; and the ε-perplexities.
    """
    size = model.size.context
    count = min(windows, (len(stream) - 1) // size)
    totals: dict[str, float] = defaultdict(float)
    for first in range(count):
        window = stream[first * size : (first + 1) * size + 1]
        right = window[1:]
        p = rule(model(window[:-1].unsqueeze(0))[0])
        each = measures(p, right)
        drawn = p.multinomial(1).squeeze(1)
        before = [set(window[max(0, place + 1 - near) : place + 1].tolist()) for place in range(size)]
        each["repetition"] = _share(drawn, before)
        each["repetition of people"] = _share(right, before)
        for name, values in each.items():
            totals[name] += values.sum().item() / (count * size)
    for epsilon in EPSILONS:
        totals[f"perplexity {epsilon:g}"] = math.exp(totals[f"perplexity {epsilon:g}"])
    return dict(totals)


def measures(p: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Of probabilities (N, words) and the words that follow, (N,): for every row, see ``measured``.

    Example:
        >>> found = measures(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0]))
        >>> found["sparsemax score"], found["divergence"]
        (tensor([1., 0.]), tensor([0.0000, 0.6931]))
    """
    y = p.gather(1, right.unsqueeze(1)).squeeze(1)
    # Between p and the word alone: ½ KL(p ‖ m) + ½ KL(word ‖ m), m their mean, which is p/2 at all other words.
    divergence = 0.5 * (torch.xlogy(y, 2 * y / (1 + y)) + (1 - y) * math.log(2) - ((1 + y) / 2).log())
    found = {
        "sparsemax score": y + 0.5 * (1 - p.square().sum(1)),
        "divergence": divergence,
        "support": (p > 0).sum(1).float(),
    }
    for epsilon in EPSILONS:
        found[f"perplexity {epsilon:g}"] = -((y + epsilon) / (1 + epsilon * p.shape[1])).log()
    return found


@torch.no_grad()
def continued(model: LanguageModel, prompts: Tensor, rule: Rule, words: int) -> Tensor:
    """So many sampled words (batch, words) after prompts (batch, length)."""
    tokens = prompts
    for _ in range(words):
        p = rule(model(tokens[:, -model.size.context :])[:, -1])
        tokens = torch.cat([tokens, p.multinomial(1)], 1)
    return tokens[:, prompts.shape[1] :]


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """The share of n-grams that are different ones, over all texts together.

    Example:
        >>> distinct([[1, 2, 1, 2], [1, 2]], 2)
        0.5
    """
    grams = [tuple(text[at : at + n]) for text in texts for at in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def speed(model: LanguageModel, window: Tensor, repeats: int = 5) -> dict[str, float]:
    """Words per second of processor time in training, with the model's loss and with cross-entropy of all logits."""

    def plain() -> Tensor:
        logits = model(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    def once(loss: Callable[[], Tensor]) -> float:
        start = time.process_time()
        torch.autograd.grad(loss(), list(model.parameters()))
        return time.process_time() - start

    seconds: dict[str, list[float]] = {"its loss": [], "cross-entropy": []}
    for _ in range(repeats):
        seconds["its loss"].append(once(lambda: model.loss(window)))
        seconds["cross-entropy"].append(once(plain))
    return {name: window[:, 1:].numel() / min(each) for name, each in seconds.items()}


def _share(words: Tensor, before: Sequence[set[int]]) -> Tensor:
    return torch.tensor([float(word in some) for word, some in zip(words.tolist(), before, strict=True)])

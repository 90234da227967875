"""A Transformer encoder-decoder with any regularizer in its attention heads."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count
from fenchel.nn import MultiheadAttention
from fenchel.regularizers import Regularizer
from fenchel.seq2seq.batches import Source
from fenchel.seq2seq.model import Seq2Seq, check_depth
from fenchel.seq2seq.vocabulary import Vocabulary
from fenchel.streaming.dot_product import masked_attention

Cached = tuple[Tensor, Tensor]
"""Keys and values, (N, heads, length, width / heads) each."""


@dataclass(frozen=True)
class State:
    """The state of a decoder, one row per hypothesis.

    Args:
        mask: whether the source has a symbol, boolean (N, J).
        source: keys and values of the source, one pair per layer.
        target: keys and values of the previous target symbols, one pair per layer.
        attention: the attention weights of the last step over the source, (N, J).
    """

    mask: Tensor
    source: tuple[Cached, ...]
    target: tuple[Cached, ...]
    attention: Tensor


class _Attention(MultiheadAttention):
    """Multi-head attention with keys and values computed in a separate step, so that they can be cached."""

    def __init__(self, width: int, heads: int, omega: Regularizer) -> None:
        # Every layer has its own learned alpha.
        super().__init__(width, heads, batch_first=True, omega=copy.deepcopy(omega))

    def keys_and_values(self, x: Tensor) -> Cached:
        """Keys and values of states (N, length, width)."""
        _, key, value = self._project(x[:, :0], x, x)
        return self._split(key), self._split(value)

    def attend(
        self, x: Tensor, cached: Cached, mask: Tensor | None, is_causal: bool = False, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The output for states x (N, length, width), and weights (N, heads, length, length of keys) if needed."""
        query, _, _ = self._project(x, x[:, :0], x[:, :0])
        result = masked_attention(
            self._split(query), *cached, self.omega, attn_mask=mask, is_causal=is_causal, return_weights=need_weights
        )
        output, weights = result if need_weights else (result, None)
        return self.out_proj(output.transpose(1, 2).flatten(-2)), weights


class _Layer(nn.Module):
    """A layer with residual connections: self-attention, cross-attention in a decoder, and a feed-forward network."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, omega: Regularizer, cross: bool) -> None:
        super().__init__()
        self.own = _Attention(width, heads, omega)
        self.cross = _Attention(width, heads, omega) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if cross else 2))
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        before: Cached | None = None,
        source: Cached | None = None,
        source_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Cached, Tensor | None]:
        """States after the layer, keys and values of all target symbols so far, and attention over the source."""
        norms = iter(self.norms)
        y = next(norms)(x)
        cached = self.own.keys_and_values(y)
        if before is not None:
            cached = torch.cat([before[0], cached[0]], 2), torch.cat([before[1], cached[1]], 2)
        x = x + self.dropout(self.own.attend(y, cached, mask, is_causal)[0])
        weights = None
        if self.cross is not None and source is not None:
            y, weights = self.cross.attend(next(norms)(x), source, source_mask, need_weights=need_weights)
            x = x + self.dropout(y)
        y = self.outer(self.dropout(F.relu(self.inner(next(norms)(x)))))
        return x + self.dropout(y), cached, weights


class Transformer(Seq2Seq):
    """The encoder-decoder of Vaswani et al. (2017), with layer normalization first and any Ω in its heads.

    Every layer has its own copy of a learnable alpha; ``shape=(num_heads, 1, 1)`` gives one alpha per head. Keys and
    values are cached during a search.

    Args:
        source: the vocabulary of the sources.
        target: the vocabulary of the targets.
        width: of states and embeddings; a multiple of ``num_heads``.
        num_heads: the number of attention heads.
        layers: the number of layers of encoder and decoder each.
        inner: the width inside of the feed-forward networks.
        dropout: the probability that an entry is dropped in training.
        attention: the regularizer of all heads; ``Tsallis(1.5)`` by default.
        output: the regularizer of the output; ``Tsallis(1.5)`` by default.

    Example:
        >>> from fenchel import Tsallis
        >>> from fenchel.seq2seq import Transformer, Vocabulary
        >>> letters = Vocabulary("abc")
        >>> alpha = Tsallis(1.5, learnable=True, shape=(2, 1, 1))
        >>> model = Transformer(letters, letters, width=8, num_heads=2, layers=1, inner=16, attention=alpha)
        >>> model.attend("ab", "abc").shape  # the last layer's, averaged over its heads
        torch.Size([4, 2])

    References: Vaswani et al. (2017); Correia, Niculae & Martins (2019).
    """

    sizes = ("width", "num_heads", "layers", "inner", "dropout")
    names_in_files: ClassVar[dict[str, str]] = {"num_heads": "heads"}
    retired = ("attention_omega.",)  # older folders have the initial regularizer too

    def __init__(
        self,
        source: Vocabulary,
        target: Vocabulary,
        *,
        width: int = 128,
        num_heads: int = 4,
        layers: int = 2,
        inner: int = 256,
        dropout: float = 0.1,
        attention: Regularizer | None = None,
        output: Regularizer | None = None,
    ) -> None:
        super().__init__(source, target, check_count(width, "width"), attention=attention, output=output)
        check_count(inner, "inner")
        if width % check_count(num_heads, "num_heads"):
            raise ValueError(f"width must be a multiple of num_heads, {num_heads}, got {width}")
        check_depth(layers, dropout)
        self.width, self.num_heads, self.layers, self.inner, self.dropout = width, num_heads, layers, inner, dropout
        self.source_embedding = _embedding(len(source) + 2, width, source.pad)
        self.target_embedding = _embedding(len(target) + 2, width, target.pad)
        omega = cast(Regularizer, self._modules.pop("attention_omega"))  # every layer has its own copy
        shape = width, num_heads, inner, dropout, omega
        self.encoder = nn.ModuleList(_Layer(*shape, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Layer(*shape, cross=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    @property
    def attention_omega(self) -> Regularizer:  # type: ignore[override]
        """The regularizer of the last layer's attention over the source, whose weights ``attend`` returns.

        Every layer has its own: ``layer.own.omega`` and, in the decoder, ``layer.cross.omega``.
        """
        return self.decoder[-1].cross.omega  # type: ignore[union-attr,return-value]

    def encode(self, source: Source) -> State:
        x = self._with_positions(self.source_embedding(source.numbers), 0)
        mask = source.mask.to(x.device)
        for layer in self.encoder:
            x, _, _ = layer(x, mask[:, None, None, :])
        x = self.norms[0](x)
        cached = tuple(layer.cross.keys_and_values(x) for layer in self.decoder)  # type: ignore[union-attr,operator]
        empty = x.new_empty(len(x), self.num_heads, 0, self.width // self.num_heads)
        return State(mask, cached, tuple((empty, empty) for _ in self.decoder), x.new_zeros(x.shape[:2]))

    def decode(self, state: State, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weights, _ = self._decoded(inputs, state)
        assert weights is not None
        return hidden, weights

    def hidden_states(self, state: State, inputs: Tensor) -> Tensor:
        return self._decoded(inputs, state, need_weights=False)[0]

    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, weights, target = self._decoded(tokens.unsqueeze(1), state)
        assert weights is not None
        return hidden[:, -1], State(state.mask, state.source, target, weights[:, -1])

    def reorder(self, state: State, index: Tensor) -> State:
        index = index.to(self.device)

        def selected(pairs: tuple[Cached, ...]) -> tuple[Cached, ...]:
            return tuple((key[index], value[index]) for key, value in pairs)

        return State(state.mask[index], selected(state.source), selected(state.target), state.attention[index])

    def _decoded(
        self, inputs: Tensor, state: State, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None, tuple[Cached, ...]]:
        """Hidden states of the next inputs (N, T), their attention over the source, and all keys and values."""
        past = state.target[0][0].shape[2]
        x = self._with_positions(self.target_embedding(inputs), past)
        length = inputs.shape[1]
        mask = None
        if past and length > 1:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
        target = []
        for number, (layer, before, read) in enumerate(zip(self.decoder, state.target, state.source, strict=True), 1):
            last = need_weights and number == len(self.decoder)
            x, cached, weights = layer(x, mask, before, read, state.mask[:, None, None, :], not past, last)
            target.append(cached)
        return self.norms[1](x), None if weights is None else weights.mean(1), tuple(target)

    def _with_positions(self, embedded: Tensor, first: int) -> Tensor:
        """Scaled embeddings (N, T, width) plus sinusoidal position encodings from position ``first`` on."""
        place = torch.arange(first, first + embedded.shape[1], device=embedded.device).unsqueeze(1)
        rates = torch.exp(torch.arange(0, self.width, 2, device=embedded.device) * (-math.log(1e4) / self.width))
        angles = place * rates
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, : self.width]
        return F.dropout(embedded * math.sqrt(self.width) + waves.to(embedded.dtype), self.dropout, self.training)


def _embedding(count: int, width: int, pad: int) -> nn.Embedding:
    """An embedding table with entries of variance 1/width, and zeros for padding."""
    table = nn.Embedding(count, width, padding_idx=pad)
    nn.init.normal_(table.weight, std=width**-0.5)
    with torch.no_grad():
        table.weight[pad] = 0
    return table

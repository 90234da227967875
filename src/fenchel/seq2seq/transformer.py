"""A small Transformer encoder-decoder with any regularizer in its attention heads."""

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

Seen = tuple[Tensor, Tensor]
"""Keys and values, (N, heads, length, width of a head)."""


@dataclass(frozen=True)
class State:
    """The state of a decoder, one row per hypothesis.

    Args:
        mask: where the source has symbols, (N, J).
        read: keys and values of the source, one pair per layer.
        written: keys and values of the symbols written so far, one pair per layer.
        attention: the attention weights of the last step over the source, (N, J).
    """

    mask: Tensor
    read: tuple[Seen, ...]
    written: tuple[Seen, ...]
    attention: Tensor


class _Attention(MultiheadAttention):
    """Multi-head attention with keys and values computed in a separate step, so that they can be cached."""

    def __init__(self, width: int, heads: int, omega: Regularizer) -> None:
        # A learned alpha is every layer's own.
        super().__init__(width, heads, batch_first=True, omega=copy.deepcopy(omega))

    def see(self, x: Tensor) -> Seen:
        """Keys and values of states (N, length, width)."""
        _, key, value = self._project(x[:, :0], x, x)
        return self._split(key), self._split(value)

    def look(
        self, x: Tensor, seen: Seen, mask: Tensor | None, is_causal: bool = False, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """What states x attend to, and the weights, (N, heads, length of x, length of seen), if they are needed."""
        query, _, _ = self._project(x, x[:, :0], x[:, :0])
        result = masked_attention(
            self._split(query), *seen, self.omega, attn_mask=mask, is_causal=is_causal, return_weights=need_weights
        )
        output, weights = result if need_weights else (result, None)
        return self.out_proj(output.transpose(1, 2).flatten(-2)), weights


class _Layer(nn.Module):
    """A layer with residual connections: self-attention, in a decoder cross-attention, and a feed-forward network."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, omega: Regularizer, reads: bool) -> None:
        super().__init__()
        self.own = _Attention(width, heads, omega)
        self.cross = _Attention(width, heads, omega) if reads else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if reads else 2))
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        before: Seen | None = None,
        read: Seen | None = None,
        read_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Seen, Tensor | None]:
        """States after the layer, keys and values of all that was written so far, and the attention to the source."""
        norms = iter(self.norms)
        y = next(norms)(x)
        seen = self.own.see(y)
        if before is not None:
            seen = torch.cat([before[0], seen[0]], 2), torch.cat([before[1], seen[1]], 2)
        x = x + self.dropout(self.own.look(y, seen, mask, is_causal)[0])
        weights = None
        if self.cross is not None and read is not None:
            y, weights = self.cross.look(next(norms)(x), read, read_mask, need_weights=need_weights)
            x = x + self.dropout(y)
        y = self.outer(self.dropout(F.relu(self.inner(next(norms)(x)))))
        return x + self.dropout(y), seen, weights


class Transformer(Seq2Seq):
    """The encoder-decoder of Vaswani et al. (2017), with layer normalization first and any Ω in its heads.

    A learnable alpha is each layer's own; give it ``shape=(num_heads, 1, 1)`` for one per head.
    Keys and values are cached during a search.

    Args:
        source: the symbols that are read.
        target: the symbols that are written.
        width: of states and embeddings; a multiple of ``num_heads``.
        num_heads: of every attention.
        layers: of encoder and decoder each.
        inner: width inside the linear maps.
        dropout: the share of entries that is dropped in training.
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
    retired = ("attention_omega.",)  # where training began, which no layer used

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
        super().__init__(source, target, width, attention=attention, output=output)
        if check_count(width, "width") % check_count(num_heads, "num_heads"):
            raise ValueError(f"width must be a multiple of num_heads, {num_heads}, got {width}")
        check_depth(layers, dropout)
        self.width, self.num_heads, self.layers, self.inner, self.dropout = width, num_heads, layers, inner, dropout
        self.source_embedding = _embedding(len(source) + 2, width, source.pad)
        self.target_embedding = _embedding(len(target) + 2, width, target.pad)
        omega = cast(Regularizer, self._modules.pop("attention_omega"))  # every layer has a copy of its own
        shape = width, num_heads, inner, dropout, omega
        self.encoder = nn.ModuleList(_Layer(*shape, reads=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Layer(*shape, reads=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    @property
    def attention_omega(self) -> Regularizer:  # type: ignore[override]
        """The regularizer of the last layer's attention to the source, whose weights ``attend`` shows.

        Every layer has one of its own: ``layer.own.omega`` and, in the decoder, ``layer.cross.omega``.
        """
        return self.decoder[-1].cross.omega  # type: ignore[union-attr,return-value]

    def encode(self, source: Source) -> State:
        x = self._placed(self.source_embedding(source.numbers), 0)
        mask = source.mask.to(x.device)
        for layer in self.encoder:
            x, _, _ = layer(x, mask[:, None, None, :])
        x = self.norms[0](x)
        read = tuple(layer.cross.see(x) for layer in self.decoder)  # type: ignore[union-attr,operator]
        empty = x.new_empty(len(x), self.num_heads, 0, self.width // self.num_heads)
        return State(mask, read, tuple((empty, empty) for _ in self.decoder), x.new_zeros(x.shape[:2]))

    def decode(self, state: State, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weights, _ = self._written(inputs, state)
        assert weights is not None
        return hidden, weights

    def hidden_states(self, state: State, inputs: Tensor) -> Tensor:
        return self._written(inputs, state, need_weights=False)[0]

    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, weights, written = self._written(tokens.unsqueeze(1), state)
        assert weights is not None
        return hidden[:, -1], State(state.mask, state.read, written, weights[:, -1])

    def reorder(self, state: State, index: Tensor) -> State:
        index = index.to(self.device)

        def chosen(pairs: tuple[Seen, ...]) -> tuple[Seen, ...]:
            return tuple((key[index], value[index]) for key, value in pairs)

        return State(state.mask[index], chosen(state.read), chosen(state.written), state.attention[index])

    def _written(
        self, inputs: Tensor, state: State, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None, tuple[Seen, ...]]:
        """States of inputs (N, T) that follow what was written, their attention to the source, all keys and values."""
        past = state.written[0][0].shape[2]
        x = self._placed(self.target_embedding(inputs), past)
        length = inputs.shape[1]
        mask = None
        if past and length > 1:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
        written = []
        for number, (layer, before, read) in enumerate(zip(self.decoder, state.written, state.read, strict=True), 1):
            shown = need_weights and number == len(self.decoder)
            x, seen, weights = layer(x, mask, before, read, state.mask[:, None, None, :], not past, shown)
            written.append(seen)
        return self.norms[1](x), None if weights is None else weights.mean(1), tuple(written)

    def _placed(self, embedded: Tensor, first: int) -> Tensor:
        """Embeddings plus sinusoidal position encodings."""
        place = torch.arange(first, first + embedded.shape[1], device=embedded.device).unsqueeze(1)
        rates = torch.exp(torch.arange(0, self.width, 2, device=embedded.device) * (-math.log(1e4) / self.width))
        angles = place * rates
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, : self.width]
        placed = embedded * math.sqrt(self.width) + waves.to(embedded.dtype)
        return F.dropout(placed, self.dropout, self.training)


def _embedding(count: int, width: int, pad: int) -> nn.Embedding:
    table = nn.Embedding(count, width, padding_idx=pad)
    nn.init.normal_(table.weight, std=width**-0.5)
    with torch.no_grad():
        table.weight[pad] = 0
    return table

"""A recurrent encoder-decoder: a bidirectional LSTM, and an LSTM with global attention and input feeding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count
from fenchel.regularizers import Regularizer
from fenchel.seq2seq.batches import Source
from fenchel.seq2seq.lstm import cell, read_both_ways
from fenchel.seq2seq.model import Seq2Seq, check_depth
from fenchel.seq2seq.vocabulary import Vocabulary


@dataclass(frozen=True)
class State:
    """The state of a decoder, one row per hypothesis.

    Args:
        memory: encodings of the source, (N, J, D).
        keys: the encodings multiplied by the matrix of the attention scores, (N, J, D).
        mask: added to attention scores, (N, J, 1): 0 where there is a symbol, −inf in padding.
        hidden: the hidden states of all layers, (N, D) each.
        cells: the cells of all layers, (N, D) each.
        feed: the last output o, (N, D), which is an input of the next step.
        attention: the attention weights of that output over the source, (N, J).
    """

    memory: Tensor
    keys: Tensor
    mask: Tensor
    hidden: tuple[Tensor, ...]
    cells: tuple[Tensor, ...]
    feed: Tensor
    attention: Tensor


class Recurrent(Seq2Seq):
    r"""The encoder-decoder of Peters, Niculae & Martins (2019), after Luong, Pham & Manning (2015).

    .. math:: z_j = s_t^\top W h_j, \quad c_t = \sum_j \pi_j h_j \text{ with } \pi = \operatorname{argmax}_\Omega(z),
              \quad o_t = \tanh(U [s_t; c_t] + b), \quad p = \operatorname{argmax}_{\Omega'}(V o_t + b')

    where h are the states of the encoder and s those of the decoder, whose inputs are the embedding of the last symbol
    and the last :math:`o`. Dropout is applied to embeddings, between layers and to :math:`o`.

    Args:
        source: the vocabulary of the sources.
        target: the vocabulary of the targets.
        embedding: the width of the embeddings.
        hidden: the width of the states; even, half of it for each direction of the encoder.
        layers: the number of layers of encoder and decoder each.
        dropout: the probability that an entry is dropped in training.
        attention: the regularizer of π; ``Tsallis(1.5)`` by default.
        output: the regularizer of p; ``Tsallis(1.5)`` by default.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import Pair, Recurrent, Vocabulary, collate
        >>> letters = Vocabulary("abc")
        >>> model = Recurrent(letters, letters, embedding=8, hidden=8)
        >>> loss = model(collate([Pair(tuple("ab"), tuple("abc"))], letters, letters))
        >>> model.attend("ab", "abc").shape  # one row per target symbol, and one for the end
        torch.Size([4, 2])
    """

    sizes = ("embedding", "hidden", "layers", "dropout")

    def __init__(
        self,
        source: Vocabulary,
        target: Vocabulary,
        *,
        embedding: int = 300,
        hidden: int = 300,
        layers: int = 2,
        dropout: float = 0.3,
        attention: Regularizer | None = None,
        output: Regularizer | None = None,
    ) -> None:
        super().__init__(source, target, hidden, attention=attention, output=output)
        if check_count(hidden, "hidden") % 2:
            raise ValueError(f"hidden must be even, got {hidden}")
        check_depth(layers, dropout)
        self.embedding, self.hidden, self.layers, self.dropout = embedding, hidden, layers, dropout
        self.source_embedding = nn.Embedding(len(source) + 2, embedding, padding_idx=source.pad)
        self.target_embedding = nn.Embedding(len(target) + 2, embedding, padding_idx=target.pad)
        between = dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(embedding, hidden // 2, layers, batch_first=True, bidirectional=True, dropout=between)
        widths = [embedding + hidden, *[hidden] * (layers - 1)]
        self.decoder = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.context = nn.Linear(2 * hidden, hidden)

    def encode(self, source: Source) -> State:
        embedded = self._drop(self.source_embedding(source.numbers))
        states, hidden, cells = read_both_ways(self.encoder, embedded, source.lengths)
        memory = self._drop(states)
        padding = ~source.mask.to(memory.device).unsqueeze(-1)
        mask = torch.zeros_like(memory[..., :1]).masked_fill(padding, -torch.inf)
        rows = memory.shape[0]
        return State(
            memory,
            self.key(memory),
            mask,
            hidden.unbind(0),
            cells.unbind(0),
            memory.new_zeros(rows, self.hidden),
            memory.new_zeros(rows, memory.shape[1]),
        )

    def decode(self, state: State, inputs: Tensor) -> tuple[Tensor, Tensor]:
        first = self._cells[0]
        # The part of the gates that depends on embeddings is computed for all steps at once.
        own, fed = first.weight_ih[:, : self.embedding], first.weight_ih[:, self.embedding :]
        known = F.linear(self._drop(self.target_embedding(inputs)), own, first.bias_ih + first.bias_hh).unbind(1)
        rest = torch.cat([fed, first.weight_hh], 1).t()
        outputs, weights = [], []
        for each, factor in zip(known, self._dropout_factors(len(known), state.feed), strict=True):
            gates = torch.addmm(each, torch.cat([state.feed, state.hidden[0]], 1), rest)
            state = self._advance(gates, state, factor)
            outputs.append(state.feed)
            weights.append(state.attention)
        return torch.stack(outputs, 1), torch.stack(weights, 1)

    def advance(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        first = self._cells[0]
        entered = torch.cat([self._drop(self.target_embedding(tokens)), state.feed], 1)
        gates = F.linear(entered, first.weight_ih, first.bias_ih)
        gates = gates + F.linear(state.hidden[0], first.weight_hh, first.bias_hh)
        (factor,) = self._dropout_factors(1, state.feed)
        state = self._advance(gates, state, factor)
        return state.feed, state

    def reorder(self, state: State, index: Tensor) -> State:
        index = index.to(self.device)
        return State(
            state.memory[index],
            state.keys[index],
            state.mask[index],
            tuple(each[index] for each in state.hidden),
            tuple(each[index] for each in state.cells),
            state.feed[index],
            state.attention[index],
        )

    @property
    def _cells(self) -> list[nn.LSTMCell]:
        return cast(list[nn.LSTMCell], list(self.decoder))

    def _dropout_factors(self, steps: int, like: Tensor) -> Sequence[Tensor | None]:
        """The dropout factors of the outputs of some steps, one tensor per step; None without dropout."""
        if not self.training or not self.dropout:
            return [None] * steps
        drawn = torch.rand(steps, *like.shape, dtype=like.dtype, device=like.device)
        return ((drawn >= self.dropout).to(like.dtype) / (1 - self.dropout)).unbind(0)

    def _advance(self, gates: Tensor, state: State, factor: Tensor | None) -> State:
        """One step of all layers, given the gates of the first layer."""
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        for layer, old in enumerate(state.cells):
            if layer:
                here = self._cells[layer]
                gates = F.linear(self._drop(hidden[-1]), here.weight_ih, here.bias_ih)
                gates = gates + F.linear(state.hidden[layer], here.weight_hh, here.bias_hh)
            new_hidden, new_cell = cell(gates, old)
            hidden.append(new_hidden)
            cells.append(new_cell)
        top = hidden[-1]
        scores = torch.baddbmm(state.mask, state.keys, top.unsqueeze(-1)).squeeze(-1)
        weights = self.attention_omega.argmax(scores)
        context = torch.bmm(weights.unsqueeze(1), state.memory).squeeze(1)
        output = torch.tanh(self.context(torch.cat([top, context], 1)))
        output = output if factor is None else output * factor
        return State(state.memory, state.keys, state.mask, tuple(hidden), tuple(cells), output, weights)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

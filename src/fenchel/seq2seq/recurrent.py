"""A recurrent encoder-decoder: a bidirectional LSTM, and an LSTM with global attention and input feeding."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count
from fenchel.continuous import ContinuousAttention
from fenchel.regularizers import Gini, Regularizer
from fenchel.regularizers.configs import from_config, to_config
from fenchel.seq2seq.batches import Source
from fenchel.seq2seq.fertility import (
    check_base,
    check_fertility,
    constrained,
    describe,
    fertilities,
    read_fertility,
)
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
        coverage: the sum of the attention weights of all steps so far, (N, J).
        fertility: what the coverage may be at most, (N, J); None without bounds.
    """

    memory: Tensor
    keys: Tensor
    mask: Tensor
    hidden: tuple[Tensor, ...]
    cells: tuple[Tensor, ...]
    feed: Tensor
    attention: Tensor
    coverage: Tensor
    fertility: Tensor | None


class Recurrent(Seq2Seq):
    r"""The encoder-decoder of Peters, Niculae & Martins (2019), after Luong, Pham & Manning (2015).

    .. math:: z_j = s_t^\top W h_j, \quad c_t = \sum_j \pi_j h_j \text{ with } \pi = \operatorname{argmax}_\Omega(z),
              \quad o_t = \tanh(U [s_t; c_t] + b), \quad p = \operatorname{argmax}_{\Omega'}(V o_t + b')

    where h are the states of the encoder and s those of the decoder, whose inputs are the embedding of the last symbol
    and the last :math:`o`. Dropout is applied to embeddings, between layers and to :math:`o`.

    Attention may also be continuous: π then is the weight of each state in the expectation of a function of time, and
    may be negative. With a *fertility* no symbol receives more attention in all steps together than its own: at each
    step the weights are bounded by what is left of it (Malaviya et al., 2018). If less than 1 is left of the whole
    source, all of that is taken, and the weights sum to less than 1. ``beam_search`` returns what each symbol received,
    ``Hypothesis.coverage``.

    Args:
        source: the vocabulary of the sources.
        target: the vocabulary of the targets.
        embedding: the width of the embeddings.
        hidden: the width of the states; even, half of it for each direction of the encoder.
        layers: the number of layers of encoder and decoder each.
        dropout: the probability that an entry is dropped in training.
        attention: the regularizer of π; ``Tsallis(1.5)`` by default, with a fertility ``Gini()``. Or a
            :class:`~fenchel.continuous.ContinuousAttention` on the line, which is copied. Its encoder gets the scores z
            (a ``MatchedEncoder``) or the state of the decoder (a ``PooledEncoder(hidden)``).
        output: the regularizer of p; ``Tsallis(1.5)`` by default.
        fertility: a number for all symbols; a tensor (len(source),) with one number per symbol of the vocabulary,
            trained if it is a parameter; or a module that maps encodings (N, J, hidden) to (N, J), such as
            ``FertilityPredictor(hidden)``, which is copied and trained. None: no bounds. Attention must be ``Gini()``
            or ``Shannon()``.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.continuous import ContinuousAttention, GaussianBasis, MatchedEncoder
        >>> from fenchel.seq2seq import Pair, Recurrent, Vocabulary, collate
        >>> letters = Vocabulary("abc")
        >>> model = Recurrent(letters, letters, embedding=8, hidden=8)
        >>> loss = model(collate([Pair(tuple("ab"), tuple("abc"))], letters, letters))
        >>> model.attend("ab", "abc").shape  # one row per target symbol, and one for the end
        torch.Size([4, 2])
        >>> model = Recurrent(letters, letters, embedding=8, hidden=8, fertility=1.5)
        >>> bool((model.attend("ab", "abc").sum(0) <= 1.5001).all())
        True
        >>> both = ContinuousAttention(GaussianBasis.line(30), encoder=MatchedEncoder(fenchel.Gini()), combined=True)
        >>> model = Recurrent(letters, letters, embedding=8, hidden=8, attention=both)
        >>> model.attend("ab", "abc").shape
        torch.Size([4, 2])

    References: Peters, Niculae & Martins (2019); Malaviya, Ferreira & Martins (2018) for fertility; Martins et al.
    (2020), section 4, for discrete and continuous attention added up.
    """

    fertility: float | Tensor | nn.Module | None
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
        attention: Regularizer | ContinuousAttention | None = None,
        output: Regularizer | None = None,
        fertility: float | Tensor | nn.Module | None = None,
    ) -> None:
        if attention is not None and not isinstance(attention, (Regularizer, ContinuousAttention)):
            raise TypeError(f"attention must be a Regularizer or a ContinuousAttention, got {type(attention).__name__}")
        continuous = attention if isinstance(attention, ContinuousAttention) else None
        omega = None if isinstance(attention, ContinuousAttention) else attention
        omega = Gini() if omega is None and fertility is not None else omega
        super().__init__(source, target, check_count(hidden, "hidden"), attention=omega, output=output)
        check_count(embedding, "embedding")
        if hidden % 2:
            raise ValueError(f"hidden must be even, got {hidden}")
        check_depth(layers, dropout)
        self.embedding, self.hidden, self.layers, self.dropout = embedding, hidden, layers, dropout
        self.source_embedding = nn.Embedding(len(source) + 2, embedding, padding_idx=source.pad)
        self.target_embedding = nn.Embedding(len(target) + 2, embedding, padding_idx=target.pad)
        between = dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(embedding, hidden // 2, layers, batch_first=True, bidirectional=True, dropout=between)
        widths = [embedding + hidden, *[hidden] * (layers - 1)]
        self.decoder = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.continuous = None if continuous is None else self._own_attention(continuous)
        scored = self.continuous is None or self.continuous.encoder.reads_scores  # type: ignore[union-attr]
        self.key = nn.Linear(hidden, hidden, bias=False) if scored else None
        self.context = nn.Linear(2 * hidden, hidden)
        bounds = None if fertility is None else check_fertility(fertility, len(source))
        if isinstance(bounds, Tensor) and not isinstance(bounds, nn.Parameter):
            self.register_buffer("fertility", bounds)
        else:
            self.fertility = bounds
        if fertility is not None:
            if continuous is not None:
                raise ValueError("fertility must be None with continuous attention, whose weights may be negative")
            check_base(self.attention_omega)

    def encode(self, source: Source) -> State:
        embedded = self._drop(self.source_embedding(source.numbers))
        states, hidden, cells = read_both_ways(self.encoder, embedded, source.lengths)
        memory = self._drop(states)
        padding = ~source.mask.to(memory.device).unsqueeze(-1)
        mask = torch.zeros_like(memory[..., :1]).masked_fill(padding, -torch.inf)
        rows = memory.shape[0]
        return State(
            memory,
            memory if self.key is None else self.key(memory),
            mask,
            hidden.unbind(0),
            cells.unbind(0),
            memory.new_zeros(rows, self.hidden),
            memory.new_zeros(rows, memory.shape[1]),
            memory.new_zeros(rows, memory.shape[1]),
            None if self.fertility is None else fertilities(self.fertility, source.numbers, memory),
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
            state.coverage[index],
            None if state.fertility is None else state.fertility[index],
        )

    def coverage(self, state: State, row: int) -> Tensor:
        """The attention that each symbol of the source of a row has received so far, (J,)."""
        return state.coverage[row][state.mask[row, :, 0] == 0]

    # -- folders -------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        return found if self.fertility is None else found | {"fertility": describe(self.fertility, to_config)}

    @property
    def _attention(self) -> nn.Module:
        return self.attention_omega if self.continuous is None else self.continuous

    @classmethod
    def _options(cls, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in given.items() if name != "fertility"}
        options = super()._options(settings, rest)
        fertility = given.get("fertility")
        return options | {
            "fertility": read_fertility(settings.get("fertility"), from_config) if fertility is None else fertility
        }

    # -- parts of these ------------------------------------------------------------------------------------------------

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
        weights, context = self._attend(top, state)
        output = torch.tanh(self.context(torch.cat([top, context], 1)))
        output = output if factor is None else output * factor
        coverage = state.coverage + weights
        return replace(
            state, hidden=tuple(hidden), cells=tuple(cells), feed=output, attention=weights, coverage=coverage
        )

    def _attend(self, top: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Weights over the source, (N, J), and the context, (N, D), for states of the decoder (N, D)."""
        scores = top if self.key is None else torch.baddbmm(state.mask, state.keys, top.unsqueeze(-1)).squeeze(-1)
        if self.continuous is not None:
            found = self.continuous.attend(state.memory, scores, state.mask.squeeze(-1) == 0)
            return found.weights.mean(-2), found.context
        if state.fertility is None:
            weights = self.attention_omega.argmax(scores)
        else:
            weights = constrained(scores, state.fertility - state.coverage, self.attention_omega)
        return weights, torch.bmm(weights.unsqueeze(1), state.memory).squeeze(1)

    def _own_attention(self, given: ContinuousAttention) -> ContinuousAttention:
        """A copy of continuous attention, in the precision of the model."""
        if given.encoder is None or given.basis.dim != 1:
            raise ValueError(f"attention must have an encoder and a basis of one dimension, got {given}")
        heads, width = given.encoder.num_heads, given.encoder.width or self.hidden
        if given.encoder.reads_scores and heads != 1:
            raise ValueError(f"attention must have one head if its encoder reads scores, got {heads}")
        if self.hidden % heads or width != self.hidden:
            raise ValueError(
                f"attention must have an encoder of width {self.hidden}, and heads that divide it, got width {width} "
                f"and {heads} heads"
            )
        return copy.deepcopy(given).to(self.output.weight.dtype)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

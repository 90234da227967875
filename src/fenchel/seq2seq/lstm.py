"""One step of an LSTM, and a bidirectional LSTM over padded rows of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

_SATURATED = 1e4  # a score at which the sigmoid of a gate is 0 or 1 to rounding, in half precision too


def cell(gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden state and the cell of an LSTM, (…, H), from its gates (…, 4H): input, forget, cell, output."""
    into, forget, new, out = gates.chunk(4, -1)
    state = torch.addcmul(forget.sigmoid() * state, into.sigmoid(), new.tanh())
    return out.sigmoid() * state.tanh(), state


def read_both_ways(lstm: nn.LSTM, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply a bidirectional ``lstm`` to rows (B, J, D) of which the first ``lengths`` (B,) entries are used.

    Packed sequences give the same result, but on the CPU their backward pass fills a tensor of the size of the batch in
    every step. There the rows stay padded, and get one more feature that is 1 in padding: its weights close the input
    gate and open the forget gate, so that the cell does not change.

    Returns:
        States (B, J, 2H), undefined in padding; the last hidden states and cells, (layers, B, 2H).
    """
    if x.device.type != "cpu":
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = lstm(packed)
        hidden, cells = (each.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for each in last)
        return pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0], hidden, cells
    rows, half = torch.arange(len(x), device=x.device), lstm.hidden_size
    padding = (torch.arange(x.shape[1], device=x.device) >= lengths[:, None]).unsqueeze(-1).to(x.dtype)
    zero = x.new_zeros(2, len(x), half)
    hidden, cells = [], []
    for layer in range(lstm.num_layers):
        x = F.dropout(x, lstm.dropout, lstm.training) if layer else x
        entered = torch.cat([x, padding], -1)
        x, _, last = torch.lstm(entered, (zero, zero), _weights(lstm, layer), True, 1, 0.0, lstm.training, True, True)
        hidden.append(torch.cat([x[rows, lengths - 1, :half], x[:, 0, half:]], -1))
        cells.append(torch.cat([last[0], last[1]], -1))
    return x, torch.stack(hidden), torch.stack(cells)


def _weights(lstm: nn.LSTM, layer: int) -> list[Tensor]:
    """The weights of both directions of a layer, with a column for the feature that marks padding."""
    weights = []
    for direction in ("", "_reverse"):
        entered, *rest = (
            getattr(lstm, f"{name}_l{layer}{direction}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        column = entered.new_zeros(4, lstm.hidden_size)
        column[0], column[1] = -_SATURATED, _SATURATED
        weights += [torch.cat([entered, column.reshape(-1, 1)], 1), *rest]
    return weights

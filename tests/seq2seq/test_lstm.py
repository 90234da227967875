"""A bidirectional LSTM over rows of different lengths, beside torch's packed sequences."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fenchel.seq2seq.lstm import read_both_ways

LENGTHS = torch.tensor([3, 7, 1, 5])


def _packed(lstm: nn.LSTM, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states, (hidden, cells) = lstm(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False))
    rows = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0]
    sides = [torch.stack([torch.cat([h[2 * i], h[2 * i + 1]], 1) for i in range(len(h) // 2)]) for h in (hidden, cells)]
    return rows, sides[0], sides[1]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_lstm_of_packed_sequences_with_its_gradients(layers: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 4, layers, batch_first=True, bidirectional=True).to(dtype)
    x = torch.randn(4, 8, 5, dtype=dtype, requires_grad=True)
    inside = (torch.arange(8) < LENGTHS[:, None]).unsqueeze(-1)
    leaves = [x, *lstm.parameters()]
    seen = []
    for function in (lambda: read_both_ways(lstm, x, LENGTHS), lambda: _packed(lstm, x)):
        states, hidden, cells = function()
        outputs = [states * inside, hidden, cells]
        loss = sum((each * torch.linspace(-1, 1, each.numel(), dtype=dtype).view_as(each)).sum() for each in outputs)
        seen.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_behind_the_end_does_not_matter() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True)
    x = torch.randn(4, 8, 5)
    other = torch.where((torch.arange(8) < LENGTHS[:, None]).unsqueeze(-1), x, 100.0)
    for ours, theirs in zip(read_both_ways(lstm, x, LENGTHS), read_both_ways(lstm, other, LENGTHS), strict=True):
        inside = torch.ones_like(ours, dtype=torch.bool)
        if ours.shape[1] == 8:
            inside = (torch.arange(8) < LENGTHS[:, None]).unsqueeze(-1).expand_as(ours)
        torch.testing.assert_close(ours[inside], theirs[inside])

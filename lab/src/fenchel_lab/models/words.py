"""Words in context: what selects words, tags them or sums them up reads them first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class WordEncoder(nn.Module):
    """Read texts: a vector for every word, and a bidirectional LSTM over them.

    What stands behind the end of a text does not matter; a text without words has states of zero.

    Args:
        vectors: (words, width), floating point, where the vectors begin. The layer has their dtype and device.
        hidden: width of the states, of each direction.
        dropout: of words' vectors, in training.
        trainable: whether the vectors are trained. Else they are a buffer, and saved all the same.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> encoder = WordEncoder(torch.randn(10, 6), hidden=4)
        >>> words, lengths = torch.tensor([[3, 1, 4], [1, 5, 0]]), torch.tensor([3, 2])
        >>> states = encoder(words, lengths)
        >>> states.shape, states[1, 2].abs().sum().item()
        (torch.Size([2, 3, 8]), 0.0)
    """

    vectors: Tensor

    def __init__(self, vectors: Tensor, hidden: int, dropout: float = 0.0, trainable: bool = False) -> None:
        super().__init__()
        if not isinstance(vectors, Tensor) or not vectors.is_floating_point() or vectors.dim() != 2:
            got = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ValueError(f"vectors must be a floating-point tensor (words, width), got {got}")
        if trainable:
            self.vectors = nn.Parameter(vectors.detach().clone())
        else:
            self.register_buffer("vectors", vectors.detach().clone())
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(vectors.shape[1], hidden, batch_first=True, bidirectional=True).to(vectors)

    @property
    def width(self) -> int:
        """Of the states."""
        return 2 * self.lstm.hidden_size

    def extra_repr(self) -> str:
        words, width = self.vectors.shape
        return f"words={words}, width={width}, trainable={isinstance(self.vectors, nn.Parameter)}"

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """The states of words.

        Args:
            words: (batch, length), rows of the vectors.
            lengths: (batch,), how many words of each row are text.

        Returns:
            (batch, length, 2 · hidden), zero behind the ends.
        """
        inside = torch.arange(words.shape[1], device=words.device) < lengths.unsqueeze(-1)
        if not bool(inside.any()):
            return self.vectors.new_zeros(*words.shape, self.width)
        embedded = self.dropout(self.vectors[words.masked_fill(~inside, 0)])
        # A row must have a word to be packed: an empty one lends its padding, and gives it back below.
        packed = pack_padded_sequence(embedded, lengths.cpu().clamp_min(1), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return states.masked_fill(~inside.unsqueeze(-1), 0.0)

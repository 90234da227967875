"""Causal self-attention over chunks of a sequence, with a long memory of what came before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_floats, check_mask, check_shape
from fenchel.continuous.memory import LongMemory, MemoryState
from fenchel.nn.attention import MultiheadAttention
from fenchel.regularizers import Regularizer, Shannon


@dataclass(frozen=True)
class ChunkState:
    """What ``LongMemoryAttention`` passes from one chunk to the next.

    Args:
        memory: the long memory; None as long as it is empty.
        recent: (B, S, D), the last inputs, which the next chunk attends to one by one.
        mask: boolean (B, S), which of them are inputs and not padding; None if all are.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, LongMemory
        >>> from fenchel.nn import LongMemoryAttention
        >>> layer = LongMemoryAttention(LongMemory(GaussianBasis.line(16, widths=(0.05,)), 8), recent=30)
        >>> state = layer(torch.randn(2, 100, 8)).state.detach()
        >>> state.recent.shape, state.memory.lengths
        (torch.Size([2, 30, 8]), 70)
    """

    memory: MemoryState | None
    recent: Tensor
    mask: Tensor | None

    def detach(self) -> ChunkState:
        """The same numbers, through which no gradients pass."""
        return ChunkState(None if self.memory is None else self.memory.detach(), self.recent.detach(), self.mask)


@dataclass(frozen=True)
class ChunkOutput:
    """The result of ``LongMemoryAttention`` for one chunk.

    Args:
        output: (B, L, D).
        penalty: (B,), that of the attention to the long memory; to be added to the loss, with a small weight.
        state: for the next chunk.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, LongMemory
        >>> from fenchel.nn import LongMemoryAttention
        >>> found = LongMemoryAttention(LongMemory(GaussianBasis.line(16, widths=(0.05,)), 8))(torch.randn(2, 100, 8))
        >>> found.output.shape, found.penalty
        (torch.Size([2, 100, 8]), tensor([0., 0.]))
    """

    output: Tensor
    penalty: Tensor
    state: ChunkState


class LongMemoryAttention(nn.Module):
    """Causal self-attention over a chunk (B, L, D) plus attention to a ``LongMemory`` of all that came before.

    A query attends to the inputs up to its own, those of the chunk and the last ``recent`` before it, and to the long
    memory; both contexts are added. Inputs that are no longer recent are put into the long memory after the chunk.
    Time and memory per chunk do not depend on how many chunks there were. There are no positions in it: add them to
    the inputs.

    Gradients pass through the state to earlier chunks, as far as the inputs are recent or the ``horizon`` of the memory
    reaches. To call ``backward`` after every chunk, pass ``state.detach()`` on.

    Args:
        memory: the long memory, which also sets the width D and the number of heads.
        recent: the number of earlier inputs that are attended to one by one.
        omega: of the attention to single inputs; Shannon's if None.
        dropout: of its weights, in training.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, LongMemory
        >>> from fenchel.nn import LongMemoryAttention
        >>> memory = LongMemory(GaussianBasis.line(32, widths=(0.03,)), 16, num_heads=4, contraction=0.75)
        >>> layer, state = LongMemoryAttention(memory, recent=64), None
        >>> for chunk in torch.randn(2, 1000, 16).split(128, dim=1):
        ...     found = layer(chunk, state)
        ...     state = found.state.detach()
        >>> found.output.shape, state.memory.lengths + state.recent.shape[1]
        (torch.Size([2, 104, 16]), 1000)

    References: Martins, Marinho & Martins (2022), ∞-former: infinite memory transformer.
    """

    def __init__(
        self, memory: LongMemory, *, recent: int = 0, omega: Regularizer | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not isinstance(memory, LongMemory):
            raise TypeError(f"memory must be a LongMemory, got {type(memory).__name__}")
        self.memory, self.recent = memory, check_count(recent, "recent", 0)
        self.attention = MultiheadAttention(
            memory.embed_dim,
            memory.num_heads,
            dropout=dropout,
            batch_first=True,
            omega=Shannon() if omega is None else omega,
        )

    def extra_repr(self) -> str:
        return f"recent={self.recent}"

    def forward(
        self,
        x: Tensor,
        state: ChunkState | None = None,
        mask: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> ChunkOutput:
        """The output of a chunk, and the state for the next.

        Args:
            x: (B, L, D).
            state: of the chunk before; None for the first.
            mask: boolean (B, L); True = an input. Other positions get zeros and are not attended to.
            generator: for sticky memories, as in ``LongMemory.update``.
        """
        x, state, there = self._checked(x, state, mask)
        before, size = state.recent.shape[1], x.shape[1]
        inputs = torch.cat([state.recent, x], 1)
        hidden = torch.ones(size, before + size, dtype=torch.bool, device=x.device).triu(before + 1)
        padding = None if there is None else ~there
        short, _ = self.attention(x, inputs, inputs, padding, need_weights=False, attn_mask=hidden)
        found = self.memory.attend(x, state.memory, mask)
        output = short + found.context
        if mask is not None:
            output = torch.where(mask.unsqueeze(-1), output, 0.0)
        return ChunkOutput(output, found.penalty, self._moved(inputs, found.state, there, generator))

    def remember(
        self,
        x: Tensor,
        state: ChunkState | None = None,
        mask: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> ChunkState:
        """The state after a chunk, without its output; arguments as in ``forward``.

        It is that of ``forward``, except that the attention of the chunk does not count for sticky memories.
        """
        x, state, there = self._checked(x, state, mask)
        return self._moved(torch.cat([state.recent, x], 1), state.memory, there, generator)

    def _moved(
        self, inputs: Tensor, memory: MemoryState | None, there: Tensor | None, generator: torch.Generator | None
    ) -> ChunkState:
        """The state after inputs (B, S + L): the last ones stay recent, the others go into the long memory."""
        left = max(0, inputs.shape[1] - self.recent)
        if left:
            old = None if there is None else there[:, :left]
            memory = self.memory.update(inputs[:, :left], memory, old, generator=generator)
        return ChunkState(memory, inputs[:, left:], None if there is None else there[:, left:])

    def _checked(
        self, x: Tensor, state: ChunkState | None, mask: Tensor | None
    ) -> tuple[Tensor, ChunkState, Tensor | None]:
        """The inputs with zeros for padding, the state, and which of (B, S + L) are no padding; None for all."""
        check_floats(x, "x", "B", "L", self.memory.embed_dim)
        if x.shape[1] == 0:
            raise ValueError(f"x must hold at least one input per sequence, got shape {tuple(x.shape)}")
        if state is None:
            state = ChunkState(None, x.new_zeros(len(x), 0, x.shape[-1]), None)
        if not isinstance(state, ChunkState):
            raise TypeError(f"state must be that of the chunk before, or None, got {type(state).__name__}")
        if (state.recent.shape[0], *state.recent.shape[2:]) != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"state must have {len(x)} sequences of width {x.shape[2]} as x has, got {tuple(state.recent.shape)}"
            )
        if mask is not None:
            check_shape(check_mask(mask, true="there is an input"), "mask", *x.shape[:2])
            x = torch.where(mask.unsqueeze(-1), x, 0.0)
        if state.mask is None and mask is None:
            return x, state, None
        parts = [
            torch.ones(each.shape[:2], dtype=torch.bool, device=x.device) if given is None else given
            for each, given in ((state.recent, state.mask), (x, mask))
        ]
        return x, state, torch.cat(parts, 1)

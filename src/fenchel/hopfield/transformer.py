"""Transformer layers whose attention is a Hopfield association: an encoder layer and a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_share
from fenchel.hopfield.arguments import activation as named_activation
from fenchel.hopfield.association import Hopfield, Patterns


class _TransformerLayer(nn.Module):
    """A transformer layer that ends with a feed-forward network."""

    @property
    def self_attn(self) -> Hopfield:
        """The association of a sequence with itself, under the name that torch's containers of layers look for."""
        raise NotImplementedError

    @property
    def batch_first(self) -> bool:
        """Whether inputs are (batch, length, width)."""
        return self.self_attn.batch_first

    def _add_feed_forward(
        self, like: Hopfield, dim_feedforward: int, dropout: float, activation: str | Callable[[Tensor], Tensor]
    ) -> None:
        """Add a feed-forward network with the width, device and dtype of an association."""
        width, factory = like.state_pattern_size, _factory_kwargs(like)
        self.linear_residual = nn.Linear(width, check_count(dim_feedforward, "dim_feedforward"), **factory)
        self.linear_output = nn.Linear(dim_feedforward, width, **factory)
        self.norm_output = nn.LayerNorm(width, **factory)
        self.dropout = nn.Dropout(check_share(dropout, "dropout"))
        self.activation_residual = named_activation("activation", activation)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """norm(x + network(x))."""
        inner = self.activation_residual(self.linear_residual(x))
        fed: Tensor = self.norm_output(x + self.dropout(self.linear_output(self.dropout(inner))))
        return fed

    def reset_parameters(self) -> None:
        """Draw all parameters again, those of the associations too."""
        for module in self.children():
            if isinstance(module, (Hopfield, nn.Linear, nn.LayerNorm)):
                module.reset_parameters()


class HopfieldEncoderLayer(_TransformerLayer):
    r"""A transformer's encoder layer: self-association, then a feed-forward network, each added and normalised.

    .. math:: y = \operatorname{norm}(x + \operatorname{Hopfield}(x)), \qquad
        \text{output} = \operatorname{norm}(y + W_2\, \operatorname{activation}(W_1 y))

    Arguments and parameters are those of the reference layer of Ramsauer et al. (2021). It goes into
    ``torch.nn.TransformerEncoder`` in place of a ``torch.nn.TransformerEncoderLayer``.

    Args:
        hopfield_association: a layer whose output is as wide as its input. It is copied, with its parameters.
        dim_feedforward: width of the feed-forward network.
        dropout: the share of entries that is dropped in training: of both sums, and inside the network.
        activation: of the network: a function, or the name of one in torch, such as "relu" or "gelu".

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import Hopfield, HopfieldEncoderLayer
        >>> layer = HopfieldEncoderLayer(Hopfield(16, num_heads=2, omega=fenchel.Gini()), dim_feedforward=32)
        >>> layer(torch.randn(3, 7, 16)).shape
        torch.Size([3, 7, 16])
        >>> torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(torch.randn(3, 7, 16)).shape
        torch.Size([3, 7, 16])

    References: Vaswani et al. (2017); Ramsauer et al. (2021).
    """

    def __init__(
        self,
        hopfield_association: Hopfield,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
    ) -> None:
        super().__init__()
        width = _check_association("hopfield_association", hopfield_association)
        self.hopfield_association = deepcopy(hopfield_association)
        self.norm_residual = nn.LayerNorm(width, **_factory_kwargs(hopfield_association))
        self._add_feed_forward(hopfield_association, dim_feedforward, dropout, activation)

    @property
    def self_attn(self) -> Hopfield:
        return self.hopfield_association

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Encode a sequence.

        Args:
            src: (batch, L, width), or (L, batch, width) if not ``batch_first``.
            src_mask: ``association_mask`` of :class:`Hopfield`: boolean (True = may not be associated), or added.
            src_key_padding_mask: (batch, L); boolean (True = no pattern), or 0 and −inf.
            is_causal: without ``src_mask``: a position associates with itself and those before it.

        Returns:
            A tensor of the shape of ``src``.
        """
        mask = _causal(src, self.batch_first) if is_causal and src_mask is None else src_mask
        associated = self.hopfield_association(src, _boolean("src_key_padding_mask", src_key_padding_mask), mask)
        return self._feed_forward(self.norm_residual(src + self.dropout(associated)))

    def get_association_matrix(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """The weights of the association, (batch, heads, L, S), before dropout, without gradient."""
        return self.hopfield_association.get_association_matrix(input, stored_pattern_padding_mask, association_mask)


class HopfieldDecoderLayer(_TransformerLayer):
    """A transformer's decoder layer: self-association, association with a memory, and a feed-forward network.

    Each of the three is added to its input and normalised, as in :class:`HopfieldEncoderLayer`. It goes into
    ``torch.nn.TransformerDecoder`` in place of a ``torch.nn.TransformerDecoderLayer``.

    Args:
        hopfield_association_self: relates the target to itself; its output is as wide as its input. It is copied, with
            its parameters, and so is the other.
        hopfield_association_cross: relates the target, its states, to the memory, its stored patterns.
        dim_feedforward: width of the feed-forward network.
        dropout: the share of entries that is dropped in training.
        activation: of the network: a function, or the name of one in torch.

    Example:
        >>> import torch
        >>> from fenchel.hopfield import Hopfield, HopfieldDecoderLayer
        >>> layer = HopfieldDecoderLayer(Hopfield(16), Hopfield(16, stored_pattern_size=8, pattern_projection_size=8))
        >>> layer(torch.randn(3, 7, 16), torch.randn(3, 5, 8), tgt_is_causal=True).shape
        torch.Size([3, 7, 16])

    References: Vaswani et al. (2017); Ramsauer et al. (2021).
    """

    def __init__(
        self,
        hopfield_association_self: Hopfield,
        hopfield_association_cross: Hopfield,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
    ) -> None:
        super().__init__()
        width = _check_association("hopfield_association_self", hopfield_association_self)
        if _check_association("hopfield_association_cross", hopfield_association_cross) != width:
            raise ValueError(
                "hopfield_association_cross must have states as wide as those of hopfield_association_self, "
                f"{width}, got {hopfield_association_cross.state_pattern_size}"
            )
        if hopfield_association_cross.batch_first != hopfield_association_self.batch_first:
            raise ValueError("hopfield_association_cross must have the batch_first of hopfield_association_self")
        factory = _factory_kwargs(hopfield_association_self)
        self.hopfield_association_self = deepcopy(hopfield_association_self)
        self.hopfield_association_cross = deepcopy(hopfield_association_cross)
        self.norm_residual_self = nn.LayerNorm(width, **factory)
        self.norm_residual_cross = nn.LayerNorm(width, **factory)
        self._add_feed_forward(hopfield_association_self, dim_feedforward, dropout, activation)

    @property
    def self_attn(self) -> Hopfield:
        return self.hopfield_association_self

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Decode a sequence.

        Args:
            tgt: (batch, L, width), or (L, batch, width) if not ``batch_first``.
            memory: (batch, S, width of the stored patterns), or (S, batch, …).
            tgt_mask: of target and target: boolean (True = may not be associated), or added.
            memory_mask: of target and memory, the same.
            tgt_key_padding_mask: (batch, L); boolean (True = no pattern), or 0 and −inf.
            memory_key_padding_mask: (batch, S), the same.
            tgt_is_causal: without ``tgt_mask``: a position associates with itself and those before it.
            memory_is_causal: without ``memory_mask``: position i associates with places 0 … i of the memory.

        Returns:
            A tensor of the shape of ``tgt``.
        """
        if tgt_is_causal and tgt_mask is None:
            tgt_mask = _causal(tgt, self.batch_first)
        padding = _boolean("tgt_key_padding_mask", tgt_key_padding_mask)
        tgt = self.norm_residual_self(tgt + self.dropout(self.hopfield_association_self(tgt, padding, tgt_mask)))
        if memory_is_causal and memory_mask is None:
            memory_mask = _causal(tgt, self.batch_first, memory)
        padding = _boolean("memory_key_padding_mask", memory_key_padding_mask)
        associated = self.hopfield_association_cross((memory, tgt, memory), padding, memory_mask)
        return self._feed_forward(self.norm_residual_cross(tgt + self.dropout(associated)))

    def get_association_matrix_self(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """The weights of the self-association, (batch, heads, L, L), before dropout, without gradient."""
        masks = (stored_pattern_padding_mask, association_mask)
        return self.hopfield_association_self.get_association_matrix(input, *masks)

    def get_association_matrix_cross(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """The weights of the association with the memory, (batch, heads, L, S), before dropout, without gradient."""
        masks = (stored_pattern_padding_mask, association_mask)
        return self.hopfield_association_cross.get_association_matrix(input, *masks)


def _check_association(name: str, layer: Hopfield) -> int:
    """Check an association whose output is added to its states; return their width."""
    if not isinstance(layer, Hopfield):
        raise TypeError(f"{name} must be a fenchel.hopfield.Hopfield, got {type(layer).__name__}")
    if layer.output_size != layer.state_pattern_size:
        raise ValueError(
            f"{name} must have an output as wide as its states, to which it is added, got output_size "
            f"{layer.output_size} and states of width {layer.state_pattern_size}"
        )
    return layer.state_pattern_size


def _factory_kwargs(layer: Hopfield) -> dict[str, Any]:
    """The device and dtype of the parameters of a layer, as keyword arguments; none if it has no parameters."""
    for parameter in layer.parameters():
        return {"device": parameter.device, "dtype": parameter.dtype}
    return {}


def _causal(states: Tensor, batch_first: bool, stored: Tensor | None = None) -> Tensor:
    """A causal mask (L, S), True where a stored pattern comes after the state."""
    length, other = (x.shape[1 if batch_first else 0] for x in (states, states if stored is None else stored))
    return torch.ones(length, other, dtype=torch.bool, device=states.device).triu(1)


def _boolean(name: str, padding: Tensor | None) -> Tensor | None:
    """A padding mask as booleans; torch's containers of layers turn it into 0 and −inf."""
    if not isinstance(padding, Tensor) or not padding.is_floating_point():
        return padding
    hidden = padding == -torch.inf
    if not torch.compiler.is_compiling() and not bool((hidden | (padding == 0)).all()):
        raise ValueError(f"{name} must be boolean (True = no pattern), or have no entries but 0 and -inf")
    return hidden

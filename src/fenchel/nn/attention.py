"""Multi-head attention with any regularizer, drop-in for ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count, check_flag, check_kind, check_number
from fenchel._torch import nested_from_mask
from fenchel.regularizers import Regularizer, Tsallis
from fenchel.regularizers.base import check_omega
from fenchel.regularizers.rows import combine_masks
from fenchel.streaming.dot_product import masked_attention


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with its signature and its ``state_dict``, plus ``omega``.

    A trained softmax model loads as it is: ``Shannon()`` reproduces it, any other regularizer makes it sparse.
    A learnable alpha adds its own key; give it ``shape=(num_heads, 1, 1)`` for one alpha per head.

    Masks are torch's: True in a boolean ``attn_mask`` or ``key_padding_mask`` means *may not attend*; a float mask is
    added. A query that may attend to nothing gets zero weights. ``is_causal`` works with and without ``attn_mask``.
    The weights that are returned are those before dropout; with ``need_weights=False`` no matrix of them is made, and
    long inputs take little memory, as in :func:`fenchel.attention`.

    With ``sink=True`` each head has a learned score, the parameter ``sink`` (num_heads,), zero at first, that competes
    with the keys and has no value: a head can attend to nothing.

    Example:
        >>> import torch, fenchel
        >>> _ = torch.manual_seed(0)
        >>> layer = fenchel.nn.MultiheadAttention(16, 4, batch_first=True, omega=fenchel.Gini())
        >>> x = torch.randn(2, 5, 16)
        >>> output, weights = layer(x, x, x, average_attn_weights=False)
        >>> output.shape, weights.shape, bool((weights == 0).any())
        (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]), True)

    References: Vaswani et al. (2017); Correia, Niculae & Martins (2019).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        omega: Regularizer | None = None,
        sink: bool = False,
    ) -> None:
        check_number(dropout, "dropout", 0, 1, ends="[]")
        if check_count(embed_dim, "embed_dim") % check_count(num_heads, "num_heads"):
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width is not None:
                check_count(width, name)
        flags = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "batch_first": batch_first}
        for name, flag in (flags | {"sink": sink}).items():
            check_flag(flag, name)
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.omega = Tsallis(1.5) if omega is None else check_omega(omega)
        self.sink = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sink else None

    def extra_repr(self) -> str:
        shown = f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout:g}, batch_first={self.batch_first}"
        return shown if getattr(self, "sink", None) is None else f"{shown}, sink=True"

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # torch's encoder layers read this flag to bypass the module for a fused softmax kernel: never here.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments, shapes and results are those of ``torch.nn.MultiheadAttention``."""
        for name, given in (("query", query), ("key", key), ("value", value)):
            check_kind(given, name, Tensor, what="a tensor")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                check_kind(mask, name, Tensor, what="a tensor")
        check_flag(need_weights, "need_weights")
        if query.is_nested:
            return self._forward_nested(query, key, value, need_weights, average_attn_weights)
        if query.dim() not in (2, 3):
            raise ValueError(f"query must have 2 dimensions (unbatched) or 3, got shape {tuple(query.shape)}")
        for name, other in (("key", key), ("value", value)):
            if other.dim() != query.dim():
                raise ValueError(f"{name} must have {query.dim()} dimensions as query has, got {tuple(other.shape)}")
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise ValueError(f"{name} must have width {width}, got shape {tuple(x.shape)}")
        batched = query.dim() == 3
        batch = 0 if self.batch_first else 1
        for name, other in (("key", key), ("value", value)) if batched else ():
            if other.shape[batch] != query.shape[batch]:
                raise ValueError(f"{name} must have query's batch of {query.shape[batch]}, got {tuple(other.shape)}")
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        appended = self.bias_k is not None or self.add_zero_attn
        if is_causal and attn_mask is None and appended:  # every query sees what is appended
            attn_mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).triu(1)
        is_causal = is_causal and attn_mask is None
        mask = self._merge(query, key, attn_mask, key_padding_mask)
        query, key, value = (self._split(x) for x in self._append(*self._project(query, key, value)))
        if mask is not None and appended:
            mask = F.pad(mask, (0, key.shape[-2] - mask.shape[-1]), value=1.0 if mask.dtype == torch.bool else 0.0)
        dropout = self.dropout if self.training else 0.0
        sink = getattr(self, "sink", None)  # layers that were pickled before there were sinks have none
        result = masked_attention(
            query,
            key,
            value,
            self.omega,
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=dropout,
            return_weights=need_weights,
            sink=None if sink is None else sink.reshape(-1, 1, 1),
        )
        output, weights = result if need_weights else (result, None)
        output = self.out_proj(output.transpose(1, 2).flatten(-2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            output, weights = output.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sequences of different lengths, as ``torch.nn.TransformerEncoder`` passes them in evaluation."""
        present = [
            torch.arange(max(lengths := [len(x) for x in nested.unbind()]), device=nested.device)
            < torch.tensor(lengths, device=nested.device).unsqueeze(-1)
            for nested in (query, key)
        ]
        output, weights = self(
            *(x.to_padded_tensor(0.0) for x in (query, key, value)),
            key_padding_mask=~present[1],
            need_weights=need_weights,
            average_attn_weights=average_attn_weights,
        )
        return nested_from_mask(output, present[0]), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _append(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The learned key and value of ``add_bias_kv``, then the zeros of ``add_zero_attn``."""
        batch = key.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            key = torch.cat([key, self.bias_k.expand(batch, 1, -1).to(key.dtype)], 1)
            value = torch.cat([value, self.bias_v.expand(batch, 1, -1).to(value.dtype)], 1)
        if self.add_zero_attn:
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        return query, key, value

    def _split(self, x: Tensor) -> Tensor:
        """(batch, length, width) as (batch, heads, length, width of a head)."""
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def _merge(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """One mask, broadcasting to (batch, heads, L, S): boolean (True = takes part), or to be added to the scores."""
        batch, targets, sources = query.shape[0], query.shape[1], key.shape[1]
        dtype = torch.promote_types(query.dtype, torch.float32)  # that of the scores
        if attn_mask is not None:
            expected = {2: (targets, sources), 3: (batch * self.num_heads, targets, sources)}
            if tuple(attn_mask.shape) != expected.get(attn_mask.dim()):
                raise ValueError(
                    f"attn_mask must have shape {expected[2]} or {expected[3]}, got {tuple(attn_mask.shape)}"
                )
            attn_mask = _takes_part(attn_mask, dtype, "attn_mask")
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.reshape(batch, self.num_heads, targets, sources)
        if padding is not None:
            if tuple(padding.shape) != (batch, sources):
                raise ValueError(f"key_padding_mask must have shape {(batch, sources)}, got {tuple(padding.shape)}")
            padding = _takes_part(padding, dtype, "key_padding_mask")[:, None, None, :]
        return combine_masks(attn_mask, padding)


def _takes_part(mask: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A mask of torch's layers as ``fenchel.attention`` takes it."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean (True = may not attend) or floating point, got {mask.dtype}")
    return mask.to(dtype)

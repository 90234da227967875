"""Tensors that belong together are on one device; the meta device stands for another one here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel.dp import Alignment, LinearChain
from fenchel.hopfield import Memory

X, Y = torch.eye(3), torch.arange(3)
FAR, FAR_Y = X.to("meta"), Y.to("meta")
MASK = torch.ones(3, 3, dtype=torch.bool, device="meta")

CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "keys": ("key", lambda: fenchel.attention(X, FAR, X)),
    "values": ("value", lambda: fenchel.attention(X, X, FAR)),
    "mask of attention": ("attn_mask", lambda: fenchel.attention(X, X, X, attn_mask=MASK)),
    "sink": ("sink", lambda: fenchel.attention(X, X, X, sink=FAR[:1, :1])),
    "weight": ("weight", lambda: fenchel.linear_entmax_loss(X, FAR, Y)),
    "bias": ("bias", lambda: fenchel.linear_entmax_loss(X, X, Y, bias=FAR[0])),
    "classes of a layer": ("target", lambda: fenchel.linear_entmax_loss(X, X, FAR_Y)),
    "class weight": ("class_weight", lambda: fenchel.linear_entmax_loss(X, X, Y, class_weight=FAR[0])),
    "mask": ("mask", lambda: fenchel.entmax(X, mask=MASK)),
    "classes": ("target", lambda: fenchel.entmax_loss(X, FAR_Y)),
    "probabilities": ("target", lambda: fenchel.Gini().loss(X, FAR)),
    "values of a memory": ("values", lambda: Memory(X, values=FAR)),
    "queries": ("query", lambda: Memory(X).step(FAR)),
}


@pytest.mark.parametrize("case", CALLS)
def test_tensors_on_other_devices_are_refused_by_name(case: str) -> None:
    name, call = CALLS[case]
    with pytest.raises(ValueError, match=rf"^{name} must be on the device of \w+, \w+, got \w+$"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: LinearChain(X[None], FAR),
        lambda: LinearChain(X[None], X, lengths=torch.tensor([3], device="meta")),
        lambda: LinearChain(X[None], X).loss(FAR_Y[None]),
        lambda: Alignment(X[None], lengths=torch.ones(1, 2, dtype=torch.long, device="meta")),
    ],
)
def test_programs_refuse_tensors_on_other_devices(call: Callable[[], Tensor]) -> None:
    with pytest.raises(ValueError, match="all tensors of a program must be on one device, got cpu and meta"):
        call()


def test_integers_of_programs_may_be_on_the_cpu() -> None:
    chain = LinearChain(FAR[None], FAR, lengths=torch.tensor([3]))
    assert chain.loss(Y[None]).is_meta

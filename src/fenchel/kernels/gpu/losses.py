"""The parameter of a row, and its class loss: what the kernels of narrow and of wide rows share."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from fenchel.kernels.gpu.arithmetic import TOTAL, jit


@jit
def load_alpha(
    ALPHA: tl.tensor,
    r: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    z: tl.tensor,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
) -> Any:
    """α, and c = α − 1 in the precision of z: a number, or for normmax one per row (R, 1)."""
    if KIND == TOTAL:
        alpha = tl.load(ALPHA + tl.program_id(0).to(tl.int64) * stride).to(tl.float64)
    elif EACH:
        alpha = tl.load(ALPHA + r.to(tl.int64) * stride, mask=r < rows, other=2.0).to(tl.float64)[:, None]
    else:
        alpha = tl.load(ALPHA).to(tl.float64)
    return alpha, (alpha - 1.0).to(z.dtype)


@jit
def is_wrong(alpha: tl.tensor, NORM: tl.constexpr) -> Any:
    """1 where α is not allowed, NaN included: such rows are NaN."""
    return tl.where(alpha > (1.0 if NORM else 0.0), 0, 1)


@jit
def target(Z: tl.tensor, Y: tl.tensor, exists: tl.tensor, n: tl.tensor, DTYPE: tl.constexpr) -> Any:
    """The class index of a row that begins at Z, −1 where there is no row; its score; whether there is no such class.

    Nobody has checked class indices on a device: the loss of a class that does not exist is NaN.
    """
    y = tl.load(Y, mask=exists, other=-1).to(tl.int64)
    reached = tl.load(Z + y, mask=(y >= 0) & (y < n), other=float("-inf")).to(DTYPE)
    return y, reached, y >= n


@jit
def class_loss(
    along: tl.tensor,
    offset: tl.tensor,
    c: tl.tensor,
    reached: tl.tensor,
    empty: tl.tensor,
    bad: tl.tensor,
    NORM: tl.constexpr,
) -> Any:
    """max_Ω − z at the target, for rows with largest score 0, from ⟨p, z⟩ and the offset.

    On the support of entmax ln_c(p) = z − A, so that Ω = (⟨p, z⟩ − A)/α, and max_Ω = (c⟨p, z⟩ + A)/α. For normmax
    max_Ω = A. Neither is below the largest score.
    """
    if NORM:
        value = tl.maximum(offset, 0.0)
    else:
        value = tl.where(c == float("inf"), 0.0, (c * along + offset) / (1.0 + c))
        value = tl.maximum(value, 0.0)
    possible = (tl.where(empty, 1, 0) + tl.where(reached == float("-inf"), 1, 0)) == 0
    loss = tl.where(possible, value - tl.where(possible, reached, 0.0), float("inf"))
    return tl.where(bad, float("nan"), loss)

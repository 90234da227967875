"""entmax within groups of entries that an index names: what graph networks do with a segment softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._checks import check_count, check_floats, check_integers
from fenchel._torch import beneath_derivatives, outside_graphs, readable, without_transforms
from fenchel.regularizers.packed import Rows, Segments
from fenchel.regularizers.tsallis import TSALLIS, check_alpha


@outside_graphs("segment_entmax")
def segment_entmax(scores: Tensor, index: Tensor, alpha: float | Tensor = 1.5, dim_size: int | None = None) -> Tensor:
    r"""Maximize a linear score minus Tsallis negentropy within each group of entries along dimension 0.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s_g \rangle - \Omega_\alpha(p)
        \quad \text{for the entries } s_g \text{ of each group } g

    It is :func:`fenchel.entmax` of each group: alpha 1 is a segment softmax, 2 sparsemax, inf shares the mass among the
    best entries. Groups need not be sorted, and may be empty. Groups of similar size are computed together. O(n) time
    plus that of ``entmax`` for a sorted index, with a sort O(n log n).

    Args:
        scores: (n, …), floating point. Scores of −inf are masked. Further dimensions are chosen in independently.
        index: integers (n,): the group of each entry, 0 … dim_size − 1.
        alpha: a number in (0, inf], or a tensor with one value, one per group (dim_size,), or one per group and further
            dimension (dim_size, …); differentiable.
        dim_size: the number of groups; the length of ``alpha``, or one more than the largest index, if None.

    Returns:
        Probabilities of the shape and dtype of ``scores``; those of a group sum to 1, or are 0 if all are masked.

    Example:
        >>> import torch, fenchel
        >>> scores = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0])
        >>> fenchel.segment_entmax(scores, torch.tensor([0, 1, 0, 1, 3]))
        tensor([0.6740, 0.8307, 0.3260, 0.1693, 1.0000])
    """
    check_floats(scores, "scores")
    if scores.dim() == 0:
        raise ValueError("scores must have at least one dimension, got a scalar")
    index = beneath_derivatives(check_integers(index, "index"))
    if index.shape != scores.shape[:1]:
        raise ValueError(
            f"index must have shape ({scores.shape[0]},), one group per entry of scores, got {tuple(index.shape)}"
        )
    if not readable(index):
        raise RuntimeError(
            "segment_entmax cannot be traced or exported, and needs data (no fake or meta tensors), and one index for "
            "all of vmap: its rows depend on the index"
        )
    alpha = check_alpha(alpha)
    several = isinstance(alpha, Tensor) and alpha.numel() != 1
    if dim_size is None and isinstance(alpha, Tensor) and several:
        dim_size = len(alpha)
    if dim_size is not None:
        check_count(dim_size, "dim_size", 0)
    with without_transforms():
        segments, (low, high) = Segments.of_index(index)
    if low < 0 or (dim_size is not None and high >= dim_size):
        allowed = "be at least 0" if dim_size is None else f"be at least 0 and less than dim_size, {dim_size}"
        raise ValueError(f"index must {allowed}, got {low if low < 0 else high}")
    if isinstance(alpha, Tensor):
        alpha = _per_group(alpha, scores, dim_size, segments.table[2]) if several else alpha.reshape(())
    if not scores.numel():
        return scores.clone()

    def chosen(rows: Rows) -> Tensor:
        own = rows.each(alpha).unsqueeze(1) if isinstance(alpha, Tensor) and alpha.dim() else alpha
        return TSALLIS.choose(rows.entries(scores, -torch.inf), -1 if scores.dim() == 1 else 1, None, "alpha", own)

    return segments.join([(rows, chosen(rows)) for rows in segments.rows()])


def _per_group(alpha: Tensor, scores: Tensor, dim_size: int | None, groups: Tensor) -> Tensor:
    """One alpha per group that has entries, with the number of dimensions of the scores."""
    full = alpha.reshape(*alpha.shape, *[1] * (scores.dim() - 1)) if alpha.dim() == 1 else alpha
    sizes = tuple(zip(full.shape[1:], scores.shape[1:], strict=False))
    if full.dim() != scores.dim() or len(full) != dim_size or any(a not in (1, b) for a, b in sizes):
        raise ValueError(
            f"alpha must be a number or have one value per group, shape ({dim_size},), or one per group and further "
            f"dimension of scores, got {tuple(alpha.shape)} for scores of shape {tuple(scores.shape)}"
        )
    return full.index_select(0, groups)

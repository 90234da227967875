"""Dependency trees: every word has one head, and the root has none."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_entries, check_flag
from fenchel.kernels.compilation import run
from fenchel.regularizers.configs import written_by
from fenchel.structures.base import Array, Oracle, Searched, Sums


@written_by("projective", "single_root")
class DependencyTree(Searched):
    r"""All trees over N words and a root.

    Scores (…, N, N+1): [modifier, head], head 0 is the root, head j the j-th word; what stands at a word's arc to
    itself does not matter. Words with every head masked are not in the sentence, neither as modifiers nor as heads: a
    mask of shape (…, N, 1) gives sentences of different lengths. Chu-Liu-Edmonds' algorithm in O(N²), or Eisner's in
    O(N³) for projective trees.

    Targets of ``SparseMAP(DependencyTree()).loss`` are trees of zeros and ones, or the head of each word: integers of
    shape (…, N), 0 for the root, j for the j-th word, −1 for a word that is not in the sentence.

    Args:
        projective: only trees whose arcs do not cross, with the root in front of the sentence.
        single_root: only trees with exactly one word on the root.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.structures import DependencyTree
        >>> scores = torch.tensor([[1.0, 0.0, 0.8], [1.1, 0.7, 0.0]])
        >>> DependencyTree().map(scores).argmax(-1), DependencyTree(single_root=True).map(scores).argmax(-1)
        (tensor([0, 0]), tensor([2, 0]))
        >>> fenchel.SparseMAP(DependencyTree()).argmax(scores)
        tensor([[0.6000, 0.0000, 0.4000],
                [0.7000, 0.3000, 0.0000]])
        >>> fenchel.SparseMAP(DependencyTree()).loss(scores, torch.tensor([2, 0]))
        tensor(0.4500)

    References: Edmonds (1967); Eisner (1996); Niculae, Martins, Blondel & Cardie (2018).
    """

    event_dim = 2
    fixed_dims = 1

    def __init__(self, projective: bool = False, single_root: bool = False) -> None:
        super().__init__()
        self.projective = check_flag(projective, "projective")
        self.single_root = check_flag(single_root, "single_root")

    def key(self) -> Hashable | None:
        return (DependencyTree, self.projective, self.single_root) if type(self) is DependencyTree else None

    def check(self, shape: torch.Size) -> None:
        if shape[-1] != shape[-2] + 1:
            raise ValueError(
                f"scores must have shape (…, N, N + 1), [modifier, head] with head 0 the root, got {tuple(shape)}"
            )

    def possible(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        n = shape[-2]
        return torch.arange(n, device=device)[:, None] + 1 != torch.arange(n + 1, device=device)

    def expand_target(self, target: Tensor, shape: torch.Size) -> Tensor:
        n = shape[-2]
        whole = target.dtype == torch.bool or target.is_floating_point() or target.is_complex()
        if whole or target.shape != shape[:-1]:
            return target
        allowed = f"hold heads from 0, the root, to {n}, the last word, or −1 for a word that is not in the sentence"
        check_entries((target >= -1) & (target <= n), target, "target", allowed)
        words = torch.arange(1, n + 1, device=target.device)
        check_entries(target != words, target, "target", "hold trees, in which no word is its own head")
        return (target.unsqueeze(-1) == torch.arange(n + 1, device=target.device)).double()

    def sums(self, shape: torch.Size) -> Sums | None:
        n = shape[0]
        parts = np.arange(n * (n + 1)).reshape(shape)
        root = np.append(parts[:, 0], n * (n + 1))
        return Sums(np.concatenate([parts, root[None]]), np.ones(n + 1), exact=False)

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        from fenchel.kernels.cpu.structures.trees import best_projective, best_trees

        n = shape[0]
        kernel = best_projective if self.projective else best_trees
        places = (np.arange(n) * (n + 1)).astype(np.int32)

        def best(scores: Array, rows: Array) -> tuple[Array, Array]:
            heads, bonus = np.empty((len(rows), n), np.int32), np.empty(len(rows))
            run(kernel, len(rows), 8 * scores.size, rows, scores.reshape(-1, *shape), heads, bonus, self.single_root)
            absent = heads < 0
            found = np.where(absent, -1, heads + places)
            if absent.any():  # words that are left out come last
                found = np.take_along_axis(found, np.argsort(absent, axis=-1, kind="stable"), -1)
            return np.ascontiguousarray(found), bonus

        return best

    def explorer(self, batch: torch.Size, shape: torch.Size) -> tuple[Any, ...] | None:
        from fenchel.kernels.cpu.structures.exploration import explore_trees

        return None if self.projective else (explore_trees, shape[-2], self.single_root)

    def extra_repr(self) -> str:
        return f"projective={self.projective}, single_root={self.single_root}"

"""Packed rows: choices within groups of entries of different sizes, by the maps of rows of one size.

Groups of similar size become the rows of one matrix, with the rest of each row masked: all matrices together have at
most four times as many entries. ``Segments`` does that for groups along dimension 0, ``on_packed`` for jagged nested
tensors, whose sequences are such groups.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import distributed_rule, is_distributed, jagged_parts, known, readable
from fenchel.regularizers.rows import check_scores

if TYPE_CHECKING:
    from fenchel.regularizers.base import Regularizer

F = TypeVar("F", bound=Callable[..., Any])


# -- groups along dimension 0 ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Groups of similar size as the rows of a matrix.

    Args:
        groups: (m,), which groups; None for all of them in their order.
        places: (m, w), the index of each entry of the matrix; None if entries 0 … m·w − 1 stand there in this order.
        present: boolean (m, w), where the matrix has an entry; None if it is full.
        shape: (m, w).
    """

    groups: Tensor | None
    places: Tensor | None
    present: Tensor | None
    shape: tuple[int, int]

    def entries(self, values: Tensor, fill: float) -> Tensor:
        """The matrix (m, w, …) of entries (n, …), with ``fill`` where there is none."""
        if self.places is None:
            return values.reshape(*self.shape, *values.shape[1:])
        full = values.index_select(0, self.places.flatten()).reshape(*self.shape, *values.shape[1:])
        if self.present is None:
            return full
        present = self.present.reshape(*self.shape, *[1] * (values.dim() - 1))
        return torch.where(present, full, torch.full((), fill, dtype=values.dtype, device=values.device))

    def each(self, values: Tensor) -> Tensor:
        """One value per row (m, …), of values per group."""
        return values if self.groups is None else values.index_select(0, self.groups)


@dataclass(frozen=True)
class Segments:
    """Groups of entries along dimension 0.

    Args:
        table: (2 or more, G), where each group begins, and how many entries it has.
        count: the number of entries, n.
        order: (n,), the entries in the order of their groups; None if they stand in this order.
        sizes: the smallest and the largest number of entries; None if they are not known.
    """

    table: Tensor
    count: int
    order: Tensor | None = None
    sizes: tuple[int, int] | None = None

    @classmethod
    def of_index(cls, index: Tensor) -> tuple[Segments, tuple[int, int]]:
        """The groups of entries with one index, (n,), and the first and the last index.

        The third row of their table is the index of each group, which increases.
        """
        order = None
        table, (least, most, first, last, falls) = _runs(index)
        if falls:
            index, order = index.sort(stable=True)
            table, (least, most, first, last, _) = _runs(index)
        return cls(table, index.shape[0], order, (least, most)), (first, last)

    @property
    def lengths(self) -> Tensor:
        """How many entries each group has, (G,)."""
        return self.table[1]

    def rows(self, empty: bool = False, full: bool = False) -> Iterator[Rows]:
        """All groups, some at a time, as matrices.

        Args:
            empty: whether groups without entries are rows of width 1, or left out.
            full: whether the groups of a matrix must have one size.
        """
        if self.sizes is not None and self.sizes[0] == self.sizes[1] > 0:
            yield self.of(None)
            return
        for groups in similar(self.lengths, empty, full):
            yield self.of(groups)

    def of(self, groups: Tensor | None) -> Rows:
        """Some of the groups, or all, as the rows of a matrix as wide as the largest."""
        table = self.table if groups is None else self.table.index_select(1, groups)
        least, width = _sizes(table[1]) if groups is not None or self.sizes is None else self.sizes
        shape = table.shape[1], max(width, 1)
        full = least == width > 0
        if full and groups is None and self.order is None and math.prod(shape) == self.count:
            return Rows(groups, None, None, shape)
        starts, lengths = table[0], table[1]
        column = torch.arange(shape[1], device=lengths.device)
        places = starts.unsqueeze(-1) + column
        present = None if full else column < lengths.unsqueeze(-1)
        places = places if present is None else torch.where(present, places, 0)
        return Rows(groups, places if self.order is None else self.order[places], present, shape)

    def join(self, parts: Sequence[tuple[Rows, Tensor]]) -> Tensor:
        """Entries (n, …) of matrices (m, w, …), one per part; 0 where no part has an entry."""
        rows, first = parts[0]
        if rows.places is None:
            return first.flatten(0, 1)
        taken, found = [], []
        for rows, matrix in parts:
            assert rows.places is not None
            flat, places = matrix.flatten(0, 1), rows.places.flatten()
            if rows.present is not None:
                kept = rows.present.flatten().nonzero().squeeze(-1)
                flat, places = flat.index_select(0, kept), places.index_select(0, kept)
            taken.append(places)
            found.append(flat)
        zeros = first.new_zeros(self.count, *first.shape[2:])
        return zeros.index_copy(0, torch.cat(taken), torch.cat(found))

    def join_groups(self, parts: Sequence[tuple[Rows, Tensor]]) -> Tensor:
        """Values per group (G, …) of values per row (m, …)."""
        rows, first = parts[0]
        if rows.groups is None:
            return first
        taken = torch.cat([cast(Tensor, rows.groups) for rows, _ in parts])
        zeros = first.new_zeros(self.table.shape[1], *first.shape[1:])
        return zeros.index_copy(0, taken, torch.cat([each for _, each in parts]))


def _runs(index: Tensor) -> tuple[Tensor, tuple[int, int, int, int, int]]:
    """The runs of equal entries of an index, as in ``kernels.cpu.segments``."""
    kernel = kernels.find("runs", "index", (), index) if index.numel() else None
    if kernel is not None:
        found: tuple[Tensor, tuple[int, int, int, int, int]] = kernel(index)
        return found
    values, lengths = index.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    table = torch.stack([lengths.cumsum(0) - lengths, lengths, values])
    if not len(values):
        return table, (0, 0, 0, -1, 0)
    falls = (values[1:] < values[:-1]).sum()
    least, most = lengths.aminmax()
    return table, tuple(torch.stack([least, most, values[0], values[-1], falls]).tolist())


def _sizes(lengths: Tensor) -> tuple[int, int]:
    """The smallest and the largest of lengths."""
    least, most = torch.stack(lengths.aminmax()).tolist()
    return least, most


def similar(lengths: Tensor, empty: bool = False, full: bool = False) -> Iterator[Tensor | None]:
    """Groups of similar length, or of one length, (m,) each; None if all may be rows of one matrix."""
    count = len(lengths)
    if not count:
        return
    least, most, total = torch.stack([*lengths.aminmax(), lengths.sum()]).tolist()
    if least == most > 0 or (not full and (least > 0 or empty) and count * max(most, 1) <= 2 * max(total, count)):
        yield None
        return
    kind = lengths
    if not full:  # up to 4, 8, 16, …
        kind = torch.bucketize(lengths, 2 ** torch.arange(2, max(int(most).bit_length(), 2) + 1, device=lengths.device))
    for each in sorted(set(kind.tolist())):
        groups = ((kind == each) & (lengths >= (0 if empty else 1))).nonzero().squeeze(-1)
        if len(groups):
            yield groups


# -- jagged nested tensors -------------------------------------------------------------------------------------------


def is_packed(value: object) -> bool:
    """Whether a value is a nested tensor, of any layout."""
    return isinstance(value, Tensor) and value.is_nested


class Packed:
    """The parts of a jagged nested tensor (B, …, j, …): B sequences, each with its own size in the ragged dimension.

    Args:
        tensor: the nested tensor.
        name: of the argument, for errors.
    """

    def __init__(self, tensor: Tensor, name: str = "scores") -> None:
        if tensor.layout != torch.jagged:
            raise TypeError(
                f"{name} must be a nested tensor of layout torch.jagged, got {tensor.layout}; make it by "
                "torch.nested.nested_tensor(…, layout=torch.jagged)"
            )
        self.name, self.rank = name, tensor.dim()
        self.values, self.offsets, self.gaps, self.ragged = jagged_parts(tensor)
        if not readable(self.offsets):
            raise ValueError(f"{name} must have offsets that can be read: not in torch.compile or vmap")
        self.lengths = torch.diff(self.offsets) if self.gaps is None else self.gaps
        self.starts = self.offsets[:-1]
        self.places: Tensor | None = None
        self.size = self.values.shape[self.ragged - 1]
        self._total = self.size
        if self.gaps is not None:  # entries between sequences belong to none
            self.places = torch.repeat_interleave(self.starts, self.lengths) + self._within()
            self.starts = self.lengths.cumsum(0) - self.lengths
            self.values = self.values.index_select(self.ragged - 1, self.places)
            self.size = self.values.shape[self.ragged - 1]

    def _within(self) -> Tensor:
        """The place of each entry in its sequence."""
        ends = self.lengths.cumsum(0)
        first = torch.repeat_interleave(ends - self.lengths, self.lengths)
        return torch.arange(len(first), device=first.device) - first

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Its shape, for errors."""
        sizes: list[int | str] = list(self.values.shape)
        sizes[self.ragged - 1] = "j"
        return (len(self.lengths), *sizes)

    @property
    def largest(self) -> Tensor:
        """A tensor without data, of the shape that padding gives; for questions about shapes."""
        sizes = list(self.values.shape)
        sizes[self.ragged - 1] = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        return torch.empty(len(self.lengths), *sizes, dtype=self.values.dtype, device="meta")

    def segments(self) -> Segments:
        """The sequences as groups of ``self.along()``."""
        return Segments(torch.stack([self.starts, self.lengths]), self.size)

    def along(self) -> Tensor:
        """Entries with the ragged dimension first, (n, …)."""
        return self.values.movedim(self.ragged - 1, 0)

    def nested(self, values: Tensor, ragged: int | None = None) -> Tensor:
        """A nested tensor of these sequences from values, whose ragged dimension is ``ragged`` − 1."""
        ragged = self.ragged if ragged is None else ragged
        if self.places is not None:
            sizes = list(values.shape)
            sizes[ragged - 1] = self._total
            values = values.new_zeros(sizes).index_copy(ragged - 1, self.places, values)
        return torch.nested.nested_tensor_from_jagged(values, self.offsets, self.gaps, jagged_dim=ragged)

    def match(self, other: Tensor, name: str, ragged: int) -> Tensor:
        """The values of another nested tensor with the same sequences, the ragged dimension at ``ragged``."""
        packed = Packed(other, name)
        if packed.ragged != ragged or not torch.equal(packed.lengths, self.lengths):
            raise ValueError(
                f"{name} must have the sequences of {self.name}: nested, of the same lengths, with the ragged "
                f"dimension at {ragged}; got shape {packed.shape} for {self.name} of shape {self.shape}"
            )
        return packed.values

    def check_classes(self, target: Tensor, kept: Tensor | None) -> None:
        """Check the place of one entry of each sequence, or of some."""
        expected = (len(self.lengths), *self.along().shape[1:])
        if target.is_nested or target.shape != expected:
            shape = "nested" if target.is_nested else tuple(target.shape)
            raise ValueError(
                f"target of class indices must have shape {expected}, one per sequence of {self.name} of shape "
                f"{self.shape} with classes along the ragged dimension, got {shape}"
            )
        wrong = (target < 0) | (target >= self.lengths.reshape(-1, *[1] * (target.dim() - 1)))
        wrong = wrong if kept is None else wrong & kept
        if known(target, self.lengths) and bool(wrong.any()):
            place = int(wrong.nonzero()[0, 0])
            raise ValueError(
                f"target must hold places in sequences, which begin with 0; got {target[wrong][0].item()} for sequence "
                f"{place} of length {self.lengths[place].item()}"
            )

    def spread(self, other: Tensor, name: str, ragged: int, rank: int) -> Tensor:
        """A dense tensor (B or 1, …, 1, …) with the ragged dimension first: (B or 1, 1, …)."""
        if other.dim() > rank:
            raise ValueError(f"{name} must broadcast to {self.name} of shape {self.shape}, got {tuple(other.shape)}")
        full = other.reshape((1,) * (rank - other.dim()) + tuple(other.shape))
        if full.shape[ragged] != 1 or full.shape[0] not in (1, len(self.lengths)):
            raise ValueError(
                f"{name} must be nested as {self.name} is, or have size 1 in its ragged dimension {ragged}: "
                f"{self.name} has shape {self.shape}, {name} {tuple(other.shape)}"
            )
        return full.movedim(ragged, 1)


def on_packed(
    call: Callable[..., Tensor],
    packed: Packed,
    dim: Any,
    dims: tuple[int, ...],
    others: Mapping[str, Any],
    *,
    per_row: bool,
    masks: bool = True,
    kept: Tensor | None = None,
) -> Tensor:
    """Call a function of dense rows on packed ones.

    Args:
        call: takes scores, ``dim`` and the others by name; returns a tensor of the shape of scores, or with ``per_row``
            one without ``dims``.
        packed: the scores.
        dim: the argument, for errors and for choices in other dimensions than the ragged one.
        dims: the dimensions that it means, counted from the front.
        others: further arguments; tensors among them are nested as the scores are, or dense with size 1 in the ragged
            dimension. ``target`` may be class indices: a tensor without the dimension of the choice.
        per_row: whether the result has one value per row.
        masks: whether a score of −inf is masked; if not, only sequences of one length are rows of one matrix.
        kept: which class indices of a target count; None for all.

    Returns:
        A nested tensor; values per sequence are a dense one.
    """
    ragged = packed.ragged
    if 0 in dims:
        raise ValueError(f"dim must not be the batch dimension of packed scores, got {dim} for shape {packed.shape}")
    if ragged not in dims:
        before = sum(d < ragged for d in dims)
        given = {name: _beside(packed, name, value, dims, before) for name, value in others.items()}
        result = call(packed.values, dim=_inner(dim), **given)
        return packed.nested(result, ragged - before if per_row else ragged) if result.dim() else result
    if len(dims) > 1:
        raise ValueError(f"dim must be one dimension where it is ragged, got {dim} for scores of shape {packed.shape}")
    if not len(packed.lengths):
        return packed.values.movedim(ragged - 1, 0)[:0] if per_row else packed.nested(packed.values)
    if isinstance(target := others.get("target"), Tensor) and _is_class("target", target):
        packed.check_classes(target, kept)
    segments, values = packed.segments(), packed.along()
    others = {name: _by_group(packed, name, value) for name, value in others.items()}
    parts = []
    for rows in segments.rows(empty=per_row, full=not masks):
        given = {name: value(rows) if callable(value) else value for name, value in others.items()}
        parts.append((rows, call(rows.entries(values, -math.inf if masks else 0.0), dim=1, **given)))
    if per_row:
        return segments.join_groups(parts)
    return packed.nested(segments.join(parts).movedim(0, ragged - 1) if parts else packed.values)


def _inner(dim: Any) -> Any:
    """A dimension of the nested tensor as one of its values, which lack the first; negative ones are the same."""
    if isinstance(dim, tuple):
        return tuple(map(_inner, dim))
    return dim - 1 if dim is not None and dim >= 0 else dim


def _is_class(name: str, value: Tensor) -> bool:
    return name == "target" and not value.is_floating_point()


def _beside(packed: Packed, name: str, value: Any, dims: tuple[int, ...], before: int) -> Any:
    """An argument beside the values of the scores."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and not value.is_nested):
        return value
    fewer = len(dims) if _is_class(name, value) else 0
    ragged = packed.ragged - (before if fewer else 0)
    if value.is_nested:
        return packed.match(value, name, ragged)
    full = packed.spread(value, name, ragged, packed.rank - fewer)
    if len(full) == 1:
        return full.squeeze(0).movedim(0, ragged - 1)
    ids = torch.repeat_interleave(packed.lengths)
    return full.squeeze(1).index_select(0, ids).movedim(0, ragged - 1)


def _by_group(packed: Packed, name: str, value: Any) -> Any:
    """An argument beside the scores of some sequences, as a function of ``Rows``."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and not value.is_nested):
        return value
    if _is_class(name, value):
        return lambda rows: rows.each(value)
    if value.is_nested:
        entries = packed.match(value, name, packed.ragged).movedim(packed.ragged - 1, 0)
        return lambda rows: rows.entries(entries, 0.0)
    full = packed.spread(value, name, packed.ragged, packed.rank)
    return full if len(full) == 1 else lambda rows: rows.each(full)


def map_parts(
    function: Callable[..., Tensor],
    scores: Tensor,
    dim: int,
    mask: Tensor | None,
    family: tuple[str | None, Any, Any],
    **parameters: Any,
) -> Tensor | None:
    """A map of a jagged nested tensor or a DTensor, by a function of their dense parts; None for other scores.

    Args:
        function: the map, of scores, ``dim``, ``mask`` and parameters by name.
        scores: of any kind.
        dim: the dimension to choose along.
        mask: boolean, or None.
        family: the name, the parameter and the factor of Ω, which say how rows can be spread over ranks.
        parameters: of the map.
    """
    others = {"mask": mask, **parameters}
    if is_packed(scores):
        packed = Packed(scores)
        return on_packed(function, packed, dim, (check_scores(packed.largest, dim),), others, per_row=False)
    if not is_distributed(scores):
        return None
    found: Tensor = distributed_rule("rows")(function, scores, dim, (check_scores(scores, dim),), others, False, family)
    return found


def takes_packed(method: F) -> F:
    """Let a method of an Ω, of scores, ``dim`` and a target or a mask, take jagged nested tensors and DTensors."""

    @functools.wraps(method)
    def call(self: Regularizer, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_packed(scores) or is_distributed(scores):
            return _call_on_parts(method, self, scores, *args, **kwargs)
        return method(self, scores, *args, **kwargs)

    return takes_packed_itself(cast(F, call))


def takes_packed_itself(method: F) -> F:
    """Mark a method of an Ω that takes jagged nested tensors and DTensors without the help of ``takes_packed``."""
    method.takes_packed = True  # type: ignore[attr-defined]
    return method


def _call_on_parts(
    method: Callable[..., Tensor], omega: Regularizer, scores: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    bound = inspect.signature(method).bind(omega, scores, *args, **kwargs)
    bound.apply_defaults()
    others = dict(list(bound.arguments.items())[2:])
    dim, per_row = others.pop("dim"), method.__name__ not in ("argmax", "log_argmax")
    if is_packed(scores):
        packed, masks = Packed(scores), method.__name__ != "forward"
        dims = packed_dims(omega, packed, dim)
        return on_packed(functools.partial(method, omega), packed, dim, dims, others, per_row=per_row, masks=masks)
    dims = omega.dims(scores, omega.default_dim if dim is None else dim)
    simple, gamma = omega.canonical()
    family = (None if method.__name__ == "log_argmax" else simple.name, simple.parameter, gamma)
    found: Tensor = distributed_rule("rows")(method, scores, dim, dims, others, per_row, family, omega)
    return found


def packed_dims(omega: Regularizer, packed: Packed, dim: Any) -> tuple[int, ...]:
    """The dimensions of packed scores that a choice of Ω is made over."""
    shape = omega.parameter_shape
    if shape is not None and shape.numel() > 1:
        raise ValueError(
            f"omega must have one value per parameter for packed scores, got {omega}; for one per sequence pass it to "
            "the function of the map, such as entmax, or to segment_entmax"
        )
    return omega.dims(packed.largest, omega.default_dim if dim is None else dim)

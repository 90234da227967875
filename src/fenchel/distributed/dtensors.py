"""The public functions on DTensors: local work where a rank has whole rows, the functions of this package elsewhere.

Per dimension of the mesh: rows sharded or replicated, local work; the chosen dimension sharded, the primitive that
finds thresholds over ranks, where there is one, and else whole rows are gathered. Plain tensors beside DTensors count
as equal on all ranks.

Imported by the first DTensor that a public function gets; it fills the hook of ``fenchel._torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fenchel import _torch
from fenchel._torch import apply_function, known
from fenchel.distributed import context, maps, output
from fenchel.distributed.collectives import all_sum
from fenchel.losses import Reduction, is_kept
from fenchel.regularizers.base import Regularizer
from fenchel.streaming import dot_product
from fenchel.streaming import linear_loss as plain


@dataclass(frozen=True)
class _Layout:
    """How a tensor is laid out on a mesh, for a choice along some of its dimensions.

    Args:
        mesh: the device mesh.
        places: one per dimension of the mesh.
        rank: the number of dimensions of the tensor.
        split: the dimension of the mesh that the chosen dimension is sharded on; None if rows are whole.
    """

    mesh: Any
    places: tuple[Placement, ...]
    rank: int
    split: int | None

    @property
    def group(self) -> Any:
        """The ranks that share rows."""
        return self.mesh.get_group(self.split)

    @property
    def row_groups(self) -> list[Any]:
        """The groups among which rows are sharded."""
        return [self.mesh.get_group(i) for i in self.row_dims]

    @property
    def row_dims(self) -> list[int]:
        """The dimensions of the mesh that rows are sharded on."""
        return [i for i, place in enumerate(self.places) if place.is_shard() and i != self.split]

    def beside(self, value: Any, removed: Sequence[int] = (), last: bool = True) -> Any:
        """This rank's part of a tensor that goes with the rows, such as a mask; what is no tensor, as it is.

        Args:
            value: a plain tensor, equal on all ranks, or a DTensor.
            removed: dimensions that the rows have and the value has not.
            last: whether it has the chosen dimension, if that is sharded.
        """
        if not isinstance(value, Tensor):
            return value
        missing = self.rank - len(removed) - value.dim()
        wanted: list[Placement] = []
        for i, place in enumerate(self.places):
            wanted.append(Replicate())
            if isinstance(place, Shard) and place.dim not in removed and (i != self.split or last):
                own = place.dim - sum(d < place.dim for d in removed) - missing
                if own >= 0 and value.shape[own] != 1:
                    wanted[-1] = Shard(own)
        return self.local(value, wanted)

    def local(self, value: Tensor, wanted: Sequence[Placement]) -> Tensor:
        """This rank's part of a tensor with wanted placements; its gradient is summed over the ranks that share it."""
        if isinstance(value, DTensor):
            _check_mesh(value, self.mesh)
        else:
            value = DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if tuple(value.placements) != tuple(wanted):
            value = value.redistribute(self.mesh, wanted)
        rows = self.row_dims
        grads = [Partial() if place.is_replicate() and i in rows else place for i, place in enumerate(wanted)]
        part: Tensor = value.to_local(grad_placements=grads)
        return part

    def own(self, scores: Tensor) -> Tensor:
        """This rank's part of the tensor that the layout is of."""
        part: Tensor = scores.to_local(grad_placements=self.places)  # type: ignore[attr-defined]
        return part

    def whole(self, part: Tensor, shape: Sequence[int], removed: Sequence[int] = ()) -> Tensor:
        """The DTensor of parts, whose shape lacks some dimensions of the rows."""
        if not removed:
            return _assembled(part, self.mesh, self.places, shape)
        places: list[Placement] = []
        for place in self.places:
            if isinstance(place, Shard) and place.dim not in removed:
                places.append(Shard(place.dim - sum(d < place.dim for d in removed)))
            else:
                places.append(Replicate())
        return _assembled(part, self.mesh, places, shape)


def _assembled(part: Tensor, mesh: Any, places: Sequence[Placement], shape: Sequence[int]) -> Tensor:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    made: Tensor = DTensor.from_local(
        part, mesh, places, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
    return made


def _layout(scores: Tensor, dims: Sequence[int], name: str = "scores") -> _Layout:
    """The layout of scores for a choice along dimensions; an error for what has none."""
    if not isinstance(scores, DTensor):
        raise TypeError(
            f"{name} must be a DTensor as other arguments are, got a plain tensor; convert it by "
            "torch.distributed.tensor.distribute_tensor(…), or pass the local parts of all"
        )
    places, split = _checked_places(tuple(scores.placements), scores.dim(), tuple(dims), name)
    return _Layout(scores.device_mesh, places, scores.dim(), split)


@lru_cache(maxsize=256)  # for small rows the time of a call is that of its Python lines
def _checked_places(
    placements: tuple[Placement, ...], rank: int, dims: tuple[int, ...], name: str
) -> tuple[tuple[Placement, ...], int | None]:
    """Placements with dimensions counted from the front, and the dimension of the mesh that ``dims`` are sharded on."""
    places: list[Placement] = []
    split = None
    for i, place in enumerate(placements):
        if place.is_replicate():
            places.append(place)
            continue
        if type(place) is not Shard:
            raise ValueError(
                f"{name} must be replicated or sharded, got the placement {place}; redistribute it to Replicate() or "
                "Shard(…) first"
            )
        dim = place.dim % rank
        places.append(Shard(dim))
        if dim in dims:
            if split is not None or len(dims) > 1:
                raise ValueError(
                    f"{name} must be sharded along the chosen dimension on one dimension of the mesh at most, and only "
                    f"where one dimension is chosen, got the placements {placements}"
                )
            split = i
    return tuple(places), split


def _check_mesh(value: DTensor, mesh: Any) -> None:
    if value.device_mesh != mesh:
        raise ValueError(f"all DTensors must have one device mesh, got {mesh} and {value.device_mesh}")


# -- maps ------------------------------------------------------------------------------------------------------------


def rows(
    call: Callable[..., Tensor],
    scores: Tensor,
    dim: Any,
    dims: Sequence[int],
    others: Mapping[str, Any],
    per_row: bool,
    family: tuple[str | None, Any, Any],
    omega: Regularizer | None = None,
) -> Tensor:
    """A function of rows.

    Args:
        call: takes scores, ``dim`` and the others by name; returns a tensor of the shape of scores, or with ``per_row``
            one without ``dims``.
        scores: a DTensor.
        dim: the argument.
        dims: the dimensions that it means, counted from the front.
        others: further arguments by name.
        per_row: whether the result has one value per row.
        family: the name, the parameter and the factor of Ω: which rows can be spread over ranks.
        omega: the regularizer, if ``call`` takes it as its first argument.
    """
    layout = _layout(scores, dims)
    if layout.split is not None:
        if not per_row and _is_entmax(*family[:2]):
            return _spread_map(layout, scores, dims[0], others.get("mask"), *family[1:])
        found = rows(call, _whole_rows(scores, layout), dim, dims, others, per_row, family, omega)
        return found if per_row else found.redistribute(layout.mesh, layout.places)  # type: ignore[attr-defined]
    removed = tuple(dims) if per_row else ()
    given = {}
    for name, value in others.items():
        classes = name == "target" and isinstance(value, Tensor) and not value.is_floating_point()
        given[name] = layout.beside(value, dims if classes else ())
    own = layout.own(scores)
    part = call(own, dim=dim, **given) if omega is None else _with_local(omega, layout, call, own, dim=dim, **given)
    if not removed:
        return layout.whole(part, scores.shape)
    return layout.whole(part, [size for d, size in enumerate(scores.shape) if d not in removed], removed)


def _is_entmax(name: str | None, parameter: Any) -> bool:
    """Whether the primitive serves an Ω."""
    if name != "tsallis":
        return False
    if isinstance(parameter, Tensor):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return not known(local) or bool(((local >= 1) & (local <= 2)).all())
    return bool(1 <= parameter <= 2)


def _whole_rows(scores: Tensor, layout: _Layout) -> Tensor:
    """The same scores with whole rows on every rank."""
    places = [Replicate() if i == layout.split else place for i, place in enumerate(layout.places)]
    gathered: Tensor = scores.redistribute(layout.mesh, places)  # type: ignore[attr-defined]
    return gathered


def _spread_map(layout: _Layout, scores: Tensor, dim: int, mask: Any, parameter: Any, gamma: Any) -> Tensor:
    """Entmax of rows that are sharded along the chosen dimension."""
    own = layout.own(scores)
    part = _divided(own, layout, gamma).movedim(dim, -1)
    mask = None if mask is None else layout.beside(mask).expand(own.shape).movedim(dim, -1)
    alpha = _alpha(parameter, layout, dim)
    return layout.whole(maps.entmax(part, alpha, mask, group=layout.group).movedim(-1, dim), scores.shape)


def _divided(scores: Tensor, layout: _Layout, gamma: Any) -> Tensor:
    return scores if not isinstance(gamma, Tensor) and gamma == 1 else scores / layout.beside(gamma, last=False)


def _alpha(parameter: Any, layout: _Layout, dim: int) -> Any:
    """Alpha beside this rank's rows, with the chosen dimension last."""
    if not isinstance(parameter, Tensor):
        return parameter
    own = layout.beside(parameter, last=False)
    return own.movedim(dim - layout.rank, -1) if own.dim() > layout.rank - dim - 1 else own


def _with_local(omega: Regularizer, layout: _Layout, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``call(omega, …)`` with this rank's parts of the tensors of Ω, whose gradients are summed over the ranks."""
    tensors = {**dict(omega.named_parameters()), **dict(omega.named_buffers())}
    own = {name: layout.beside(t) for name, t in tensors.items()}
    return dot_product.with_tensors(omega, own, partial(call, **kwargs), *args)


# -- losses ----------------------------------------------------------------------------------------------------------


def loss(
    call: Callable[..., Tensor],
    scores: Tensor,
    target: Tensor,
    omega: Regularizer,
    dim: Any,
    mask: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: Reduction,
) -> Tensor:
    """``fy_loss``; ``call`` is that of plain tensors."""
    dims = omega.dims(scores, omega.default_dim if dim is None else dim)
    layout = _layout(scores, dims)
    classes = isinstance(target, Tensor) and not target.is_floating_point()
    simple, gamma = omega.canonical()
    served = classes and not label_smoothing and _is_entmax(simple.name, simple.parameter)
    if layout.split is not None and not served:
        scores = _whole_rows(scores, layout)
        layout = _layout(scores, dims)
    index = layout.beside(target, dims if classes else (), last=not classes)
    shared = None if weight is None else layout.local(weight, [Replicate()] * layout.mesh.ndim)
    part = layout.own(scores)
    if layout.split is None:
        options: dict[str, Any] = {"weight": shared, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        options |= {"dim": dim, "mask": layout.beside(mask), "reduction": "none"}
        losses = _with_local(omega, layout, lambda own: call(part, index, own, **options))
    else:
        (axis,) = dims
        own = _divided(part, layout, gamma).movedim(axis, -1)
        allowed = None if mask is None else layout.beside(mask).expand(part.shape).movedim(axis, -1)
        losses = maps.entmax_loss(
            own,
            index,
            _alpha(simple.parameter, layout, axis),
            mask=allowed,
            group=layout.group,
            ignore_index=ignore_index,
            reduction="none",
        )
        if isinstance(gamma, Tensor) or gamma != 1:
            losses = losses * (layout.beside(gamma, last=False).squeeze(axis) if isinstance(gamma, Tensor) else gamma)
        if shared is not None:
            kept = is_kept(index, ignore_index)
            losses = torch.where(kept, losses * shared[torch.where(kept, index, 0)], 0.0)
    if reduction == "none":
        shape = [size for d, size in enumerate(scores.shape) if d not in dims]
        return layout.whole(losses, shape, dims)
    weights = torch.ones_like(losses)
    if classes:
        kept = is_kept(index, ignore_index)
        weights = (
            kept.to(losses.dtype) if shared is None else torch.where(kept, shared[torch.where(kept, index, 0)], 0.0)
        )
    return _reduced(losses.sum(), weights, reduction, layout)


def _reduced(total: Tensor, weights: Tensor, reduction: Reduction, layout: _Layout) -> Tensor:
    """The sum or mean over the rows of all ranks, a replicated scalar, from the sum of this rank's rows."""
    count = weights.detach().sum().to(total.dtype)
    total, count = apply_function(_Total, torch.stack([total, count]), layout.row_groups).unbind()
    return _assembled(
        total / count if reduction == "mean" else total, layout.mesh, [Replicate()] * layout.mesh.ndim, ()
    )


class _Total(torch.autograd.Function):
    """The sums over groups of ranks. Every rank has the same total, so the gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, groups: list[Any]) -> Tensor:
        values = values.clone()
        for group in groups:
            all_sum(values, group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    alpha: Any,
    ignore_index: int,
    reduction: Reduction,
    class_weight: Tensor | None,
    label_smoothing: float,
) -> Tensor:
    """``linear_entmax_loss``: tokens sharded, or classes, or both on different dimensions of a mesh."""
    mesh = next(t.device_mesh for t in (hidden, weight, target, bias) if isinstance(t, DTensor))
    nowhere = [Replicate()] * mesh.ndim
    hidden, weight = (
        t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, nowhere, run_check=False) for t in (hidden, weight)
    )
    classes = _layout(weight, (0,), "weight")
    _check_mesh(weight, mesh)
    if classes.row_dims:
        raise ValueError("weight must be replicated, or sharded along its classes, Shard(0): redistribute it first")
    if classes.split is not None and not hidden.placements[classes.split].is_replicate():  # as ColwiseParallel does
        places = [Replicate() if i == classes.split else each for i, each in enumerate(hidden.placements)]
        hidden = hidden.redistribute(mesh, places)
    tokens = _layout(hidden, (hidden.dim() - 1,), "hidden")
    if tokens.split is not None:
        raise ValueError("hidden must not be sharded along its last dimension: redistribute it first")
    index = tokens.beside(target, (hidden.dim() - 1,))
    rows = tokens.own(hidden)
    matrix = tokens.local(weight, classes.places)
    offset = None if bias is None else tokens.local(bias, classes.places)
    own_alpha = tokens.beside(alpha)
    kept = is_kept(index, ignore_index)
    counts = kept.to(torch.promote_types(rows.dtype, torch.float32))
    how: Any = {"alpha": own_alpha, "ignore_index": ignore_index}
    how["reduction"] = "none" if reduction == "none" else "sum"
    if classes.split is not None:
        if class_weight is not None or label_smoothing:
            raise NotImplementedError("class_weight and label_smoothing are not available where classes are sharded")
        losses = output.linear_entmax_loss(rows, matrix, index, offset, group=classes.group, **how)
    else:
        factors = None if class_weight is None else tokens.local(class_weight, nowhere)
        losses = plain.linear_entmax_loss(
            rows, matrix, index, offset, class_weight=factors, label_smoothing=label_smoothing, **how
        )
        if factors is not None:
            counts = torch.where(kept, factors[torch.where(kept, index, 0)].to(counts.dtype), 0.0)
    if reduction == "none":
        return tokens.whole(losses, hidden.shape[:-1], (hidden.dim() - 1,))
    return _reduced(losses, counts, reduction, tokens)


# -- attention -------------------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, omega: Regularizer, options: dict[str, Any]) -> Any:
    """``attention``: batch or heads sharded, or the sequences, or queries alone."""
    layouts = [_layout(t, (t.dim() - 1,), name) for t, name in ((query, "query"), (key, "key"), (value, "value"))]
    first = layouts[0]
    for t in (key, value):
        assert isinstance(t, DTensor)
        _check_mesh(t, first.mesh)
    if any(each.split is not None for each in layouts):
        raise ValueError("query, key and value must not be sharded along their last dimension: redistribute them first")
    sequence, alone = None, False
    for i in range(first.mesh.ndim):
        dims = [_from_end(each.places[i], each.rank) for each in layouts]
        if dims == [-2, -2, -2]:
            if sequence is not None:
                raise ValueError("sequences must be sharded on one dimension of the mesh, not on several")
            sequence = i
        elif dims == [-2, None, None]:
            alone = True
        elif len(set(dims)) > 1 or dims[0] == -2:
            shown = [tuple(each.places) for each in layouts]
            raise ValueError(
                f"query, key and value must be sharded along the same dimension, got the placements {shown}"
            )
        elif dims[0] is not None and any(t.shape[dims[0]] % first.mesh.size(i) for t in (query, key, value)):
            raise ValueError("batch and heads must be divisible by the number of ranks that they are sharded over")
    parts: Any = [each.own(t) for each, t in zip(layouts, (query, key, value), strict=True)]
    if alone:  # keys and values are shared by ranks with different queries
        parts[1:] = [first.local(t, each.places) for each, t in zip(layouts[1:], (key, value), strict=True)]
        if options["is_causal"]:
            raise ValueError("is_causal goes with key and value that are sharded along the sequence as the query is")
    batch = query.shape[:-2]
    if sequence is not None:
        extra = [name for name in ("attn_mask", "sink") if options[name] is not None]
        extra += [name for name in ("dropout_p", "return_weights") if options[name]]
        if extra:
            raise NotImplementedError(f"{' and '.join(extra)} are not available where sequences are sharded")
        ring: Any = {
            "group": first.mesh.get_group(sequence),
            "is_causal": options["is_causal"],
            "scale": options["scale"],
        }
        found = _with_local(omega, first, lambda own: context.attention(parts[0], parts[1], parts[2], own, **ring))
        return first.whole(found, (*batch, query.shape[-2], value.shape[-1]))
    if options["return_weights"] == "sparse":
        raise NotImplementedError('return_weights="sparse" is not available for DTensors')
    given = dict(options)
    for name in ("attn_mask", "sink"):
        given[name] = first.beside(options[name])
    found = _with_local(
        omega, first, lambda own: dot_product.masked_attention(parts[0], parts[1], parts[2], own, **given)
    )
    if options["return_weights"]:
        out, weights = found
        wide = (*batch, query.shape[-2], key.shape[-2])
        return first.whole(out, (*batch, query.shape[-2], value.shape[-1])), first.whole(weights, wide)
    return first.whole(found, (*batch, query.shape[-2], value.shape[-1]))


def _from_end(place: Placement, rank: int) -> int | None:
    return place.dim - rank if isinstance(place, Shard) else None


_torch.fill_distributed_rules(rows=rows, loss=loss, linear_loss=linear_loss, attention=attention)

"""The Hopfield layer: states associated with stored patterns, in several heads, for any Ω."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count, check_mask, check_number, check_share
from fenchel._torch import concrete
from fenchel.hopfield.arguments import (
    activation,
    check_association,
    check_input,
    check_scaling,
    default_hidden_size,
)
from fenchel.hopfield.dynamics import iterate, update
from fenchel.regularizers import Regularizer, Tsallis
from fenchel.regularizers.base import check_omega, hold, show
from fenchel.regularizers.rows import combine_masks

SPREAD = 0.02
"""Standard deviation of learned patterns at the start: small, so that the first gradients decide their direction."""

MOST_STEPS = 10_000
"""The most updates of a state that is updated until it converges."""

Patterns = Tensor | tuple[Tensor, Tensor, Tensor]
"""One tensor in all three roles, or stored patterns, state patterns and pattern projections."""


class Options(TypedDict, total=False):
    """Keyword arguments that all three layers share; see :class:`Hopfield`."""

    normalize_stored_pattern: bool
    normalize_stored_pattern_affine: bool
    normalize_stored_pattern_eps: float
    normalize_state_pattern: bool
    normalize_state_pattern_affine: bool
    normalize_state_pattern_eps: float
    normalize_pattern_projection: bool
    normalize_pattern_projection_affine: bool
    normalize_pattern_projection_eps: float
    normalize_hopfield_space: bool
    normalize_hopfield_space_affine: bool
    normalize_hopfield_space_eps: float
    stored_pattern_as_static: bool
    state_pattern_as_static: bool
    pattern_projection_as_static: bool
    pattern_projection_as_connected: bool
    stored_pattern_size: int | None
    pattern_projection_size: int | None
    batch_first: bool
    association_activation: str | Callable[[Tensor], Tensor] | None
    dropout: float
    input_bias: bool
    concat_bias_pattern: bool
    add_zero_association: bool
    disable_out_projection: bool
    omega: Regularizer | None
    learnable_scaling: bool
    bag_dropout: float
    device: Any
    dtype: Any


class Layer(nn.Module):
    """What all three layers share: associations made by a Hopfield layer, which is the layer itself or a part of it."""

    @torch.no_grad()
    def get_association_matrix(
        self,
        input: Any,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights, (batch, heads, L, S), before dropout, without gradient. Arguments as in ``forward``."""
        weights = self._core._associate(self._roles(input), stored_pattern_padding_mask, association_mask, True)[1]
        assert weights is not None
        return weights

    @torch.no_grad()
    def get_projected_pattern_matrix(
        self,
        input: Any,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """The projected patterns, (batch, heads, S, pattern_size), without gradient. Arguments as in ``forward``."""
        (stored, _, projection), core = self._roles(input), self._core
        return core._memory(stored, projection, core._check_padding(stored_pattern_padding_mask, stored))[1]

    @property
    def _core(self) -> Hopfield:
        """The Hopfield layer that makes the associations."""
        raise NotImplementedError

    def _roles(self, input: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Stored patterns, state patterns and pattern projections, batch first, checked."""
        raise NotImplementedError

    def _output(
        self, input: Any, stored_pattern_padding_mask: Tensor | None, association_mask: Tensor | None
    ) -> Tensor:
        """The output of the Hopfield layer, (batch, L, output_size)."""
        return self._core._associate(self._roles(input), stored_pattern_padding_mask, association_mask, False)[0]


class Hopfield(Layer):
    r"""Associate state patterns (queries) with stored patterns (keys), and read out their projections (values).

    .. math:: \xi \leftarrow K^\top \operatorname{argmax}_\Omega(\beta K \xi) \quad \text{(some times)},
        \qquad \text{output} = W_o\, V^\top \operatorname{argmax}_\Omega(\beta K \xi)

    in each head, with :math:`K`, :math:`V` and the first :math:`\xi` linear images of the three inputs. The arguments
    are those of the reference layers of Ramsauer et al. (2021), and ``omega``. Without update steps and with
    ``Shannon()`` it is multi-head attention; with a sparse Ω a pattern may be retrieved exactly.

    Masks are torch's: True means *left out*. Values at padded positions, NaN included, have no effect; the output of a
    state that may associate with nothing is zero.

    Args:
        input_size: width of the state patterns, and of the other two inputs where not given otherwise.
        hidden_size: width of the association space, of each head; ``input_size // num_heads`` by default.
        output_size: width of the output; ``input_size`` by default.
        pattern_size: width of the projected patterns, of each head; ``hidden_size`` by default.
        num_heads: the number of parallel associations.
        scaling: β, a positive number, or a tensor with one entry per head. By default 1/√hidden_size; 1 if states and
            stored patterns are compared as they are given: all three inputs static, no norm in the association space,
            no output projection.
        update_steps_max: how many times the states are updated before they are read out; None: until they converge.
        update_steps_eps: a state has converged once an update moves it by at most this times its norm, or times 1.
        normalize_stored_pattern: apply a layer norm to the stored patterns; ``…_affine``, ``…_eps``: its options.
        normalize_state_pattern: the same for the state patterns.
        normalize_pattern_projection: the same for the pattern projections.
        normalize_hopfield_space: apply a layer norm to projected states and stored patterns, in each head.
        stored_pattern_as_static: use stored patterns without a projection; their width is ``hidden_size``.
        state_pattern_as_static: the same for the state patterns.
        pattern_projection_as_static: the same for the pattern projections, of width ``pattern_size``.
        pattern_projection_as_connected: project the third input with the projection of the stored patterns, and then
            once more. It has the width of the stored patterns.
        stored_pattern_size: width of the stored patterns; ``input_size`` by default.
        pattern_projection_size: width of the pattern projections; ``input_size`` by default.
        batch_first: inputs are (batch, length, width), else (length, batch, width).
        association_activation: a function of the output, or its name in torch, such as "relu".
        dropout: the share of associations that is dropped in training, after the choice.
        input_bias: whether the projections have biases.
        concat_bias_pattern: append a learned pattern to those stored.
        add_zero_association: append a pattern of zeros, so that a state may associate with nothing.
        disable_out_projection: return the heads side by side, (…, num_heads · pattern_size).
        omega: the regularizer; ``Tsallis(1.5)`` by default. A structure over two dimensions, such as
            ``SparseMAP(Matching())``, chooses in the whole table of state × stored patterns of a head at once.
        learnable_scaling: train β, one per head. It stays positive.
        bag_dropout: the share of stored patterns that is hidden in training, before the choice; a bag keeps one.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import Hopfield
        >>> _ = torch.manual_seed(0)
        >>> layer = Hopfield(16, num_heads=2, update_steps_max=3, scaling=4.0, omega=fenchel.Gini())
        >>> states, stored = torch.randn(2, 3, 16), torch.randn(2, 7, 16)
        >>> layer((stored, states, stored)).shape
        torch.Size([2, 3, 16])
        >>> weights = layer.get_association_matrix((stored, states, stored))
        >>> weights.shape, bool((weights == 0).any())
        (torch.Size([2, 2, 3, 7]), True)

    References: Ramsauer et al. (2021), Hopfield Networks is All You Need; Santos et al. (2024).
    """

    _scaling: float | Tensor

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        normalize_stored_pattern: bool = True,
        normalize_stored_pattern_affine: bool = True,
        normalize_stored_pattern_eps: float = 1e-5,
        normalize_state_pattern: bool = True,
        normalize_state_pattern_affine: bool = True,
        normalize_state_pattern_eps: float = 1e-5,
        normalize_pattern_projection: bool = True,
        normalize_pattern_projection_affine: bool = True,
        normalize_pattern_projection_eps: float = 1e-5,
        normalize_hopfield_space: bool = False,
        normalize_hopfield_space_affine: bool = False,
        normalize_hopfield_space_eps: float = 1e-5,
        stored_pattern_as_static: bool = False,
        state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False,
        pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        batch_first: bool = True,
        association_activation: str | Callable[[Tensor], Tensor] | None = None,
        dropout: float = 0.0,
        input_bias: bool = True,
        concat_bias_pattern: bool = False,
        add_zero_association: bool = False,
        disable_out_projection: bool = False,
        *,
        omega: Regularizer | None = None,
        learnable_scaling: bool = False,
        bag_dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = check_count(num_heads, "num_heads")
        self.hidden_size = default_hidden_size(input_size, hidden_size, self.num_heads)
        self.pattern_size = check_count(self.hidden_size if pattern_size is None else pattern_size, "pattern_size")
        self.batch_first = batch_first
        self.add_zero_association = add_zero_association
        steps = update_steps_max
        self.update_steps_max = None if steps is None else check_count(steps, "update_steps_max", 0)
        self.update_steps_eps = check_number(update_steps_eps, "update_steps_eps", 0, ends="[]")
        self.association_activation = (
            None if association_activation is None else activation("association_activation", association_activation)
        )
        self.dropout = check_share(dropout, "dropout")
        self.bag_dropout = check_share(bag_dropout, "bag_dropout")
        self.omega = Tsallis(1.5) if omega is None else check_omega(omega)
        static = stored_pattern_as_static and state_pattern_as_static and pattern_projection_as_static
        as_given = static and disable_out_projection and not normalize_hopfield_space
        self._hold_scaling(scaling, 1.0 if as_given else self.hidden_size**-0.5, learnable_scaling, factory)

        for name, eps in (
            ("normalize_state_pattern_eps", normalize_state_pattern_eps),
            ("normalize_stored_pattern_eps", normalize_stored_pattern_eps),
            ("normalize_pattern_projection_eps", normalize_pattern_projection_eps),
            ("normalize_hopfield_space_eps", normalize_hopfield_space_eps),
        ):
            check_number(eps, name, 0)
        connected = self.pattern_projection_as_connected = pattern_projection_as_connected
        if connected and (stored_pattern_as_static or pattern_projection_as_static):
            raise ValueError(
                "pattern_projection_as_connected shares the projection of the stored patterns: with it, neither "
                "stored_pattern_as_static nor pattern_projection_as_static may be True"
            )
        space, patterns = self.num_heads * self.hidden_size, self.num_heads * self.pattern_size
        self.state_pattern_size, self.state_proj = _entry(
            state_pattern_as_static, self.hidden_size, space, "input_size", input_size, input_bias, factory
        )
        self.stored_pattern_size, self.stored_proj = _entry(
            stored_pattern_as_static,
            self.hidden_size,
            space,
            "stored_pattern_size",
            input_size if stored_pattern_size is None else stored_pattern_size,
            input_bias,
            factory,
        )
        if pattern_projection_size is None:
            pattern_projection_size = self.stored_pattern_size if connected else input_size
        if connected and pattern_projection_size != self.stored_pattern_size:
            raise ValueError(
                "pattern_projection_size must be that of the stored patterns with pattern_projection_as_connected, "
                f"{self.stored_pattern_size}, got {pattern_projection_size}"
            )
        self.pattern_projection_size, self.pattern_proj = _entry(
            pattern_projection_as_static,
            self.pattern_size,
            patterns,
            "pattern_projection_size",
            space if connected else pattern_projection_size,
            input_bias,
            factory,
        )
        if connected:  # the projection of the stored patterns comes first
            self.pattern_projection_size = self.stored_pattern_size
        self.norm_state_pattern = _norm(
            self.state_pattern_size if normalize_state_pattern else None,
            normalize_state_pattern_affine,
            normalize_state_pattern_eps,
            factory,
        )
        self.norm_stored_pattern = _norm(
            self.stored_pattern_size if normalize_stored_pattern else None,
            normalize_stored_pattern_affine,
            normalize_stored_pattern_eps,
            factory,
        )
        self.norm_pattern_projection = _norm(
            self.pattern_projection_size if normalize_pattern_projection else None,
            normalize_pattern_projection_affine,
            normalize_pattern_projection_eps,
            factory,
        )
        self.norm_hopfield_space = _norm(
            self.hidden_size if normalize_hopfield_space else None,
            normalize_hopfield_space_affine,
            normalize_hopfield_space_eps,
            factory,
        )
        self.bias_stored = self._bias(self.hidden_size, factory) if concat_bias_pattern else None
        self.bias_pattern = self._bias(self.pattern_size, factory) if concat_bias_pattern else None
        self.output_size, self.out_proj = _exit(
            patterns, output_size, input_size, disable_out_projection, input_bias, factory
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as ``torch.nn.MultiheadAttention`` does, and reset the norms."""
        for projection in (self.state_proj, self.stored_proj, self.pattern_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        if self.out_proj is not None:
            self.out_proj.reset_parameters()
            if self.out_proj.bias is not None:
                nn.init.zeros_(self.out_proj.bias)
        for norm in (
            self.norm_state_pattern,
            self.norm_stored_pattern,
            self.norm_pattern_projection,
            self.norm_hopfield_space,
        ):
            if norm is not None:
                norm.reset_parameters()
        for bias in (self.bias_stored, self.bias_pattern):
            if bias is not None:
                nn.init.normal_(bias, std=SPREAD)

    @property
    def scaling(self) -> float | Tensor:
        """β: a number, or a tensor with one value per head."""
        return self.log_scaling.exp() if self.log_scaling is not None else self._scaling

    def extra_repr(self) -> str:
        steps = "until converged" if self.update_steps_max is None else self.update_steps_max
        return (
            f"hidden_size={self.hidden_size}, pattern_size={self.pattern_size}, num_heads={self.num_heads}, "
            f"scaling={show(self.scaling)}, update_steps_max={steps}, batch_first={self.batch_first}"
        )

    def forward(
        self,
        input: Patterns,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Associate states with stored patterns, and read out the pattern projections.

        Args:
            input: one tensor (batch, length, width) in all three roles, or three: stored patterns (batch, S, …), state
                patterns (batch, L, …) and pattern projections (batch, S, …). A batch of one serves all.
            stored_pattern_padding_mask: (batch, S), boolean; True = no pattern.
            association_mask: (L, S), (batch · heads, L, S), or what broadcasts to (batch, heads, L, S); boolean (True
                = may not be associated), or added to the scores.

        Returns:
            (batch, L, output_size); (L, batch, output_size) if not ``batch_first``.
        """
        return self._batch_first(self._output(input, stored_pattern_padding_mask, association_mask))

    @property
    def _core(self) -> Hopfield:
        return self

    def _associate(
        self,
        roles: tuple[Tensor, Tensor, Tensor],
        stored_pattern_padding_mask: Tensor | None,
        association_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, (batch, L, output_size), and the weights, (batch, heads, L, S), if ``need_weights``."""
        stored, state, projection = roles
        padding = self._check_padding(stored_pattern_padding_mask, stored)
        key, value = self._memory(stored, projection, padding)
        query = self._split(state, self.norm_state_pattern, self.state_proj)
        query = query if self.norm_hopfield_space is None else self.norm_hopfield_space(query)
        shape = (_batch(stored, state), self.num_heads, state.shape[1], stored.shape[1])
        mask = self._mask(association_mask, self._hidden(stored, padding), shape, query.dtype)
        if mask is not None:  # patterns that were appended may always be associated
            mask = mask.expand(*mask.shape[:-1], stored.shape[1])
            appended = key.shape[-2] - mask.shape[-1]
            mask = F.pad(mask, (0, appended), value=1.0 if mask.dtype == torch.bool else 0.0)
        beta = self.scaling
        beta = beta.to(query.dtype).reshape(-1, 1, 1) if isinstance(beta, Tensor) else beta
        query = self._update(query, key, beta, mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            output, weights = update(query, key, value, self.omega, beta, attn_mask=mask, return_weights=True)
        else:
            output = update(query, key, value, self.omega, beta, attn_mask=mask, dropout_p=dropout)
        output = output.transpose(1, 2).flatten(-2)
        output = output if self.out_proj is None else self.out_proj(output)
        return (output if self.association_activation is None else self.association_activation(output)), weights

    def _memory(self, stored: Tensor, projection: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, heads, S, …), with appended patterns; padded ones are zero, even if given as NaN."""
        if padding is not None:
            given, stored = stored, stored.masked_fill(padding.unsqueeze(-1), 0.0)
            projection = stored if projection is given else projection.masked_fill(padding.unsqueeze(-1), 0.0)
        key = self._split(stored, self.norm_stored_pattern, self.stored_proj)
        norm = self.norm_pattern_projection
        if self.pattern_projection_as_connected:
            assert self.stored_proj is not None
            projection, norm = self.stored_proj(projection if norm is None else norm(projection)), None
        value = self._split(projection, norm, self.pattern_proj)
        key = key if self.norm_hopfield_space is None else self.norm_hopfield_space(key)
        if self.bias_stored is not None and self.bias_pattern is not None:
            key, value = _append(key, self.bias_stored), _append(value, self.bias_pattern)
        if self.add_zero_association:
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        return key, value

    def _split(self, x: Tensor, norm: nn.LayerNorm | None, projection: nn.Linear | None) -> Tensor:
        """Inputs (batch, length, width) as (batch, heads, length, width of a head); static ones for every head."""
        x = x if norm is None else norm(x)
        if projection is None:
            return x.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        heads: Tensor = projection(x).unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)

    def _update(self, state: Tensor, key: Tensor, beta: float | Tensor, mask: Tensor | None) -> Tensor:
        """The states (batch, heads, L, hidden_size) after all updates."""
        steps = self.update_steps_max
        if steps == 0:
            return state
        if steps is None:
            if not concrete(state, key):
                raise ValueError("update_steps_max must be a number in graphs, where convergence cannot be seen")
            steps = MOST_STEPS
        state = state.expand(_batch(key, state), -1, -1, -1)
        step = partial(update, key=key, omega=self.omega, beta=beta, attn_mask=mask)
        return iterate(step, state, max_steps=steps, tol=self.update_steps_eps).state

    def _hidden(self, stored: Tensor, padding: Tensor | None) -> Tensor | None:
        """Which stored patterns are left out, (batch, S): padded ones, and those that bag_dropout drops in training."""
        if not self.training or not self.bag_dropout or not stored.shape[1]:
            return padding
        draw = torch.rand(stored.shape[:2], device=stored.device)
        if padding is not None:
            draw = draw.masked_fill(padding, -1.0)
        last = draw == draw.amax(1, keepdim=True)
        dropped = (draw < self.bag_dropout) & ~last
        return dropped if padding is None else dropped | padding

    def _mask(
        self, association: Tensor | None, hidden: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """A mask that broadcasts to scores of a shape: boolean (True = takes part), or a float mask to be added."""
        keep = None if hidden is None else ~hidden[:, None, None, :]
        if association is None:
            return keep
        association = check_association(association, shape)
        return combine_masks(~association if association.dtype == torch.bool else association.to(dtype), keep)

    def _roles(self, input: Patterns) -> tuple[Tensor, Tensor, Tensor]:
        three = (input, input, input) if isinstance(input, Tensor) else tuple(input)
        if len(three) != 3:
            raise ValueError(
                "input must be one tensor, or three: stored patterns, state patterns and pattern projections; "
                f"got {len(three)}"
            )
        names = ("stored pattern", "state pattern", "pattern projection")
        widths = (self.stored_pattern_size, self.state_pattern_size, self.pattern_projection_size)
        for name, x, width in zip(names, three, widths, strict=True):
            check_input(name, x, width)
        stored, state, projection = (self._batch_first(x) for x in three)
        projection = stored if three[2] is three[0] else projection
        if projection.shape[:2] != stored.shape[:2]:
            raise ValueError(
                "input must have as many pattern projections as stored patterns, got shapes "
                f"{tuple(three[2].shape)} and {tuple(three[0].shape)}"
            )
        if len(stored) != len(state) and 1 not in (len(stored), len(state)):
            raise ValueError(
                f"input must have state patterns with the batch of the stored patterns, {len(stored)}, or 1, got "
                f"shape {tuple(three[1].shape)}"
            )
        return stored, state, projection

    def _batch_first(self, x: Tensor) -> Tensor:
        """Swap batch and length unless inputs have the batch first."""
        return x if self.batch_first else x.transpose(0, 1)

    def _check_padding(self, padding: Tensor | None, stored: Tensor) -> Tensor | None:
        """Check a padding mask of the stored patterns, (batch, S)."""
        if padding is None:
            return None
        check_mask(padding, "stored_pattern_padding_mask", "no pattern")
        if padding.shape != stored.shape[:2]:
            raise ValueError(
                f"stored_pattern_padding_mask must have shape {tuple(stored.shape[:2])}, (batch, stored patterns), got "
                f"{tuple(padding.shape)}"
            )
        return padding

    def _bias(self, width: int, factory: dict[str, Any]) -> nn.Parameter:
        return nn.Parameter(torch.empty(1, self.num_heads, 1, width, **factory))

    def _hold_scaling(
        self, scaling: float | Tensor | None, default: float, learnable: bool, factory: dict[str, Any]
    ) -> None:
        """Store β, or its logarithm as a parameter if it is learnable."""
        scaling = default if scaling is None else check_scaling(scaling, self.num_heads)
        self.log_scaling: nn.Parameter | None = None
        if learnable:
            start = torch.as_tensor(scaling, **factory).detach().log().expand(self.num_heads).clone()
            self.log_scaling = nn.Parameter(start)
        else:
            if isinstance(scaling, Tensor) and not isinstance(scaling, nn.Parameter):
                scaling = scaling.clone()  # later changes by the caller have no effect
            hold(self, "_scaling", scaling)


def _batch(stored: Tensor, state: Tensor) -> int:
    """The size of the batch of stored patterns (B or 1, …) and states (B or 1, …)."""
    return len(state) if len(stored) == 1 else len(stored)


def _append(x: Tensor, last: Tensor) -> Tensor:
    """Patterns (batch, heads, S, width) with one more after them, the same for every batch element."""
    return torch.cat([x, last.to(x.dtype).expand(len(x), -1, -1, -1)], -2)


def _entry(
    static: bool, static_size: int, width: int, name: str, size: int | None, bias: bool, factory: dict[str, Any]
) -> tuple[int, nn.Linear | None]:
    """The width of an input and its projection; for static inputs ``static_size`` and no projection."""
    if static:
        return static_size, None
    if size is None:
        raise ValueError(f"{name} must be given unless its patterns are static")
    return check_count(size, name), nn.Linear(size, width, bias, **factory)


def _exit(
    width: int, output_size: int | None, input_size: int | None, disabled: bool, bias: bool, factory: dict[str, Any]
) -> tuple[int, nn.Linear | None]:
    """The width of the output and its projection; no projection if it is disabled."""
    if not disabled:
        size = check_count((input_size or width) if output_size is None else output_size, "output_size")
        return size, nn.Linear(width, size, bias, **factory)
    if output_size not in (None, width):
        raise ValueError(
            f"output_size must be num_heads · pattern_size = {width}, or not be given, with disable_out_projection, "
            f"got {output_size}"
        )
    return width, None


def _norm(width: int | None, affine: bool, eps: float, factory: dict[str, Any]) -> nn.LayerNorm | None:
    return None if width is None else nn.LayerNorm(width, eps, affine, **factory)

"""Hopfield layers with learned patterns: pooling by learned queries, look-up in a learned memory; for any Ω."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_flag
from fenchel.hopfield.association import SPREAD, Hopfield, Layer, Options

Roles = tuple[Tensor, Tensor, Tensor]
"""Stored patterns, state patterns and pattern projections."""


class _WithLearnedPatterns(Layer):
    """A Hopfield layer with ``quantity`` learned patterns in place of some inputs; a subclass defines which."""

    def __init__(self, quantity: int, sizes: tuple[Any, ...], options: Options) -> None:
        super().__init__()
        self.quantity = check_count(quantity, "quantity")
        self.hopfield = Hopfield(*sizes, **options)

    def extra_repr(self) -> str:
        return f"quantity={self.quantity}"

    @property
    def _core(self) -> Hopfield:
        return self.hopfield


class HopfieldPooling(_WithLearnedPatterns):
    """Pool bags of any size, (batch, S, width), to one vector each, or to ``quantity``, by learned queries.

    The state patterns are parameters; the input is what they choose from. With ``KSubsets(k)`` a query adds up the k
    instances that it fits best, with a sparse Ω of the simplex it averages a few, with ``Shannon()`` it averages all.

    Args:
        input_size: width of the instances.
        hidden_size, output_size, pattern_size, num_heads, scaling, update_steps_max, update_steps_eps: as in
            :class:`Hopfield`, and so are all other keyword arguments.
        quantity: the number of learned queries, whose outputs are concatenated.
        trainable: whether the queries are trained.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import HopfieldPooling
        >>> _ = torch.manual_seed(0)
        >>> layer = HopfieldPooling(16, num_heads=4, bag_dropout=0.2, omega=fenchel.KSubsets(2))
        >>> bags = torch.randn(3, 9, 16)
        >>> absent = torch.arange(9) >= torch.tensor([[9], [5], [2]])
        >>> layer(bags, stored_pattern_padding_mask=absent).shape
        torch.Size([3, 16])
        >>> weights = layer.eval().get_association_matrix(bags, absent)
        >>> weights.shape, round(weights.sum().item() / 12, 4)
        (torch.Size([3, 4, 1, 9]), 2.0)

    References: Ramsauer et al. (2021); Ilse, Tomczak & Welling (2018); Santos et al. (2024).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        *,
        quantity: int = 1,
        trainable: bool = True,
        **options: Unpack[Options],
    ) -> None:
        sizes = (input_size, hidden_size, output_size, pattern_size)
        super().__init__(quantity, (*sizes, num_heads, scaling, update_steps_max, update_steps_eps), options)
        self.pooling_weights = _learned(quantity, self.hopfield.state_pattern_size, trainable, options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the queries and all projections again."""
        self.hopfield.reset_parameters()
        nn.init.normal_(self.pooling_weights, std=SPREAD)

    def forward(
        self,
        input: Tensor | tuple[Tensor, Tensor],
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Pool bags of instances to one vector each.

        Args:
            input: instances (batch, S, width), or a pair of these and of what is read out in their place.
            stored_pattern_padding_mask: (batch, S), boolean; True = no instance.
            association_mask: as in :class:`Hopfield`, with L = ``quantity``.

        Returns:
            (batch, quantity · output_size).
        """
        return self._output(input, stored_pattern_padding_mask, association_mask).flatten(1)

    def _roles(self, input: Tensor | tuple[Tensor, Tensor]) -> Roles:
        two = (input, input) if isinstance(input, Tensor) else tuple(input)
        if len(two) != 2:
            raise ValueError(f"input must be one tensor, or stored patterns and pattern projections; got {len(two)}")
        return self.hopfield._roles((two[0], self.pooling_weights, two[1]))


class HopfieldLayer(_WithLearnedPatterns):
    """Look states (batch, L, width) up in a learned memory of ``quantity`` patterns.

    The stored patterns are parameters, and so is what they are projected from if ``lookup_weights_as_separated``; the
    input holds the states. In place of a dense layer, of learned prototypes, or of a k-nearest-neighbours look-up.

    Args:
        input_size: width of the input.
        hidden_size, output_size, pattern_size, num_heads, scaling, update_steps_max, update_steps_eps: as in
            :class:`Hopfield`, and so are all other keyword arguments.
        lookup_weights_as_separated: whether the patterns that are read out are parameters of their own.
        lookup_targets_as_trainable: whether these are trained.
        quantity: the number of stored patterns.
        trainable: whether the stored patterns are trained.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import HopfieldLayer
        >>> _ = torch.manual_seed(0)
        >>> layer = HopfieldLayer(16, output_size=5, quantity=32, scaling=2.0, omega=fenchel.Norm(5.0))
        >>> layer(torch.randn(3, 9, 16)).shape
        torch.Size([3, 9, 5])

    References: Ramsauer et al. (2021).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        lookup_weights_as_separated: bool = False,
        lookup_targets_as_trainable: bool = True,
        *,
        quantity: int = 1,
        trainable: bool = True,
        **options: Unpack[Options],
    ) -> None:
        sizes = (input_size, hidden_size, output_size, pattern_size)
        super().__init__(quantity, (*sizes, num_heads, scaling, update_steps_max, update_steps_eps), options)
        self.lookup_weights = _learned(quantity, self.hopfield.stored_pattern_size, trainable, options)
        self.target_weights: nn.Parameter | None = None
        if lookup_weights_as_separated:
            width = self.hopfield.pattern_projection_size
            self.target_weights = _learned(
                quantity, width, lookup_targets_as_trainable, options, "lookup_targets_as_trainable"
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the memory and all projections again."""
        self.hopfield.reset_parameters()
        nn.init.normal_(self.lookup_weights, std=SPREAD)
        if self.target_weights is not None:
            nn.init.normal_(self.target_weights, std=SPREAD)

    def forward(
        self,
        input: Tensor,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Look states up in the learned memory.

        Args:
            input: the states, (batch, L, width).
            stored_pattern_padding_mask: (1, quantity), boolean; True = left out.
            association_mask: as in :class:`Hopfield`, with S = ``quantity``.

        Returns:
            (batch, L, output_size); (L, batch, output_size) if not ``batch_first``.
        """
        return self.hopfield._batch_first(self._output(input, stored_pattern_padding_mask, association_mask))

    def _roles(self, input: Tensor) -> Roles:
        target = self.lookup_weights if self.target_weights is None else self.target_weights
        return self.hopfield._roles((self.lookup_weights, input, target))


def _learned(quantity: int, width: int, trainable: bool, options: Options, name: str = "trainable") -> nn.Parameter:
    """A parameter of ``quantity`` patterns, (1, quantity, width), or (quantity, 1, width) if not ``batch_first``."""
    weights = torch.empty(1, quantity, width, device=options.get("device"), dtype=options.get("dtype"))
    trained = check_flag(trainable, name)
    return nn.Parameter(weights if options.get("batch_first", True) else weights.transpose(0, 1), trained)

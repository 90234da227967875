"""Seq2Seq, the base class of encoder-decoders: vocabularies, output layer and loss, steps of a search, saving."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count, check_kind, check_share
from fenchel.losses import Reduction, fy_loss
from fenchel.regularizers import Regularizer, Tsallis
from fenchel.regularizers.base import check_omega, simplified
from fenchel.regularizers.configs import Config, from_config, to_config
from fenchel.seq2seq import saving
from fenchel.seq2seq.batches import IGNORED, Batch, Source, read
from fenchel.seq2seq.vocabulary import Vocabulary
from fenchel.streaming.linear_loss import linear_entmax_loss

LARGEST_NUMBER, LARGEST_SHAPE = 1e30, 1 << 24
"""Limits for regularizers in files: the size of a number, and the number of entries of a learned alpha."""


class Seq2Seq(nn.Module):
    """Base class of encoder-decoders, which map a source sequence of symbols to a target sequence.

    Two regularizers select symbols: ``attention`` among those of the source, ``output`` among those of the target
    vocabulary. With a sparse output, such as ``Tsallis(1.5)``, most strings have probability exactly 0.

    A subclass defines how sources are encoded (``encode``), how known targets are decoded (``decode``), and one step
    of a search (``advance``, ``reorder``).

    Args:
        source: the vocabulary of the sources.
        target: the vocabulary of the targets.
        width: of the hidden states, which are the input of the output layer.
        attention: a regularizer; ``Tsallis(1.5)`` by default.
        output: a regularizer; ``Tsallis(1.5)`` by default. The loss is ``linear_entmax_loss`` where it exists.

    Example:
        A model without memory, which predicts a symbol from the last one:

        >>> import torch
        >>> from fenchel.seq2seq import Pair, Seq2Seq, Vocabulary, collate
        >>> class Bigrams(Seq2Seq):
        ...     def __init__(self, letters):
        ...         super().__init__(letters, letters, width=4)
        ...         self.embedding = torch.nn.Embedding(len(letters) + 2, 4)
        ...     def encode(self, source):
        ...         return source.mask
        ...     def decode(self, state, inputs):
        ...         return self.embedding(inputs), (state / state.sum(1, keepdim=True)).unsqueeze(1)
        >>> letters = Vocabulary("ab")
        >>> Bigrams(letters)(collate([Pair(("a",), ("a", "b"))], letters, letters)).shape
        torch.Size([])
    """

    sizes: ClassVar[tuple[str, ...]] = ()
    """The names of the numeric arguments of a subclass."""
    names_in_files: ClassVar[Mapping[str, str]] = {}
    """Sizes whose name in saved files differs from that of the argument: {argument: name in the file}."""
    retired: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of tensors that older folders have and the model does not need."""

    def __init__(
        self,
        source: Vocabulary,
        target: Vocabulary,
        width: int,
        *,
        attention: Regularizer | None = None,
        output: Regularizer | None = None,
    ) -> None:
        super().__init__()
        check_kind(source, "source", Vocabulary)
        check_kind(target, "target", Vocabulary)
        self.source, self.target = source, target
        self.attention_omega = Tsallis(1.5) if attention is None else _own(check_omega(attention, "attention"))
        self.omega = Tsallis(1.5) if output is None else _own(check_omega(output, "output"))
        _check_output(self.omega, len(target))
        self.output = nn.Linear(width, len(target))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.output.weight.device

    # -- defined by subclasses -----------------------------------------------------------------------------------------

    def encode(self, source: Source) -> Any:
        """Encode a batch of sources as the state to decode from."""
        raise NotImplementedError

    def decode(self, state: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (B, T, width) for known inputs (B, T), and their attention (B, T, J) to the source."""
        raise NotImplementedError

    def hidden_states(self, state: Any, inputs: Tensor) -> Tensor:
        """The hidden states of ``decode``, (B, T, width), without attention weights."""
        return self.decode(state, inputs)[0]

    def advance(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Hidden states (N, width) after one more token (N,) per row, and the new states."""
        raise NotImplementedError

    def reorder(self, state: Any, index: Tensor) -> Any:
        """Select rows of the states by index; a row may be selected several times or never."""
        raise NotImplementedError

    # -- training ------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, averaged over its target symbols."""
        hidden = self.hidden_states(self.encode(batch.source.to(self.device)), batch.inputs.to(self.device))
        return self.loss(hidden, batch.target.to(self.device))

    def loss(self, hidden: Tensor, target: Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """The Fenchel-Young loss of the output layer for hidden states (…, width) and target numbers (…)."""
        weight, bias = self.output.weight, self.output.bias
        options: Any = {"ignore_index": IGNORED, "reduction": reduction}
        if (alpha := _fused(self.omega)) is not None:
            return linear_entmax_loss(hidden, weight, target, bias, alpha=alpha, **options)
        return fy_loss(F.linear(hidden, weight, bias), target, self.omega, **options)

    # -- search --------------------------------------------------------------------------------------------------------

    def start(self, sequences: Sequence[Sequence[str]]) -> Any:
        """The states of sources before the first step, one row per sequence."""
        if self.training:
            raise RuntimeError("the model is in training mode, where dropout is random: call model.eval() first")
        return self.encode(read(sequences, self.source).to(self.device))

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Probabilities (N, len(target)) of the next symbol after one more token (N,) per row, and the new states."""
        hidden, state = self.advance(tokens.to(self.device), state)
        return self.omega.argmax(self.output(hidden)), state

    @property
    def begin(self) -> int:
        """The first input of the decoder."""
        return self.target.start

    @torch.no_grad()
    def attend(self, source: Sequence[str], target: Sequence[str]) -> Tensor:
        """Attention weights of the symbols of a target and its end (rows) over those of a source (columns)."""
        training = self.training
        inputs = torch.tensor([[self.target.start, *self.target.encode(target)]], device=self.device)
        try:
            _, weights = self.eval().decode(self.start([source]), inputs)
        finally:
            self.train(training)
        return weights[0]

    # -- folders -------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The sizes, regularizers and vocabularies of the model, as a dictionary for JSON."""
        return {
            "format": saving.FORMAT,
            "model": type(self).__name__,
            "sizes": {self.names_in_files.get(name, name): getattr(self, name) for name in self.sizes},
            "attention": to_config(self._attention),
            "output": self.omega.config(),
            "source": list(self.source.symbols),
            "target": list(self.target.symbols),
        }

    def save(self, folder: Path | str) -> None:
        """Write ``model.safetensors`` and ``model.json`` into a folder, which is created if necessary.

        A regularizer that cannot be written to a file, such as ``Custom``, raises a ValueError.
        """
        self._check_writable()
        saving.save(folder, self.settings(), self.state_dict())

    def _check_writable(self) -> None:
        """Raise a ValueError if a regularizer of the model cannot be written to a file."""
        for name, part in (("attention", self._attention), ("output", self.omega)):
            if to_config(part) is None:
                raise ValueError(
                    f"{name} is {part}, which a file cannot hold; save model.state_dict() by torch.save instead, and "
                    "load it into a model with the same arguments"
                )

    @property
    def _attention(self) -> nn.Module:
        """The argument ``attention``, as a file describes it."""
        return self.attention_omega

    @classmethod
    def _options(cls, settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Further arguments of the class: those of ``load``, or else what a file says."""
        if given:
            raise TypeError(f"{cls.__name__} has no argument {min(given)}")
        return {}

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        attention: Regularizer | nn.Module | None = None,
        output: Regularizer | None = None,
        **options: Any,
    ) -> Self:
        """Load a model of this class or a subclass from a folder, in evaluation mode.

        Args:
            folder: the folder that was given to ``save``.
            attention: attention in place of the saved one.
            output: a regularizer in place of the saved one.
            options: further arguments of the class in place of the saved ones, such as ``fertility`` of ``Recurrent``.
        """
        known = {kind.__name__: kind for kind in [cls, *Seq2Seq.__subclasses__()] if kind is not Seq2Seq}
        kinds = {name: kind for name, kind in known.items() if issubclass(kind, cls)}
        settings, tensors = saving.load(folder, kinds)
        kind = kinds[settings["model"]]
        with saving.whole(folder, kind.__name__):
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(kind.retired)}
            arguments = {written: name for name, written in kind.names_in_files.items()}
            sizes = {arguments.get(name, name): size for name, size in settings["sizes"].items()}
            saving.check_names(kind.sizes, sizes)
            saving.check_sizes(sizes, tensors)
            source, target = (Vocabulary(saving.check_strings(settings[name], name)) for name in ("source", "target"))
            for name in ("attention", "output"):
                _check_numbers(settings[name])
            omegas = {
                "attention": attention or _read(settings["attention"], "attention", nn.Module),
                "output": output or _read(settings["output"], "output", Regularizer),
                **kind._options(settings, options),
            }
        made = saving.build(folder, kind.__name__, tensors, lambda: cast(Any, kind)(source, target, **sizes, **omegas))
        return cast(Self, made)


def check_depth(layers: int, dropout: float) -> None:
    """Check the number of layers and the dropout probability."""
    check_count(layers, "layers")
    check_share(dropout, "dropout")


def _check_output(omega: Regularizer, symbols: int) -> None:
    """Raise a ValueError for an Ω whose loss does not take class indices."""
    target, scores = torch.zeros((), dtype=torch.long, device="cpu"), torch.zeros(symbols, device="cpu")
    try:
        simplified(omega).check_classes(target, scores, 0)
    except (TypeError, ValueError):
        raise ValueError(f"output must be a choice of one symbol, such as Tsallis(1.5); got {omega}") from None


def _read(config: Config | None, name: str, expected: type[nn.Module]) -> nn.Module:
    if config is None:  # folders of the first version
        raise ValueError(f"the model's {name} regularizer is not in the file: load with {name}=…")
    return from_config(config, expected)


def _own(omega: Regularizer) -> Regularizer:
    """A copy of an Ω if it has parameters, so that two models do not share them."""
    return copy.deepcopy(omega) if any(True for _ in omega.parameters()) else omega


def _check_numbers(description: Any) -> None:
    """Raise a ValueError if numbers or shapes in the description of an Ω are larger than any model's."""
    if isinstance(description, (float, int)) and not (abs(description) < LARGEST_NUMBER or description == math.inf):
        raise ValueError(f"the numbers of a regularizer must be below {LARGEST_NUMBER:g}, got {description}")
    if isinstance(description, dict):
        if math.prod(map(int, description.get("shape") or [])) > LARGEST_SHAPE:
            raise ValueError(f"the shape of a regularizer must have at most {LARGEST_SHAPE} entries")
        description = list(description.values())
    if isinstance(description, list):
        for part in description:
            _check_numbers(part)


def _fused(omega: Regularizer) -> float | Tensor | None:
    """Alpha if ``linear_entmax_loss`` supports this Ω, else None."""
    base, gamma = omega.canonical()
    alpha = base.parameter
    if base.name != "tsallis" or alpha is None or isinstance(gamma, Tensor) or gamma != 1:
        return None
    if isinstance(alpha, Tensor):
        low, high = getattr(base, "bounds", None) or (0.0, 0.0)
        return alpha if alpha.numel() == 1 and low >= 1 and high <= 2 else None
    return alpha if 1 <= alpha <= 2 else None

"""A layer that tags sequences: a conditional random field over emissions, dense or sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_flag, check_floats, check_integers, check_like, check_mask, check_one_of
from fenchel._torch import known
from fenchel.dp.chain import NOT_OBSERVED, LinearChain
from fenchel.dp.program import DynamicProgram, Paths, check_choice
from fenchel.regularizers import Regularizer, Shannon

Rules = tuple[Tensor, Tensor, Tensor]
"""Which tags may follow each other, [previous, current], come first, and come last; boolean."""

_HINT = (
    ". Tags are not an argument here. In pytorch-crf they are, for a log-likelihood to be maximised; the loss to be "
    "minimised is crf(emissions, mask).loss(tags)"
)

_TORCHCRF = {"trans_matrix": "transitions", "start_trans": "start_transitions", "end_trans": "end_transitions"}


class CRF(nn.Module):
    """A conditional random field: scores of tags and of neighbouring tags, as a distribution over tag sequences.

    ``crf(emissions, mask)`` is a :class:`fenchel.dp.LinearChain` over the batch: ``.loss(tags)`` to train, ``.map()``
    and ``.top(k)`` to decode, ``.marginals``, ``.log_prob(tags)``, ``.sample(n)``, ``.entropy()``. With ``Shannon()``
    the loss is the negative log-likelihood, one per sentence; with ``0.5 * Gini()`` it is a sparse one, and most tag
    sequences have probability zero. Parameters have the names and the meaning of pytorch-crf's, and
    ``load_state_dict`` takes those of pytorch-crf and of TorchCRF. (Their ``crf(emissions, tags)`` is a log-likelihood
    to be maximised; here that call is refused.)

    Positions where ``mask`` is False are left out of the chain, wherever they are, and their neighbours are linked.
    Results and tags keep their positions: where ``mask`` is False marginals are 0, paths −1 and tags ignored, and
    ``transition_marginals[:, t]`` is the link from t to the next position that is left. A sentence of which nothing is
    left has one path, all −1, and value, loss and entropy 0.

    Two recipes for tags of −100:

    * Word pieces, of which the first of each word has a tag and the others −100: ``crf(emissions, tags != -100)``
      leaves the others out, so that words are linked with words. At prediction, give the mask of first pieces.
    * Words without annotation: ``crf(emissions, mask).loss(tags)`` with −100 where ``mask`` is True. They stay
      in the chain and are *not observed*: the loss is the value less the value over all sequences that agree with the
      observed tags.

    Args:
        num_tags: the number of tags S.
        omega: smooths every maximum, as in ``LinearChain``; ``Shannon()`` if None.
        batch_first: whether emissions are (B, T, S), mask and tags (B, T), and not (T, B, S) and (T, B). Results are
            (B, T, …) always.
        constraints: which tags may follow each other. "BIO" or "BIOES", which need ``labels``; or a boolean matrix
            (S, S), [previous, current], True = allowed; or (matrix, first, last) with tags (S,) that may begin and end
            a sentence. What is forbidden is never decoded and has marginal 0. Tags that violate them raise an error in
            ``loss`` on the CPU; elsewhere their loss is +inf. They are not part of the ``state_dict``.
        labels: names of the tags, such as ["O", "B-PER", "I-PER"].

    Example:
        >>> import torch, fenchel
        >>> _ = torch.manual_seed(0)
        >>> crf = fenchel.nn.CRF(3, constraints="BIO", labels=["O", "B-PER", "I-PER"])
        >>> emissions, tags = torch.randn(2, 4, 3), torch.tensor([[1, 2, 0, 0], [0, 1, -100, -100]])
        >>> mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
        >>> chain = crf(emissions, mask)
        >>> chain.loss(tags).mean().backward()
        >>> crf.decode(emissions, mask), chain.marginals.shape
        ([[0, 1, 2, 2], [0, 0]], torch.Size([2, 4, 3]))

    References: Lafferty, McCallum & Pereira (2001); Mensch & Blondel (2018).
    """

    _follows: Tensor | None
    _first: Tensor | None
    _last: Tensor | None

    def __init__(
        self,
        num_tags: int,
        omega: Regularizer | None = None,
        *,
        batch_first: bool = True,
        constraints: str | Tensor | tuple[Tensor, Tensor, Tensor] | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.num_tags = check_count(num_tags, "num_tags")
        self.omega = Shannon() if omega is None else check_choice(omega)
        self.batch_first = check_flag(batch_first, "batch_first")
        self.labels = None if labels is None else _check_labels(labels, self.num_tags)
        self.start_transitions = nn.Parameter(torch.empty(self.num_tags))
        self.end_transitions = nn.Parameter(torch.empty(self.num_tags))
        self.transitions = nn.Parameter(torch.empty(self.num_tags, self.num_tags))
        rules = (None,) * 3 if constraints is None else _check_constraints(constraints, self.num_tags, self.labels)
        for name, rule in zip(("_follows", "_first", "_last"), rules, strict=True):
            self.register_buffer(name, rule, persistent=False)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Draw all parameters from the interval [−0.1, 0.1]."""
        for parameter in (self.start_transitions, self.end_transitions, self.transitions):
            nn.init.uniform_(parameter, -0.1, 0.1)

    def extra_repr(self) -> str:
        constrained = "" if self._follows is None else ", constrained"
        return f"{self.num_tags}, batch_first={self.batch_first}{constrained}"

    def forward(self, emissions: Tensor, mask: Tensor | None = None, *tags: object, **options: object) -> LinearChain:
        """The distribution over tag sequences.

        Args:
            emissions: (B, T, S), the score of each tag at each position. Results have the wider of its dtype and that
                of the parameters.
            mask: boolean (B, T), which positions are part of a sentence; all if None. Nothing else is taken: tags go
                to ``.loss``.
        """
        if tags or options:
            raise TypeError(f"crf takes emissions and mask, got {len(tags) + len(options)} further arguments{_HINT}")
        if mask is not None:
            try:
                check_mask(mask, true="part of the sentence")
            except TypeError as error:
                raise TypeError(f"{error}{_HINT}") from None
        check_floats(emissions, "emissions")
        if emissions.dim() != 3 or emissions.shape[-1] != self.num_tags:
            shape = "(B, T, " if self.batch_first else "(T, B, "
            raise ValueError(f"emissions must have shape {shape}{self.num_tags}), got {tuple(emissions.shape)}")
        if emissions.shape[int(self.batch_first)] == 0:
            raise ValueError(
                f"emissions must have at least one position, which mask may leave out, got {tuple(emissions.shape)}"
            )
        if mask is not None:
            check_like(mask, "mask", emissions[..., 0], "emissions without tags")
        if not self.batch_first:
            emissions, mask = emissions.transpose(0, 1), None if mask is None else mask.t()
        return _Tagging(self, emissions, mask)

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The best tag sequence of each sentence, as lists of ints, one per position where ``mask`` is True.

        Args:
            emissions: as in ``forward``.
            mask: as in ``forward``.

        Returns:
            One list per sentence; −1 where the constraints leave no sequence.
        """
        with torch.no_grad():
            paths = self(emissions, mask).map()
        if mask is None:
            found: list[list[int]] = paths.tolist()
            return found
        kept = mask if self.batch_first else mask.t()
        return [path[row].tolist() for path, row in zip(paths.cpu(), kept.cpu(), strict=True)]

    def _scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of steps (S, S), and of first and last tags (S,): the parameters, −inf where constraints forbid."""
        scores, rules = (self.transitions, self.start_transitions, self.end_transitions), self._rules()
        if rules is None:
            return scores
        steps, first, last = (torch.where(rule, each, -torch.inf) for each, rule in zip(scores, rules, strict=True))
        return steps, first, last

    def _rules(self) -> Rules | None:
        """The constraints, or None."""
        follows, first, last = self._follows, self._first, self._last
        return None if follows is None or first is None or last is None else (follows, first, last)


def _rename(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Give the parameters of TorchCRF in a state_dict their names here."""
    for theirs, ours in _TORCHCRF.items():
        if prefix + theirs in state and prefix + ours not in state:
            state[prefix + ours] = state.pop(prefix + theirs)


# -- the chain ---------------------------------------------------------------------------------------------


class _Tagging(LinearChain):
    """The chain of the positions that a mask leaves; what goes in and comes out has the positions of the emissions.

    Args:
        crf: the layer.
        emissions: (B, T, S).
        mask: boolean (B, T), or None.
    """

    def __init__(self, crf: CRF, emissions: Tensor, mask: Tensor | None) -> None:
        steps, first, last = crf._scores()
        emissions = emissions.to(torch.promote_types(emissions.dtype, steps.dtype))
        self._batch_first, self._mask, self._labels, self._rules = crf.batch_first, mask, crf.labels, crf._rules()
        self._place: Tensor | None = None
        self._order: Tensor | None = None
        lengths = None
        if mask is not None:
            lengths = mask.sum(1)
            if not known(mask) or bool((mask[:, 1:] & ~mask[:, :-1]).any()):
                # Positions that are left come first, in their order, then the others.
                self._place = torch.where(mask, mask.cumsum(1) - 1, lengths.unsqueeze(-1) + (~mask).cumsum(1) - 1)
                positions = torch.arange(mask.shape[1], device=mask.device).expand_as(self._place)
                self._order = torch.zeros_like(self._place).scatter(1, self._place, positions)
                emissions = _take(emissions, self._order)
        super().__init__(emissions, steps, lengths, first, last, crf.omega)

    @property
    def marginals(self) -> Tensor:
        return _take(super().marginals, self._place)

    @property
    def transition_marginals(self) -> Tensor:
        return self._unpack_links(super().transition_marginals)

    @property
    def walk(self) -> Tensor:
        return self._unpack_links(super().walk)

    def map(self) -> Tensor:
        return self._unpack(super().map())

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        return self._unpack(super().sample(n, generator))

    def top(self, k: int) -> Paths:
        best = super().top(k)
        return Paths(self._unpack(best.paths.transpose(0, 1)).transpose(0, 1), best.probs)

    def log_prob(self, path: Tensor) -> Tensor:
        """The log-probability of tag sequences (…, B, T), as ``map`` and ``sample`` return them."""
        return super().log_prob(self._pack(_check_last(path, "path", self._inside.shape)))

    def loss(self, target: Tensor) -> Tensor:
        """The loss of tags (B, T), or (T, B) if the batch is not first; −100 where a tag is not observed."""
        batch, steps = self._inside.shape
        if self._batch_first:
            _check_last(target, "tags", (batch, steps))
        else:
            target = _check_last(target, "tags", (steps, batch)).transpose(-1, -2)
        target = self._pack(target)
        loss = super().loss(target)
        if self._rules is not None and known(loss) and bool((loss == torch.inf).any()):
            self._refuse(target.reshape(-1, steps), self._rules)
        return loss

    def _refuse(self, target: Tensor, rules: Rules) -> None:
        """Raise an error if tags (n B, T) of the chain violate constraints, and say where."""
        follows, first, last = rules
        every = torch.arange(len(first))
        for row, tags in enumerate(target.tolist()):
            sentence = row % len(self.lengths)
            end = int(self.lengths[sentence]) - 1
            allowed = first
            for t, tag in enumerate(tags[: end + 1]):
                here = allowed if tag == NOT_OBSERVED else allowed & (every == tag)
                if not bool(here.any()):
                    where = "begin the sentence" if t == 0 else f"follow {self._label(tags[t - 1])}"
                elif t == end and not bool((here & last).any()):
                    where = "end the sentence"
                else:
                    allowed = follows[here].any(0)
                    continue
                position = t if self._order is None else int(self._order[sentence, t])
                raise ValueError(
                    f"tags violate the constraints in sentence {sentence} at position {position}: "
                    f"{self._label(tag)} may not {where}"
                )

    def _label(self, tag: int) -> str:
        """A tag in an error."""
        if tag == NOT_OBSERVED:
            return "what is not observed"
        return repr(tag if self._labels is None else self._labels[tag])

    def _check_paths(self, other: DynamicProgram) -> None:
        super()._check_paths(other)
        mine, theirs = ((each._order if isinstance(each, _Tagging) else None) for each in (self, other))
        if mine is not theirs and (mine is None or theirs is None or not torch.equal(mine, theirs)):
            raise ValueError("other must have the same mask")

    def _pack(self, path: Tensor) -> Tensor:
        """A path (…, B, T) in the order of the chain."""
        return path if self._order is None else path.gather(-1, self._order.expand(path.shape))

    def _unpack_links(self, links: Tensor) -> Tensor:
        """Of (B, T−1, …), the link from each position to the next that is left; zero if there is none."""
        if self._place is None or links.shape[1] == 0:
            return links
        return _take(torch.cat([links, torch.zeros_like(links[:, :1])], 1), self._place)[:, :-1]

    def _unpack(self, path: Tensor) -> Tensor:
        """A path (…, B, T) of the chain in the order of the positions."""
        return path if self._place is None else path.gather(-1, self._place.expand(path.shape))


def _check_last(tags: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Check a tensor of integers whose last dimensions are ``shape``."""
    tags = check_integers(tags, name)
    if tags.shape[-2:] != shape:
        raise ValueError(f"{name} must have shape (…, {shape[0]}, {shape[1]}), got {tuple(tags.shape)}")
    return tags


def _take(x: Tensor, places: Tensor | None) -> Tensor:
    """Of (B, T, …), the entries at places (B, T); all if None."""
    return x if places is None else x.gather(1, places.reshape(*places.shape, *(1,) * (x.dim() - 2)).expand(x.shape))


# -- constraints -------------------------------------------------------------------------------------------

Piece = tuple[str, str] | None
"""A letter of a scheme and a type; None for the end of a sentence."""


def _bio(before: Piece, here: Piece) -> bool:
    """Whether a tag may follow another: an inside needs a beginning or an inside of its type before it."""
    if here is None or here[0] != "I":
        return True
    return before is not None and before[0] in "BI" and before[1] == here[1]


def _bioes(before: Piece, here: Piece) -> bool:
    """Whether a tag may follow another: what was begun goes on until its end."""
    begun = before is not None and before[0] in "BI"
    if here is None or here[0] not in "IE":
        return not begun
    return before is not None and begun and before[1] == here[1]


_SCHEMES: dict[str, Callable[[Piece, Piece], bool]] = {"BIO": _bio, "BIOES": _bioes}


def _check_labels(labels: Sequence[str], num_tags: int) -> list[str]:
    if (
        isinstance(labels, str)
        or not isinstance(labels, Sequence)
        or not all(isinstance(label, str) for label in labels)
    ):
        raise TypeError(f"labels must be a sequence of strings, got {labels!r}")
    if len(labels) != num_tags or len(set(labels)) != num_tags:
        raise ValueError(f"labels must be {num_tags} different names, one per tag, got {list(labels)}")
    return list(labels)


def _check_constraints(constraints: Any, num_tags: int, labels: list[str] | None) -> Rules:
    """Constraints, checked, as boolean tensors."""
    if isinstance(constraints, str):
        check_one_of(constraints, "constraints", *_SCHEMES)
        if labels is None:
            raise ValueError(f"labels must be given with constraints={constraints!r}, got None")
        allowed, pieces = _SCHEMES[constraints], [_piece(label, constraints) for label in labels]
        return (
            torch.tensor([[allowed(before, here) for here in pieces] for before in pieces]),
            torch.tensor([allowed(None, here) for here in pieces]),
            torch.tensor([allowed(before, None) for before in pieces]),
        )
    if isinstance(constraints, Tensor):
        constraints = constraints, *(torch.ones(2, num_tags, dtype=torch.bool, device=constraints.device).unbind())
    if not isinstance(constraints, tuple) or len(constraints) != 3:
        raise TypeError(
            "constraints must be 'BIO', 'BIOES', a boolean tensor or a tuple of three (matrix, first, last), got "
            f"{type(constraints).__name__}"
        )
    names = "constraints", "constraints[1]", "constraints[2]"
    for each, name, shape in zip(constraints, names, ((num_tags, num_tags), (num_tags,), (num_tags,)), strict=True):
        if check_mask(each, name, "allowed").shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(each.shape)}")
    follows, first, last = (each.clone() for each in constraints)
    return follows, first, last


def _piece(label: str, scheme: str) -> tuple[str, str]:
    """The letter and the type of a label: ("B", "PER") of "B-PER"."""
    letter, _, kind = label.partition("-")
    if len(letter) != 1 or letter not in scheme or (letter == "O" and label != "O"):
        letters = ", ".join(repr(each) for each in scheme if each != "O")
        raise ValueError(
            f"labels must be 'O' or one of {letters} with a type, such as 'B-PER', for constraints={scheme!r}; "
            f"got {label!r}"
        )
    return letter, kind

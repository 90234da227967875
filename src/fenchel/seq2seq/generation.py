"""Text generation from sparse distributions: entmax sampling, and metrics that allow words of probability zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._checks import check_count, check_expands, check_floats, check_integers, check_number, check_positive
from fenchel._torch import concrete
from fenchel.losses import Reduction, check_reduction, is_kept, reduced
from fenchel.regularizers import Regularizer, Tsallis
from fenchel.regularizers.base import check_omega, simplified
from fenchel.regularizers.rows import check_indices, check_scores

_STEPS = 64
"""The number of bisections of λ in [0, 1], more than a float64 has binary digits."""

_ROUNDING = 1e-7
"""A λ closer to 1 than this is 1: with float32 probabilities it cannot be distinguished."""


def sample(
    logits: Tensor,
    omega: Regularizer | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Sample indices of words from argmax_Ω of logits (…, V).

    .. math:: x \sim \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - T \, \Omega(p)

    With a sparse Ω this is entmax sampling: words outside of the support are never drawn. The distribution is that of
    training, without truncation such as top-k or nucleus sampling.

    Args:
        logits: (…, V), floating point.
        omega: the regularizer; ``Tsallis(1.5)`` by default.
        temperature: T > 0, a number or a tensor that broadcasts to ``logits`` with size 1 along the last dimension.
        mask: boolean, broadcasts to ``logits``; True = may be drawn. Logits of −inf are masked too.
        num_samples: the number of independent words per row.
        generator: of the random numbers; torch's default if None.

    Returns:
        Indices, (…); with ``num_samples``, (num_samples, …). A row that is NaN or masked altogether raises a
        ValueError.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.seq2seq import sample
        >>> logits = torch.tensor([[2.0, 1.4, 0.2], [0.0, 5.0, 0.0]])
        >>> fenchel.entmax(logits)
        tensor([[0.7073, 0.2927, 0.0000],
                [0.0000, 1.0000, 0.0000]])
        >>> drawn = sample(logits, num_samples=1000)
        >>> drawn.shape, drawn.amax(0)
        (torch.Size([1000, 2]), tensor([1, 1]))

    References: Martins, Marinho & Martins (2020).
    """
    omega = Tsallis(1.5) if omega is None else check_omega(omega)
    temperature = check_positive(temperature, "temperature")
    check_scores(logits, -1, "logits")
    if isinstance(temperature, Tensor):
        check_expands(temperature, "temperature", logits, "logits")
    if num_samples is not None:
        num_samples = check_count(num_samples, "num_samples", 0)
    chooser = simplified(temperature * omega)
    rows = logits.detach()
    p = chooser.argmax(rows.to(_wide(rows.dtype)), dim=-1, mask=mask).detach()
    if concrete(p) and not bool((p.sum(-1) > 0).all()):
        raise ValueError(
            "logits must have an unmasked, finite entry in every row: one row is NaN, +inf, or masked altogether"
        )
    p = p if num_samples is None else p.expand(num_samples, *p.shape)
    # The index of the smallest of exponential variables with rates p is a sample of p; rates of 0 are left out.
    time = torch.empty_like(p, memory_format=torch.contiguous_format).exponential_(generator=generator) / p
    return torch.where(p > 0, time, torch.inf).argmin(-1)


def epsilon_perplexity(probs: Tensor, target: Tensor, epsilon: float, *, ignore_index: int = -100) -> Tensor:
    r"""Perplexity of targets after adding ε to every probability; finite even if targets have probability zero.

    .. math:: \exp\Big(-\frac1T \sum_t \log \frac{p_t(x_t) + \varepsilon}{1 + \varepsilon |V|}\Big)

    It is the perplexity of a mixture with the uniform distribution, whose weight is λ = ε|V| / (1 + ε|V|). For
    ``epsilon=0`` it is infinite if a target has probability zero.

    Args:
        probs: (…, V), the probabilities of all words at each position.
        target: (…), the true words.
        epsilon: ε ≥ 0; :func:`best_epsilon` finds the best one, on validation data.
        ignore_index: a target that is left out of the mean.

    Returns:
        A scalar, in float32 or better.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import epsilon_perplexity
        >>> p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
        >>> epsilon_perplexity(p, torch.tensor([0, 2]), 0.0), epsilon_perplexity(p, torch.tensor([0, 2]), 0.5)
        (tensor(inf), tensor(3.5355))

    References: Martins, Marinho & Martins (2020).
    """
    epsilon = check_number(epsilon, "epsilon", 0, ends="[)")
    probs, q, kept = _target_probabilities(probs, target, ignore_index)
    surprise = math.log1p(epsilon * probs.shape[-1]) - (q + epsilon).log()
    return reduced(torch.where(kept, surprise, 0.0), kept, "mean").exp()


def best_epsilon(probs: Tensor, target: Tensor, *, ignore_index: int = -100) -> float:
    r"""The ε with the smallest :func:`epsilon_perplexity`.

    .. math:: \operatorname{argmax}_{\varepsilon \ge 0} \;
              \sum_t \log \frac{p_t(x_t) + \varepsilon}{1 + \varepsilon |V|}

    The objective is concave in the weight λ = ε|V| / (1 + ε|V|) of the uniform distribution, and solved by bisection.
    Arguments as in :func:`epsilon_perplexity`; choose ε on validation data.

    Returns:
        ε: 0 if the model without smoothing is best, inf if the uniform distribution is better than any mixture.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import best_epsilon
        >>> p = torch.tensor([[0.5, 0.5, 0.0]]).expand(4, 3)
        >>> round(best_epsilon(p, torch.tensor([0, 1, 1, 2])), 6)  # a quarter of the words has probability 0
        1.0
    """
    probs, q, kept = _target_probabilities(probs, target, ignore_index)
    q, even = q[kept].double(), 1 / probs.shape[-1]
    if not len(q):
        raise ValueError("target must hold a word that is not ignored, got none")

    def rises(share: float) -> bool:
        return float(((even - q) / (q + share * (even - q))).sum()) > 0

    if not rises(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) else (low, middle)
    # Weights that cannot be distinguished from 1 are 1.
    return high * even / (1 - high) if 1 - high > _ROUNDING else math.inf


def jensen_shannon(
    probs: Tensor,
    target: Tensor,
    *,
    base: float = math.e,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The Jensen-Shannon divergence between predicted distributions (…, V) and target words (…).

    .. math:: \tfrac12 \operatorname{KL}(p \,\|\, m) + \tfrac12 \operatorname{KL}(e_x \,\|\, m), \quad
              m = \tfrac12 (p + e_x)

    It depends on p(x) only: log 2 for p(x) = 0, and 0 for p(x) = 1.

    Args:
        probs: (…, V), the probabilities of all words at each position.
        target: (…), the true words.
        base: of the logarithm; with 2, the divergence is in [0, 1].
        ignore_index: a target that is left out.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        A scalar, or with ``"none"`` one value per target (0 for ignored targets), in float32 or better.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import jensen_shannon
        >>> p = torch.tensor([[0.5, 0.5, 0.0]]).expand(2, 3)
        >>> jensen_shannon(p, torch.tensor([0, 2]), base=2, reduction="none")
        tensor([0.3113, 1.0000])

    References: Martins, Marinho & Martins (2020); Lin (1991).
    """
    base = check_number(base, "base", 1)
    check_reduction(reduction)
    _, q, kept = _target_probabilities(probs, target, ignore_index)
    # Written in terms of 1 − q, which is precise for q near 1.
    missed = 1 - q
    half = torch.log1p(-missed / 2)  # log of (1 + q)/2
    divergence = (torch.xlogy(q, q) - (1 + q) * half + missed * math.log(2)) / 2
    return reduced(torch.where(kept, divergence / math.log(base), 0.0), kept, reduction)


def sparsemax_score(
    probs: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    r"""The sparsemax score of predicted distributions (…, V): one minus their smallest possible sparsemax loss.

    .. math:: 1 - \min_{\operatorname{sparsemax}(s) = p} L_{\Omega_2}(s, x) = 1 - \tfrac12 \|p - e_x\|^2
              = p(x) + \tfrac12 \big(1 - \|p\|^2\big)

    It is in [0, 1], and 1 exactly if p(x) = 1. For one-hot p it is the accuracy.

    Arguments and result as in :func:`jensen_shannon`.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import sparsemax_score
        >>> p = torch.tensor([[0.5, 0.5, 0.0]]).expand(2, 3)
        >>> sparsemax_score(p, torch.tensor([0, 2]), reduction="none")
        tensor([0.7500, 0.2500])

    References: Martins, Marinho & Martins (2020).
    """
    check_reduction(reduction)
    probs, q, kept = _target_probabilities(probs, target, ignore_index)
    return reduced(torch.where(kept, q + (1 - probs.square().sum(-1)) / 2, 0.0), kept, reduction)


def repetition(tokens: Tensor, window: int, *, ignore_index: int = -100) -> Tensor:
    r"""The share of tokens that also occur among the ``window`` tokens before them.

    Args:
        tokens: (…, T), integers; each row is one text.
        window: the number of previous positions that are searched, ignored ones included.
        ignore_index: a token that is left out, such as padding.

    Returns:
        A scalar in float32: the mean over all tokens that are not ignored.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import repetition
        >>> repetition(torch.tensor([5, 6, 5, 7, 6]), window=2), repetition(torch.tensor([5, 6, 5, 7, 6]), window=3)
        (tensor(0.2000), tensor(0.4000))

    References: Welleck et al. (2020).
    """
    tokens, window = _check_tokens(tokens), check_count(window, "window")
    kept = is_kept(tokens, ignore_index)
    repeated = torch.zeros_like(kept)
    for back in range(1, min(window, tokens.shape[-1] - 1) + 1):
        repeated[..., back:] |= tokens[..., back:] == tokens[..., :-back]
    return (repeated & kept).sum() / kept.sum()


def distinct(tokens: Tensor, n: int, *, ignore_index: int = -100) -> Tensor:
    """The share of different n-grams among all n-grams of the tokens; 1 if none occurs twice.

    Args:
        tokens: (…, T), integers; each row is one text.
        n: the length of the n-grams.
        ignore_index: n-grams with this token are left out.

    Returns:
        A scalar in float32; NaN if there is no n-gram.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import distinct
        >>> distinct(torch.tensor([[1, 2, 1, 2, 1]]), 2)
        tensor(0.5000)

    References: Li et al. (2016).
    """
    tokens, n = _check_tokens(tokens), check_count(n, "n")
    if tokens.shape[-1] < n:
        return torch.tensor(torch.nan, device=tokens.device)
    grams = tokens.unfold(-1, n, 1).reshape(-1, n)
    grams = grams[is_kept(grams, ignore_index).all(-1)]
    different = torch.unique(grams, dim=0)
    return torch.tensor(float(len(different)), device=tokens.device) / len(grams)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _target_probabilities(probs: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Check probabilities and targets.

    Returns the probabilities, uniform where the target is ignored; the probabilities of the targets; and which targets
    are not ignored.
    """
    check_floats(probs, "probs", "…", "V")
    target = check_integers(target, "target", "integer class indices")
    kept = is_kept(target, ignore_index)
    index = check_indices(target.masked_fill(~kept, 0), probs, probs.dim() - 1, ignore_index)
    tolerance = max(1e-3, 4 * torch.finfo(probs.dtype).eps)
    # Probabilities at ignored positions are not used, whatever they are.
    probs = torch.where(kept.unsqueeze(-1), probs.to(_wide(probs.dtype)), 1 / probs.shape[-1])
    if concrete(probs):
        # Written so that NaN, for which comparisons are False, is refused.
        fits = ((probs.sum(-1) - 1).abs() <= tolerance) & (probs >= 0).all(-1)
        if not bool(fits.all()):
            raise ValueError("probs must hold probabilities: entries ≥ 0 that sum to 1 along the last dimension")
    return probs, probs.gather(-1, index.unsqueeze(-1)).squeeze(-1), kept


def _check_tokens(tokens: Tensor) -> Tensor:
    tokens = check_integers(tokens, "tokens")
    if tokens.dim() == 0:
        raise ValueError("tokens must have shape (…, T), got a scalar")
    return tokens

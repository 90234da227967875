"""Errors of public constructors and functions: each names its argument, and objects of a wrong kind are refused.

A valid call is made first; then each of its arguments is replaced by values that do not belong there. What raises must
raise a TypeError or a ValueError that names the argument; an object of no known class must always raise.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fenchel
from fenchel import continuous, dp, factors, hopfield, mixed, nn, seq2seq, structures
from fenchel.regularizers import Scaled


class Stranger:
    """An object that no argument takes."""


STRANGE: list[Any] = ["a", None, -1, 2.5, math.nan, [1], Stranger(), torch.tensor([1, 2]), torch.zeros(7)]
Call = tuple[Callable[..., Any], dict[str, Any], Callable[[Any], Any] | None]


def _calls() -> dict[str, Call]:
    """Valid calls by name: a function, its arguments, and what is done with the result."""
    random = torch.Generator().manual_seed(0)
    s, x = torch.randn(3, 5, generator=random), torch.randn(10, 8, generator=random)
    q, y, p = torch.randn(2, 4, 6, 8, generator=random), torch.tensor([0, 1, 2]), s.softmax(-1)
    omega, basis = fenchel.Gini(), continuous.GaussianBasis.line(8)
    smooth: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    sums: dict[str, Any] = {"dim": -1, "weight": torch.ones(5), **smooth}
    letters = seq2seq.Vocabulary("abc")
    pairs = [seq2seq.Pair(("a", "b"), ("b", "a"))] * 4
    sizes: dict[str, Any] = {"source": letters, "target": letters, "attention": None, "output": None, "layers": 1}
    model = seq2seq.Recurrent(letters, letters, embedding=4, hidden=4, layers=1).eval()
    graph = fenchel.FactorGraph()
    literals = graph.variables(torch.zeros(4))
    states = fenchel.FactorGraph().variables(torch.zeros(3, 2))
    gaussian = continuous.BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=2.0)
    alphas: dict[str, Any] = {"alpha": 1.5, "learnable": True, "bounds": (1.0, 2.0), "shape": ()}
    series = torch.randn(3, 4, 2, generator=random)

    def on(*inputs: Any) -> Callable[[Any], Any]:
        return lambda made: made(*inputs)

    def layer(**options: Any) -> Any:
        return nn.MultiheadAttention(8, 2)(**options)

    def maps(name: str, value: float) -> dict[str, Any]:
        return {"scores": s, name: value, "dim": -1, "mask": torch.ones(3, 5, dtype=torch.bool)}

    attended = {"query": q, "key": q, "value": q, "omega": omega, "dropout_p": 0.0, "return_weights": False}
    rows = x.unsqueeze(1)
    return {
        "entmax": (fenchel.entmax, maps("alpha", 1.5), None),
        "normmax": (fenchel.normmax, maps("alpha", 2.0), None),
        "fusedmax": (fenchel.fusedmax, maps("strength", 0.1), None),
        "k_subsets": (fenchel.k_subsets, maps("k", 2), None),
        "constrained_sparsemax": (fenchel.constrained_sparsemax, maps("upper", 0.5), None),
        "support_size": (fenchel.support_size, {"p": p}, None),
        "segment_entmax": (
            fenchel.segment_entmax,
            {"scores": s[0], "index": torch.tensor([0, 0, 1, 1, 1]), "alpha": 1.5, "dim_size": 2},
            None,
        ),
        "entmax_loss": (fenchel.entmax_loss, {"scores": s, "target": y, "alpha": 1.5, "mask": None, **sums}, None),
        "fy_loss": (fenchel.fy_loss, {"scores": s, "target": y, "omega": omega, "mask": None, **sums}, None),
        "linear_entmax_loss": (
            fenchel.linear_entmax_loss,
            {"hidden": x[:3], "weight": torch.randn(5, 8), "target": y, "bias": torch.zeros(5), "alpha": 1.5, **smooth},
            None,
        ),
        "attention": (fenchel.attention, {**attended, "attn_mask": None, "is_causal": False, "scale": 0.3}, None),
        "Tsallis": (fenchel.Tsallis, alphas, on(s)),
        "Capped": (fenchel.Capped, {"upper": 0.5, "omega": omega}, on(s)),
        "Scaled": (Scaled, {"omega": omega, "gamma": 1.0}, on(s)),
        "Custom": (fenchel.Custom, {"fn": lambda p: (p * p).sum(-1), "tol": 1e-8, "max_iter": 50}, None),
        "SparseMAP": (fenchel.SparseMAP, {"structure": structures.Subsets(2), "max_iter": 10, "tol": 1e-6}, None),
        "nn.Entmax": (nn.Entmax, {"dim": -1, **alphas}, on(s)),
        "nn.EntmaxLoss": (nn.EntmaxLoss, {"alpha": 1.5, "learnable": True, "bounds": (1.0, 2.0), **sums}, on(s, y)),
        "nn.FenchelYoungLoss": (nn.FenchelYoungLoss, {"omega": omega, **sums}, on(s, y)),
        "nn.LinearEntmaxLoss": (
            nn.LinearEntmaxLoss,
            {"in_features": 8, "out_features": 5, "bias": True, "alpha": 1.5, "class_weight": None, **smooth},
            on(x[:3], y),
        ),
        "nn.MultiheadAttention": (
            nn.MultiheadAttention,
            {"embed_dim": 8, "num_heads": 2, "dropout": 0.0, "bias": True, "kdim": None, "vdim": None, "sink": False},
            on(rows, rows, rows),
        ),
        "nn.MultiheadAttention.forward": (
            layer,
            {"query": rows, "key": rows, "value": rows, "key_padding_mask": None, "attn_mask": None},
            None,
        ),
        "nn.CRF": (nn.CRF, {"num_tags": 5, "batch_first": True, "labels": None, "constraints": None}, None),
        "nn.SoftDTW": (
            nn.SoftDTW,
            {"gamma": 1.0, "normalize": False, "bandwidth": None, "omega": None, "cost": "l1"},
            on(series, series),
        ),
        "Memory": (hopfield.Memory, {"patterns": x, "omega": omega, "beta": 1.0, "chunk_size": None}, None),
        "update": (hopfield.update, {"query": x, "key": x, "value": x, "omega": omega, "dropout_p": 0.0}, None),
        "iterate": (hopfield.iterate, {"step": lambda z: 0.5 * z, "query": x, "max_steps": 9, "tol": None}, None),
        "capacity": (hopfield.capacity, {"dim": 64, "beta": 1.0, "omega": omega, "norm": 1.0, "noise": 0.0}, None),
        "Hopfield": (
            hopfield.Hopfield,
            {
                name: 8 if name == "input_size" else each.default
                for name, each in inspect.signature(hopfield.Hopfield).parameters.items()
                if name.endswith(("_size", "_eps", "_max", "_activation")) or name in ("num_heads", "dropout")
            },
            on((rows, rows, rows)),
        ),
        "HopfieldPooling": (hopfield.HopfieldPooling, {"input_size": 8, "quantity": 2, "trainable": True}, on(rows)),
        "LinearChain": (
            dp.LinearChain,
            {"unary": torch.zeros(2, 4, 5), "transition": torch.zeros(5, 5), "lengths": torch.tensor([4, 3])},
            None,
        ),
        "Alignment": (dp.Alignment, {"costs": torch.rand(2, 4, 5), "omega": omega, "band": None}, None),
        "Lattice": (
            dp.Lattice,
            {
                "sources": torch.tensor([0, 0, 1]),
                "targets": torch.tensor([1, 2, 2]),
                "scores": torch.zeros(1, 3),
                "num_nodes": 3,
                "omega": None,
            },
            None,
        ),
        "from_brackets": (dp.from_brackets, {"texts": "(a b)", "labels": [""]}, None),
        "dtw": (dp.dtw, {"x": series, "y": series, "gamma": 1.0, "omega": None, "band": None, "lengths": None}, None),
        "barycenter": (dp.barycenter, {"series": series, "weights": torch.ones(3), "gamma": 1.0, "max_iter": 2}, None),
        "Subsets": (structures.Subsets, {"k": 2}, None),
        "Knapsack": (factors.Knapsack, {"variables": literals, "costs": [1.0, 2.0, 1.0, 1.0], "budget": 2.0}, None),
        "Sequence": (factors.Sequence, {"variables": states, "transition": torch.zeros(2, 2)}, None),
        "Budget": (factors.Budget, {"variables": literals, "k": 2}, None),
        "ContinuousAttention": (continuous.ContinuousAttention, {"basis": basis, "alpha": 2.0, "ridge": 0.1}, None),
        "LongMemory": (
            continuous.LongMemory,
            {"basis": basis, "embed_dim": 16, "num_heads": 2, "alpha": 2.0, "samples": None, "horizon": 1},
            None,
        ),
        "Triangular": (continuous.Triangular, {"loc": 0.0, "scale": 1.0}, None),
        "LocationScale": (continuous.LocationScale, {"loc": 0.0, "scale": 1.0, "g": lambda t: t * t}, None),
        "generalized_covariance": (
            continuous.generalized_covariance,
            {"density": gaussian, "phi": lambda t: t, "psi": lambda t: t, "beta": None, "nodes": 9, "angles": 9},
            None,
        ),
        "ScoreDensity": (continuous.ScoreDensity, {"score": lambda t: t, "low": 0.0, "dtype": torch.float64}, None),
        "LogisticNormal": (mixed.LogisticNormal, {"loc": torch.zeros(2), "scale": torch.ones(2)}, None),
        "HardConcrete": (
            mixed.HardConcrete,
            {"logits": torch.zeros(3), "temperature": 0.5, "stretch": 1.1},
            None,
        ),
        "MaximumEntropy": (mixed.MaximumEntropy, {"vertices": 3, "precision": 0.0}, None),
        "faces": (mixed.faces, {"vertices": 3}, None),
        "Vocabulary": (seq2seq.Vocabulary, {"symbols": "abc"}, None),
        "Batches": (seq2seq.Batches, {"pairs": pairs, "source": letters, "target": letters, "size": 2}, None),
        "Recurrent": (seq2seq.Recurrent, {**sizes, "embedding": 4, "hidden": 4, "dropout": 0.1}, None),
        "Transformer": (seq2seq.Transformer, {**sizes, "width": 4, "num_heads": 2, "inner": 4}, None),
        "beam_search": (
            seq2seq.beam_search,
            {"stepper": model, "sources": ["ab"], "beam_size": 2, "max_length": 3, "length_penalty": 0.0},
            None,
        ),
        "force": (seq2seq.force, {"stepper": model, "source": "ab", "tokens": [2], "k": None}, None),
        "sample": (seq2seq.sample, {"logits": s, "omega": None, "temperature": 1.0, "num_samples": None}, None),
        "jensen_shannon": (seq2seq.jensen_shannon, {"probs": p, "target": y, "base": 2.0, "ignore_index": -1}, None),
        "validate": (seq2seq.validate, {"model": model, "batches": seq2seq.Batches(pairs, letters, letters)}, None),
    }


CALLS = _calls()
OTHERS = {
    ("hopfield", "value"): "key",
    ("force", "source"): "sources",
    ("jensen_shannon", "probs"): "target",
}
"""Arguments whose error may name another argument, with which they do not fit."""


@pytest.mark.parametrize("name", CALLS)
def test_errors_name_their_argument(name: str) -> None:
    function, arguments, then = CALLS[name]

    def call(**options: Any) -> None:
        made = function(**options)
        if then is not None:
            then(made)

    call(**arguments)
    for argument in arguments:
        for strange in STRANGE:
            said = None
            try:
                call(**{**arguments, argument: strange})
            except (TypeError, ValueError) as error:
                said = str(error)
            if said is None:
                assert not isinstance(strange, Stranger), f"{name}({argument}=…) takes any object"
            else:
                named = argument in said or OTHERS.get((name, argument), argument) in said
                assert named, f"{name}({argument}={strange!r}): {said}"


def test_an_unknown_keyword_of_soft_dtw_says_what_is_known() -> None:
    with pytest.raises(TypeError, match="takes gamma, normalize, bandwidth, omega and cost, got use_cuda: there is no"):
        nn.SoftDTW(use_cuda=True)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 10 and 3"):
        nn.MultiheadAttention(10, 3)

"""Write what the explorer needs of the library: numbers to test its mathematics against, and the frames of its trees.

    python docs/explorer/tools/library_numbers.py

writes tests/numbers.json and src/frames.js. A test of the library compares both with what the library gives now.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel import Capped, Fused, Gini, Hard, KSubsets, Norm, Oscar, Regularizer, Shannon, SparseMAP, Tsallis
from fenchel.dp import Alignment
from fenchel.hopfield import Memory
from fenchel.structures import DependencyTree

EXPLORER = Path(__file__).resolve().parent.parent
NUMBERS = EXPLORER / "tests" / "numbers.json"
FRAMES = EXPLORER / "src" / "frames.js"

OMEGAS: dict[str, Regularizer] = {
    "hard": Hard(),
    "shannon": Shannon(),
    "gini": Gini(),
    **{f"tsallis({alpha:g})": Tsallis(alpha) for alpha in (1.05, 1.25, 1.5, 2.0, 3.0, 4.0)},
    **{f"norm({alpha:g})": Norm(alpha) for alpha in (1.05, 1.5, 2.0, 5.0)},
    **{f"kSubsets({k})": KSubsets(k) for k in (1, 2, 3)},
    **{f"cappedGini({upper:g})": Capped(upper) for upper in (0.2, 0.35, 0.6, 1.0)},
    **{f"cappedShannon({upper:g})": Capped(upper, Shannon()) for upper in (0.2, 0.35, 0.6, 1.0)},
    **{f"fused({strength:g})": Fused(strength) for strength in (0.0, 0.1, 0.5, 2.0)},
    **{f"oscar({strength:g})": Oscar(strength) for strength in (0.0, 0.05, 0.3, 1.0)},
}
"""The name is the call of the explorer's module that builds the same Ω."""

SCORES = (
    (1.2, 0.8, 0.1, -0.5, 0.3),
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (3.0, 2.9, -4.0, 2.8, 0.5, 0.4),
    (-1.0, 5.0, 4.9, 1.0, 1.1, 1.2, -3.0),
    (0.7, 0.7, 0.7, -2.0, 0.7, 0.1),
    (40.0, -35.0, 38.5, 0.0, 1.0),
)
TEMPERATURES = (0.25, 1.0, 4.0)

PATTERNS = ((0.95, 0.25), (0.2, 1.0), (-0.75, 0.7), (-0.85, -0.4), (-0.1, -1.0), (0.7, -0.65))
QUERIES = ((0.35, 0.3), (-0.15, 0.4), (-0.45, 0.05), (0.15, -0.45), (1.2, -1.1))
BETAS = (1.0, 4.0, 10.0)
REMEMBERED = (
    "hard",
    "shannon",
    "gini",
    "tsallis(1.5)",
    "tsallis(3)",
    "norm(2)",
    "norm(5)",
    "kSubsets(2)",
    "fused(0.1)",
)

WORDS = ("She", "saw", "the", "man", "with", "a", "telescope")
HEADS: dict[str, dict[str, float]] = {
    "She": {"saw": 4.0, "man": 0.5},
    "saw": {"*": 4.0},
    "the": {"man": 4.0, "saw": 0.5, "telescope": 0.5},
    "man": {"saw": 3.5, "telescope": 0.5},
    "with": {"saw": 2.0, "man": 0.0, "telescope": 1.9},
    "a": {"telescope": 4.0, "man": 0.8},
    "telescope": {"with": 3.0, "saw": 2.6, "man": 0.5},
}
"""Made-up scores of the arcs from each head; * is the root. Every other arc has −1."""
MOVED = ("with", "man")
"""The arc whose score moves from frame to frame: its modifier and its head."""
MOVES = tuple(round(0.1 * step, 1) for step in range(41))


def numbers() -> dict[str, Any]:
    """Everything that the tests of the explorer's modules compare with."""
    return {"maps": _maps(), "memories": _memories(), "alignments": _alignments()}


def frames() -> dict[str, Any]:
    """SparseMAP over dependency trees while the score of one arc moves.

    Each frame has the score, the arcs with a marginal above zero as [modifier, head, marginal], and the trees that are
    mixed, each as its weight and the head of every word.
    """
    drawn = []
    for score in MOVES:
        solution = SparseMAP(DependencyTree(single_root=True)).solve(_arc_scores(score))
        marginals = solution.marginals
        arcs = [
            [modifier + 1, head, _rounded(marginals[modifier, head])]
            for modifier, head in (marginals > 1e-9).nonzero().tolist()
        ]
        trees = [
            {"weight": _rounded(weight), "heads": structure.reshape(marginals.shape).argmax(-1).tolist()}
            for weight, structure in zip(solution.weights, solution.structures, strict=True)
            if weight > 1e-9
        ]
        trees.sort(key=lambda tree: (-tree["weight"], tree["heads"]))
        drawn.append({"score": score, "arcs": arcs, "trees": trees})
    modifier, head = (WORDS.index(word) + 1 for word in MOVED)
    return {"words": list(WORDS), "moved": [modifier, head], "frames": drawn}


def script(content: dict[str, Any]) -> str:
    """The frames as a module: a page that is opened as a file may not read JSON."""
    lines = ",\n".join(f"    {json.dumps(frame)}" for frame in content["frames"])
    return (
        "/** Written by tools/library_numbers.py: SparseMAP over trees while the score of one arc moves. */\n\n"
        "/** @typedef {{weight: number, heads: number[]}} Tree the head of every word, 0 for the root */\n"
        "/** @typedef {{score: number, arcs: number[][], trees: Tree[]}} Frame arcs: modifier, head, marginal */\n\n"
        "/** @type {{words: string[], moved: number[], frames: Frame[]}} */\n"
        "export const FRAMES = {\n"
        f"  words: {json.dumps(content['words'])},\n"
        f"  moved: {json.dumps(content['moved'])},\n"
        f"  frames: [\n{lines},\n  ],\n}};\n"
    )


def _maps() -> list[dict[str, Any]]:
    rows = []
    for name, omega in OMEGAS.items():
        for numbers in SCORES:
            scores = torch.tensor(numbers, dtype=torch.float64)
            for gamma in TEMPERATURES:
                scaled = gamma * omega
                target = _target(omega, len(scores))
                rows.append(
                    {
                        "omega": name,
                        "scores": list(numbers),
                        "gamma": gamma,
                        "p": scaled.argmax(scores).tolist(),
                        "max": scaled.max(scores).item(),
                        "loss": scaled.loss(scores, target).item(),
                        "margin": _number(omega.margin),
                    }
                )
    return rows


def _target(omega: Regularizer, n: int) -> Tensor:
    """The mass of a choice, shared by all items."""
    return torch.full((n,), float(omega.mass(n)) / n, dtype=torch.float64)


def _memories() -> list[dict[str, Any]]:
    patterns = torch.tensor(PATTERNS, dtype=torch.float64)
    queries = torch.tensor(QUERIES, dtype=torch.float64)
    rows = []
    for name in REMEMBERED:
        for beta in BETAS:
            memory = Memory(patterns, OMEGAS[name], beta)
            found = memory.retrieve(queries, max_steps=2000, tol=1e-12)
            several = name.startswith("kSubsets")
            rows.append(
                {
                    "omega": name,
                    "beta": beta,
                    "energy": memory.energy(queries).tolist(),
                    "step": memory.step(queries).tolist(),
                    "state": found.state.tolist(),
                    "weights": found.weights.tolist(),
                    "radii": None if several else [_number(radius) for radius in memory.certify().radius],
                }
            )
    return [{"patterns": PATTERNS, "queries": QUERIES, "cases": rows}]


def _alignments() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    scores = (4 * torch.rand(5, 6, generator=generator, dtype=torch.float64)).round(decimals=2)
    rows = []
    for name, omega in (("shannon", Shannon()), ("gini", Gini())):
        for gamma in (0.1, 1.0, 3.0):
            program = Alignment(-scores.unsqueeze(0), omega=gamma * omega)
            rows.append(
                {
                    "omega": name,
                    "gamma": gamma,
                    "scores": scores.tolist(),
                    "value": -program.value.item(),
                    "marginals": program.marginals[0].tolist(),
                }
            )
    return rows


def _arc_scores(moved: float) -> Tensor:
    names = ("*", *WORDS)
    scores = torch.full((len(WORDS), len(names)), -1.0, dtype=torch.float64)
    for modifier, heads in HEADS.items():
        for head, score in heads.items():
            scores[WORDS.index(modifier), names.index(head)] = score
    scores[WORDS.index(MOVED[0]), names.index(MOVED[1])] = moved
    return scores


def _number(value: float | Tensor | None) -> float | str | None:
    """A number that JSON can hold; infinity is text."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _rounded(value: Tensor) -> float:
    return round(float(value), 4)


def main() -> None:
    """Write both files."""
    NUMBERS.write_text(json.dumps(numbers(), indent=1) + "\n", encoding="utf-8")
    FRAMES.write_text(script(frames()), encoding="utf-8")


if __name__ == "__main__":
    main()

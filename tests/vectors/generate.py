"""Write the test vectors of this folder anew: exact answers by rational arithmetic, or to 300 digits by mpmath.

    python tests/vectors/generate.py

Nothing of the library is used here, so that the answers are independent of it. docs/test-vectors.md explains the
format.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath

FOLDER = Path(__file__).parent
INF = float("inf")
# In these functions alone: digits that are set for good would slow down everything else that uses mpmath.
PRECISELY = mpmath.workdps(320)


def sparsemax(scores: list[float]) -> list[Fraction]:
    """The Euclidean projection of a row on the simplex, by rational arithmetic; zeros if all scores are −inf."""
    finite = sorted((Fraction(s) for s in scores if s > -INF), reverse=True)
    if not finite:
        return [Fraction(0)] * len(scores)
    total, threshold = Fraction(0), Fraction(0)
    for k, s in enumerate(finite, 1):
        total += s
        if 1 + k * s > total:
            threshold = (total - 1) / k
    return [max(Fraction(s) - threshold, Fraction(0)) if s > -INF else Fraction(0) for s in scores]


@PRECISELY
def entmax(scores: list[float], alpha: float) -> list[Any]:
    """α-entmax of a row by bisection for its threshold; zeros if all scores are −inf."""
    live = [mpmath.mpf(s) for s in scores if s > -INF]
    if not live:
        return [mpmath.mpf(0)] * len(scores)
    top, c = max(live), mpmath.mpf(alpha) - 1
    if c == 0:
        weights = [mpmath.exp(mpmath.mpf(s) - top) if s > -INF else mpmath.mpf(0) for s in scores]
        return [w / sum(weights) for w in weights]
    if alpha == INF:
        best = [s == max(scores) for s in scores]
        return [mpmath.mpf(b) / sum(best) for b in best]

    def masses(threshold: Any) -> list[Any]:
        # The excess c(s − τ) over the threshold; for c < 0 all are positive while τ is above the largest score.
        excess = [c * (mpmath.mpf(s) - threshold) if s > -INF else mpmath.mpf(0) for s in scores]
        return [e ** (1 / c) if e > 0 else mpmath.mpf(0) for e in excess]

    n = len(live)
    ends = (top - 1 / c, top - mpmath.mpf(n) ** (-c) / c)  # the best score has mass 1, or 1/n
    low, high = min(ends), max(ends)
    # The total falls as the threshold rises. Above alpha 2 an error δ of the threshold is δ^(1/c) in a small entry.
    for _ in range(300 if alpha <= 2 else 1000):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(masses(middle)) > 1 else (low, middle)
    return masses((low + high) / 2)


@PRECISELY
def tsallis(p: list[Any], alpha: float) -> Any:
    """Ω(p): Σ p log p at alpha 1, else (Σ p^α − 1)/(α(α − 1)) for p that sums to 1."""
    if alpha == 1:
        return sum(x * mpmath.log(x) for x in p if x > 0)
    return (sum(x**alpha for x in p if x > 0) - 1) / (mpmath.mpf(alpha) * (alpha - 1))


@PRECISELY
def entmax_loss(scores: list[float], target: int, alpha: float) -> tuple[Any, list[Any]]:
    """The Fenchel-Young loss of a class, max_p ⟨p, s⟩ − Ω(p) − s[target], and its gradient p − y."""
    p = entmax(scores, alpha)
    value = sum(x * mpmath.mpf(s) for x, s in zip(p, scores, strict=True) if x > 0) - tsallis(p, alpha)
    gradient = [x - (i == target) for i, x in enumerate(p)]
    return value - mpmath.mpf(scores[target]), gradient


ROWS: dict[str, list[float]] = {
    "two tied scores": [1.0, 1.0, 0.0],
    "all scores tied": [2.0] * 7,
    "ties at the threshold": [1.0, 0.0, 0.0, 0.0],
    "ties across the edge of the support": [0.75, 0.5, 0.25, 0.25, 0.25, -0.25],
    "one score": [-3.0],
    "a lead of exactly the margin of sparsemax": [1.0, 0.0],
    "nearly tied": [1.0, 1.0 - 2.0**-20, 1.0 - 2.0**-10],
    "scores times 1000": [1000.0, 999.5, 998.75, -1000.0],
    "a large offset": [16777216.0, 16777215.0, 16777214.0],
    "large negative scores": [-10000.0, -10000.5, -10001.0],
    "huge scores": [1e30, -1e30, 0.0],
    "one entry left of many": [-INF, -INF, 5.0, -INF],
    "all entries masked": [-INF, -INF, -INF],
    "some entries masked": [0.5, -INF, 0.25, -INF, 0.0],
    "wide support": [i / 64 for i in range(-16, 16)],
    "many far below": [0.5, 0.25] + [-40.0] * 30,
}
ALPHAS = (0.5, 1.0, 1.0009765625, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0, 10.0, INF)
HALF = {  # exactly representable in bfloat16 and float16
    "small integers": [3.0, 1.0, 2.0, 0.0],
    "quarters": [0.75, 0.5, 0.25, -0.25, -1.5],
    "times 64": [64.0, 63.0, -64.0, 0.0],
    "flat, 256 entries": [0.0] * 256,
    "tied": [2.0, 2.0, 2.0, 1.0],
    "scores times 1000": [1000.0, 1000.0, 992.0, -1000.0],
    "some entries masked": [0.5, -INF, 0.25, -INF],
    "all entries masked": [-INF, -INF],
}


def written(x: Any) -> Any:
    """A number as JSON has it: infinity as a string."""
    if x in (INF, -INF):
        return "inf" if x > 0 else "-inf"
    return float(x)


def save(name: str, about: str, cases: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(case) for case in cases)
    text = f'{{"about": {json.dumps(about)}, "cases": [\n{lines}\n]}}\n'
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"{name}: {len(cases)} cases")


def main() -> None:
    cases = []
    for name, row in ROWS.items():
        exact = sparsemax(row)
        answer = {"expected": [float(x) for x in exact], "exact": [str(x) for x in exact]}
        cases.append({"name": name, "scores": [written(s) for s in row], **answer})
    save("sparsemax", "Rows and their Euclidean projections on the simplex.", cases)

    cases = []
    for name, row in ROWS.items():
        for alpha in ALPHAS:
            p = [written(x) for x in entmax(row, alpha)]
            cases.append({"name": name, "alpha": written(alpha), "scores": [written(s) for s in row], "expected": p})
    save("entmax", "Rows and their alpha-entmax: 1 is softmax, 2 sparsemax, inf the argmax with ties shared.", cases)

    cases = []
    for name, row in HALF.items():
        for alpha in (1.0, 1.5, 2.0, 4.0, 10.0):
            p = [written(x) for x in entmax(row, alpha)]
            cases.append({"name": name, "alpha": alpha, "scores": [written(s) for s in row], "expected": p})
    save("half_precision", "Scores that bfloat16 and float16 hold exactly, and their alpha-entmax.", cases)

    cases = []
    for name, row in ROWS.items():
        if name in ("huge scores", "all entries masked"):
            continue
        for alpha in (1.0, 1.25, 1.5, 2.0, 4.0, 10.0):
            target = next(i for i, s in enumerate(row) if s > -INF)
            loss, gradient = entmax_loss(row, target, alpha)
            case = {"name": name, "alpha": alpha, "scores": [written(s) for s in row], "target": target}
            cases.append({**case, "loss": written(loss), "gradient": [written(g) for g in gradient]})
    save("entmax_loss", "Rows, the index of a class, its Fenchel-Young loss and the gradient of that.", cases)


if __name__ == "__main__":
    main()

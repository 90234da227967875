"""A translation model, beside the same with softmax."""

from __future__ import annotations

from fenchel_lab.bench import translation
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_translation(), _decoding()]


def _translation() -> Workload:
    size = f"{translation.SENTENCES} sentences × {translation.LENGTH} words, width {translation.WIDTH}"
    return Workload(
        "translation",
        f"a step of training a translation model of {translation.WORDS:,} words, attention and output, after "
        f"{translation.WARM} steps",
        [Contestant("softmax", translation.training(1.0)), Contestant("entmax 1.5", translation.training(1.5))],
        [Case(size, translation.inputs, backward=False)],
        [Goal("entmax 1.5", 1.0, "softmax", "largest")],
    )


def _decoding() -> Workload:
    size = f"{translation.DECODED} sentences, {translation.LONGEST} words each"
    return Workload(
        "decoding",
        f"beam search of 5 with that model, {translation.WORDS:,} words",
        [Contestant("softmax", translation.decoding(1.0)), Contestant("entmax 1.5", translation.decoding(1.5))],
        [Case(size, translation.inputs, backward=False, grad=False)],
        [Goal("entmax 1.5", 1.0, "softmax", "largest")],
    )

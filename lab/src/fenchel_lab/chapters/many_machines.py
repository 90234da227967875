"""Output layers and memories on thousands of machines: the exchange is run, its time is modelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fenchel
from fenchel.distributed import Rehearsal, ShardedMemory, entmax_loss, rehearse
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell


@dataclass(frozen=True)
class Machines:
    """The model of time: what a machine and the wires between machines do in a second.

    Args:
        hop: seconds that a message takes from one machine to the next, however short it is.
        wire: bytes per second that a machine sends while it receives as many.
        memory: bytes per second that a machine reads.
        flops: floating-point operations per second in matrix products.
    """

    hop: float = 3e-6
    wire: float = 50e9
    memory: float = 2e12
    flops: float = 4e14

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds: a tree up and down for the latency, a ring for the bytes."""
        return 2 * math.ceil(math.log2(ranks)) * self.hop + 2 * (ranks - 1) / ranks * size / self.wire

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds, for ``size`` bytes of every rank."""
        return math.ceil(math.log2(ranks)) * self.hop + (ranks - 1) * size / self.wire


@dataclass(frozen=True)
class Protocol:
    """What is simulated.

    Args:
        ranks: numbers of machines.
        classes: numbers of classes.
        spreads: standard deviations of the scores.
        rows: tokens that the exchange is run for.
        patterns: of the memory, on all machines together.
        queries: that the exchange of the memory is run for.
        many_rows: numbers of tokens for the question how rounds grow with them.
    """

    ranks: Sequence[int] = (2, 16, 128, 1024, 4096)
    classes: Sequence[int] = (10**4, 10**5, 10**6, 10**7)
    spreads: Sequence[float] = (1.0, 4.0)
    rows: int = 8
    patterns: int = 10**9
    queries: int = 1
    many_rows: Sequence[int] = (8, 64, 512, 4096)


TOKENS, WIDTH, QUERIES = 8192, 4096, 64
"""Tokens of a batch and the width of the layer; queries of a batch, of patterns of WIDTH / 4 numbers."""

BINS = 128
"""Of the histogram that might come first."""

CODE = """
import torch
from fenchel.distributed import entmax_loss, rehearse

scores, target = 4 * torch.randn(8, 100_000), torch.arange(8)
parts = scores.tensor_split(64, -1)
run = rehearse(lambda rank, group: entmax_loss(parts[rank], target, group=group), 64)
print(run.results[0], [each.numbers for each in run.transfers])
"""

SUMMARY = """
The exchange among machines is run, not modelled: `rehearse` plays all ranks in one process, a thread per rank, and
counts what they send. Scores are Gaussian, of standard deviation σ. Of a memory of {patterns:,} patterns only the
largest scores of every machine are drawn, by the distribution of order statistics; they are as many as can matter.
Only the time is a model: {hop:g} µs per hop and {wire:g} GB/s between machines (an all-reduce of b bytes among R takes
2⌈log₂R⌉ hops and 2b(R − 1)/R bytes), {memory:g} TB/s from memory, {flops:g} TFLOP/s in products. A batch has
{tokens:,} tokens of width {width:,}, trained in two bytes per number, or {queries} queries of width {narrow:,}.
"""


@study(
    "On thousands of machines",
    source="Of our own: no paper; `fenchel.distributed`",
    order=70,
    theme="More than one machine",
    code=CODE,
    tour=False,
)
def many_machines(context: Context) -> Result:
    """Run the exchange for every number of machines, classes and spreads; draw rounds, bytes and seconds."""
    return simulate(context, Protocol(), Machines())


def simulate(context: Context, protocol: Protocol, machines: Machines) -> Result:
    """The study, of any size."""
    generator = torch.Generator().manual_seed(context.seed)
    with torch.no_grad():
        losses = _losses(protocol, generator, context)
        by_rows = _rounds_by_rows(protocol, generator, context)
        by_alpha = _rounds_by_alpha(protocol, generator)
        recalls = _recalls(protocol, generator, context)
    values = {
        "patterns": protocol.patterns,
        "hop": 1e6 * machines.hop,
        "wire": machines.wire / 1e9,
        "memory": machines.memory / 1e12,
        "flops": machines.flops / 1e12,
        "tokens": TOKENS,
        "width": WIDTH,
        "narrow": WIDTH // 4,
        "queries": QUERIES,
    }
    text = [SUMMARY.format(**values), _found_losses(losses, by_rows, by_alpha, machines)]
    text += [_found_histogram(losses, machines), _found_recalls(recalls, machines)]
    return Result(
        "\n\n".join(text),
        figures=[_draw_losses(losses, machines), _draw_recalls(recalls, machines)],
        tables=[_table_losses(losses, machines), _table_recalls(recalls, machines)],
    )


# -- output layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """One simulated loss: where, and what was exchanged.

    Args:
        ranks: how many.
        classes: of all ranks.
        spread: the standard deviation of the scores.
        per_row: the numbers per token of every collective, 8 bytes each.
        support: the largest number of classes with probability, of any token.
        newton: rounds by the emulation that starts where the real algorithm does.
        after: rounds by the emulation that starts from a histogram.
    """

    ranks: int
    classes: int
    spread: float
    per_row: Sequence[float]
    support: int
    newton: int
    after: int

    @property
    def collectives(self) -> int:
        """How many all-reduces there are."""
        return len(self.per_row)

    def bytes(self, tokens: int) -> float:
        """What each rank gives for each token of a batch. The sizes of all parts travel once."""
        return 8 * (sum(self.per_row) + (self.ranks + 1) / tokens)

    def seconds(self, machines: Machines, tokens: int, histogram: bool = False) -> float:
        """The time of all collectives for a batch."""
        sizes = [8 * each * tokens for each in self.per_row]
        sizes[0] += 8 * (self.ranks + 1)
        if histogram:
            spare = self.newton - self.after
            sizes = [*sizes[: len(sizes) - spare], 4 * BINS * tokens]
        return sum(machines.all_reduce(size, self.ranks) for size in sizes)


def _losses(protocol: Protocol, generator: torch.Generator, context: Context) -> list[Loss]:
    found: list[Loss] = []
    works, done = len(protocol.spreads) * sum(r + 100 for c in protocol.classes for r in _shared_by(c, protocol)), 0
    for classes in protocol.classes:
        normal = torch.randn(protocol.rows, classes, generator=generator)
        target = torch.randint(classes, (protocol.rows,), generator=generator)
        for spread in protocol.spreads:
            scores = spread * normal
            for ranks in _shared_by(classes, protocol):
                found.append(run_loss(scores, target, ranks, spread))
                done += ranks + 100
                note = f"{classes:,} classes, σ = {spread:g}, {ranks:,} machines"
                context.progress(0.8 * done / works, note)
    return found


def _shared_by(classes: int, protocol: Protocol) -> list[int]:
    """The numbers of machines that some classes are spread over: each has eight at least."""
    return [ranks for ranks in protocol.ranks if classes >= 8 * ranks]


def run_loss(
    scores: Tensor, target: Tensor, ranks: int, spread: float, alpha: float = 1.5, emulated: bool = True
) -> Loss:
    """The real exchange for the loss of scores (rows, classes), and its emulation with and without a histogram."""
    rows, classes = scores.shape
    parts = scores.tensor_split(ranks, -1)

    def loss(rank: int, group: object) -> float:
        return float(entmax_loss(parts[rank], target, alpha, group=group, reduction="sum"))

    run = rehearse(loss, ranks)
    if len(set(run.results)) > 1:
        raise ArithmeticError("the ranks do not agree on the loss")
    first, *others = (each.numbers for each in run.transfers)
    per_row = [(first - ranks - 1) / rows, *(each / rows for each in others)]
    support = int((fenchel.entmax(scores, alpha) > 0).sum(-1).max())
    newton = after = len(others)
    if emulated:
        start = _local_offsets(scores, ranks, alpha)
        newton = _rounds(scores, start, alpha)
        after = _rounds(scores, torch.maximum(start, _histogram_offsets(scores, start, alpha)), alpha)
    return Loss(ranks, classes, spread, per_row, support, newton, after)


def _local_offsets(scores: Tensor, ranks: int, alpha: float) -> Tensor:
    """The largest offset that any part of a row has by itself, less the row's largest score, (rows, 1)."""
    width = -(-scores.shape[-1] // ranks)
    padded = torch.nn.functional.pad(scores, (0, width * ranks - scores.shape[-1]), value=-torch.inf)
    parts = padded.view(len(scores), ranks, width)
    top = parts.amax(-1).double()
    largest = fenchel.entmax(parts, alpha).amax(-1).double().clamp_min(1e-30)
    offset = top + (1 - largest ** (alpha - 1)) / (alpha - 1)
    return offset.amax(-1, keepdim=True) - scores.amax(-1, keepdim=True).double() - 1e-6


def _relevant(scores: Tensor, start: Tensor, alpha: float) -> Tensor:
    """The scores of columns in which some may have probability, less the rows' largest, in double precision."""
    below = scores - scores.amax(-1, keepdim=True)
    return below[:, (below > start - 1 / (alpha - 1)).any(0)].double()


def _mass(scores: Tensor, offset: Tensor, alpha: float) -> Tensor:
    """Σ p and Σ p^(2−α), (rows, 2)."""
    x = (1 + (alpha - 1) * (scores - offset)).clamp_min(0)
    p = x ** (1 / (alpha - 1))
    return torch.stack([p.sum(-1), torch.where(x > 0, x ** ((2 - alpha) / (alpha - 1)), 0.0).sum(-1)], -1)


def _step(sums: Tensor, alpha: float) -> Tensor:
    """Newton's step on (Σp)^(α−1) = 1, (rows, 1)."""
    mass, slope = sums[:, :1], sums[:, 1:]
    return mass * (1 - mass ** (1 - alpha)) / (alpha - 1) / slope


def _rounds(scores: Tensor, start: Tensor, alpha: float) -> int:
    """Rounds of Newton's method from a lower bound of the offset until no row moves by more than float32 asks."""
    own, offset = _relevant(scores, start, alpha), start.clamp_min(0)
    tolerance = 1e-9 ** max(alpha - 1, 0.5)
    rounds, step = 1, _step(_mass(own, offset, alpha), alpha)
    while rounds < 64 and bool((step.abs() > tolerance * offset.clamp_min(1)).any()):
        offset = offset + step
        rounds, step = rounds + 1, _step(_mass(own, offset, alpha), alpha)
    return rounds


def _histogram_offsets(scores: Tensor, start: Tensor, alpha: float) -> Tensor:
    """The lower bound of the offset that a histogram of a row's relevant scores gives, (rows, 1)."""
    own = _relevant(scores, start, alpha)
    level = start - 1 / (alpha - 1)
    width = -level / BINS
    edges = level + ((own - level) / width).floor().clamp(0, BINS - 1) * width  # not above the scores
    edges = torch.where(own > level, edges, -torch.inf)
    offset = start
    for _ in range(60):
        offset = offset + _step(_mass(edges, offset, alpha), alpha).clamp_min(0).nan_to_num(0.0)
    return offset - 1e-6


def _rounds_by_rows(protocol: Protocol, generator: torch.Generator, context: Context) -> list[tuple[int, int]]:
    """How many collectives batches of more tokens need, until all of their tokens are done."""
    classes, ranks = min(protocol.classes), protocol.ranks[min(1, len(protocol.ranks) - 1)]
    found = []
    for rows in protocol.many_rows:
        scores = 4 * torch.randn(rows, classes, generator=generator)
        run = run_loss(scores, torch.zeros(rows, dtype=torch.long), ranks, 4.0, emulated=False)
        found.append((rows, run.collectives))
    context.progress(0.85, "batches of many tokens")
    return found


def _rounds_by_alpha(protocol: Protocol, generator: torch.Generator) -> list[tuple[float, int]]:
    """How many collectives other alphas need."""
    classes, ranks = sorted(protocol.classes)[len(protocol.classes) // 2], protocol.ranks[len(protocol.ranks) // 2]
    scores = 4 * torch.randn(protocol.rows, classes, generator=generator)
    target = torch.zeros(protocol.rows, dtype=torch.long)
    runs = [run_loss(scores, target, ranks, 4.0, alpha, emulated=False) for alpha in (1.0, 1.25, 2.0)]
    return [(alpha, run.collectives) for alpha, run in zip((1.0, 1.25, 2.0), runs, strict=True)]


def _others(each: Loss, machines: Machines) -> dict[str, float]:
    """Seconds of the rest of a training step of the layer."""
    hidden = machines.all_reduce(2 * TOKENS * WIDTH, each.ranks)
    products = 6 * TOKENS * WIDTH * each.classes / each.ranks / machines.flops
    return {"hidden's gradient": hidden, "products of the layer": products}


def _cross_entropy(each: Loss, machines: Machines) -> float:
    """Three all-reduces of one number in four bytes per token."""
    return 3 * machines.all_reduce(4 * TOKENS, each.ranks)


def _found_losses(
    losses: Sequence[Loss],
    by_rows: Sequence[tuple[int, int]],
    by_alpha: Sequence[tuple[float, int]],
    machines: Machines,
) -> str:
    counts = [each.collectives for each in losses]
    last = max(losses, key=lambda each: (each.ranks, each.classes == 10**6, each.spread))
    own, others = last.seconds(machines, TOKENS), _others(last, machines)
    share = own / (own + sum(others.values()))
    longest = max(others, key=lambda name: others[name])
    return (
        f"The loss needs {min(counts)} to {max(counts)} all-reduces at α = 1.5, whatever the number of classes and "
        f"machines: one for the largest score and threshold of any machine, with 3 numbers per token and the size of "
        f"every part, then {min(counts) - 1} to {max(counts) - 1} rounds of Newton's method. A batch goes on until its "
        "last token is done: "
        + ", ".join(f"{count} for {rows:,}" for rows, count in by_rows)
        + f" tokens of {min(each.classes for each in losses):,} classes. Other alphas need "
        + ", ".join(f"{count} at α = {alpha:g}" for alpha, count in by_alpha)
        + f". On {last.ranks:,} machines and {last.classes:,} classes a batch spends {1e3 * own:.2f} ms on the "
        f"thresholds ({1e3 * _cross_entropy(last, machines):.2f} ms for cross-entropy), {100 * share:.0f} % of the "
        f"step; {longest} takes {1e3 * others[longest]:.2f} ms. Few machines are limited by the products, which they "
        "share; many by the gradient of the hidden states, which no number of machines makes smaller; a batch of a few "
        "tokens by the latency of the rounds, and by the sizes of all parts in the first."
    )


def _found_histogram(losses: Sequence[Loss], machines: Machines) -> str:
    saved = [each.newton - each.after for each in losses]
    batches = [each.seconds(machines, TOKENS, True) / each.seconds(machines, TOKENS) for each in losses]
    singles = [each.seconds(machines, 1, True) / each.seconds(machines, 1) for each in losses]
    gains = sum(ratio < 1 for ratio in batches)
    agree = sum(each.newton == each.collectives - 1 for each in losses)
    verdict = (
        "It does not pay for the batches of training, which the loss is for: there is none."
        if gains == 0
        else f"It pays for batches in {gains} of {len(losses)} cases."
    )
    return (
        f"Would a histogram of {BINS} bins pay, reduced before the first round? Emulated on whole rows (the emulation "
        f"without one counts the rounds of the real exchange in {agree} of {len(losses)} cases) it saves "
        f"{min(saved)} to {max(saved)} rounds and costs an all-reduce of {4 * BINS} bytes per token. A batch of "
        f"{TOKENS:,} tokens takes {min(batches):.2f} to {max(batches):.2f} times as long with it, a single token "
        f"{min(singles):.2f} to {max(singles):.2f} times. {verdict}"
    )


def _table_losses(losses: Sequence[Loss], machines: Machines) -> Table:
    rows: list[list[Cell]] = []
    for each in losses:
        own, others = each.seconds(machines, TOKENS), _others(each, machines)
        ratio = each.seconds(machines, TOKENS, True) / own
        row: list[Cell] = [f"{each.classes:,}", f"{each.spread:g}", f"{each.ranks:,}", each.support, each.collectives]
        row += [f"{each.bytes(TOKENS):.0f}", f"{1e3 * own:.3f}", f"{1e3 * _cross_entropy(each, machines):.3f}"]
        row += [f"{1e3 * seconds:.3f}" for seconds in others.values()]
        rows.append([*row, each.newton - each.after, f"{ratio:.2f}"])
    header = ["classes", "σ", "machines", "largest support", "all-reduces", "bytes per token", "thresholds, ms"]
    header += ["cross-entropy, ms", "hidden's gradient, ms", "products, ms", "rounds that a histogram saves"]
    return Table(
        [*header, "time with it, ×"],
        rows,
        caption=f"The loss at α = 1.5: supports, all-reduces and bytes as run for {len(rows)} cases; milliseconds of a "
        f"batch of {TOKENS:,} tokens by the model.",
    )


def _draw_losses(losses: Sequence[Loss], machines: Machines) -> Figure:
    drawing, (rounds, sizes, times) = style.panels(3, 1, height=2.2, sharex=True)
    classes, spreads = sorted({each.classes for each in losses}), sorted({each.spread for each in losses})
    for number, c in enumerate(classes):
        for spread in spreads:
            some = [each for each in losses if (each.classes, each.spread) == (c, spread)]
            shift = 1.06 ** (number - len(classes) / 2)  # equal counts would hide each other
            places = [shift * each.ranks for each in some]
            line: dict[str, Any] = {"color": style.PALETTE[number], "ls": "-" if spread == spreads[-1] else ":"}
            label = f"{c:,} classes" if spread == spreads[-1] else None
            rounds.plot(places, [e.collectives for e in some], "o", ms=3.5, label=label, **line)
    some = [each for each in losses if (each.classes, each.spread) == (_middle(classes), spreads[-1])]
    ranks = [each.ranks for each in some]
    sizes.plot(ranks, [each.bytes(TOKENS) for each in some], "o-", ms=3.5, label=f"a batch of {TOKENS:,}")
    sizes.plot(ranks, [each.bytes(1) for each in some], "o-", ms=3.5, label="a single token")
    sizes.plot(ranks, [12.0] * len(ranks), "o:", ms=3.5, color=style.MUTED, label="cross-entropy")
    times.plot(ranks, [1e3 * e.seconds(machines, TOKENS) for e in some], "o-", ms=3.5, label="thresholds")
    for name in _others(some[0], machines):
        times.plot(ranks, [1e3 * _others(e, machines)[name] for e in some], "o-", ms=3.5, label=name)
    cross = [1e3 * _cross_entropy(e, machines) for e in some]
    times.plot(ranks, cross, "o:", ms=3.5, color=style.MUTED, label="cross-entropy's")
    rounds.set(ylabel="all-reduces", xscale="log", ylim=(0, None))
    sizes.set(ylabel="bytes per token", yscale="log")
    times.set(ylabel="ms per batch", yscale="log", xlabel="machines")
    for axes in (rounds, sizes, times):
        axes.legend(fontsize=7, ncols=2)
    return Figure(
        drawing,
        caption="The loss of an output layer at α = 1.5 by the number of machines: all-reduces (solid σ = "
        f"{spreads[-1]:g}, dotted σ = {spreads[0]:g}; as run), bytes that a machine gives per token, and milliseconds "
        f"of a batch by the model; the last two for {_middle(classes):,} classes, σ = {spreads[-1]:g}.",
        alt="Three panels over the number of machines on a logarithmic axis: flat numbers of all-reduces, flat bytes "
        "for a batch and growing ones for a single token, and times of which that of the products falls and the "
        "others hardly change.",
    )


def _middle(values: Sequence[int]) -> int:
    return values[len(values) // 2]


# -- memories ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recall:
    """One simulated step of a memory.

    Args:
        ranks: how many.
        patterns: of all ranks.
        spread: the standard deviation of the scores of patterns.
        support: the largest number of patterns with weight, of any query.
        listed: how many patterns every rank lists for each query.
        collectives: of the step.
        fixed: bytes per query that a rank gives, without lists and states.
    """

    ranks: int
    patterns: int
    spread: float
    support: int
    listed: int
    collectives: int
    fixed: float

    def parts(self, machines: Machines) -> dict[str, float]:
        """Seconds of the parts of a step of a batch of queries."""
        width = WIDTH // 4
        return {
            "reading patterns": 2 * width * self.patterns / self.ranks / machines.memory,
            "lists of supports": machines.all_gather(16 * self.listed * QUERIES, self.ranks),
            "sum of states": machines.all_reduce(8 * width * QUERIES, self.ranks),
            "levels and sizes": machines.all_reduce(16 * QUERIES, self.ranks)
            + machines.all_reduce(8, self.ranks)
            + machines.all_reduce(8 * self.ranks, self.ranks),
        }


def largest_scores(count: int, most: int, rows: int, generator: torch.Generator) -> Tensor:
    """The largest of ``count`` standard Gaussian numbers, (rows, most), in descending order.

    The logarithms of uniform order statistics, from the top, are sums of exponential variables over n, n − 1, ….
    """
    steps = torch.empty(rows, most, dtype=torch.float64).exponential_(generator=generator)
    log = -(steps / torch.arange(count, count - most, -1, dtype=torch.float64)).cumsum(-1)
    scores: Tensor = -torch.special.ndtri(-torch.expm1(log))
    return scores


def run_recall(patterns: int, ranks: int, spread: float, queries: int, generator: torch.Generator) -> Recall:
    """The real exchange of a step of a memory at α = 1.5, of the largest scores of every rank."""
    most = 64
    while True:
        drawn = [largest_scores(patterns // ranks, most, queries, generator) for _ in range(ranks)]
        scores = spread * torch.cat(drawn, -1)
        weights = fenchel.entmax(scores)
        top = weights.amax(-1)
        level = scores.amax(-1) - 2 * top.sqrt()  # of probability: p = (1 + (z − A)/2)² at the largest score
        if all(bool((spread * each[:, -1] < level - 0.5).all()) for each in drawn):
            break
        most *= 4

    def step(rank: int, group: object) -> Tensor:
        held = torch.zeros(queries, most, queries, dtype=torch.float64)  # each pattern has a score for one query alone
        for query in range(queries):
            held[query, :, query] = drawn[rank][query]
        memory = ShardedMemory(held.flatten(0, 1), beta=spread, group=group)
        return memory.step(torch.eye(queries, dtype=torch.float64))

    run: Rehearsal[Tensor] = rehearse(step, ranks)
    expected = (weights * scores).sum(-1) / spread
    if not torch.allclose(run.results[0].diagonal(), expected, rtol=1e-9):
        raise ArithmeticError("the step on all ranks is not that of the whole memory")
    transfers = run.transfers[1:]  # the first compares the widths of patterns, once per memory
    (lists,) = (each for each in transfers if each.name == "all_gather")
    listed, fixed = lists.numbers // (2 * queries), sum(each.bytes for each in transfers[:-1] if each is not lists)
    return Recall(ranks, patterns, spread, int((weights > 0).sum(-1).max()), listed, len(transfers), fixed / queries)


def _recalls(protocol: Protocol, generator: torch.Generator, context: Context) -> list[Recall]:
    found = []
    works = [(spread, ranks) for spread in protocol.spreads for ranks in protocol.ranks]
    for number, (spread, ranks) in enumerate(works):
        found.append(run_recall(protocol.patterns, ranks, spread, protocol.queries, generator))
        share = 0.85 + 0.14 * (number + 1) / len(works)
        context.progress(share, f"a memory of {protocol.patterns:,}, σ = {spread:g}, {ranks:,} machines")
    return found


def _found_recalls(recalls: Sequence[Recall], machines: Machines) -> str:
    texts = []
    for spread in sorted({each.spread for each in recalls}):
        some = [each for each in recalls if each.spread == spread]
        limits: dict[str, list[int]] = {}
        for each in some:
            parts = each.parts(machines)
            limits.setdefault(max(parts, key=lambda name: parts[name]), []).append(each.ranks)
        listed = "; ".join(f"{name} on {', '.join(f'{r:,}' for r in ranks)}" for name, ranks in limits.items())
        total = sum(some[-1].parts(machines).values())
        texts.append(
            f"At σ = {spread:g} a query's support has up to {max(e.support for e in some):,} patterns, and a machine "
            f"lists {min(e.listed for e in some)} to {max(e.listed for e in some)} for each query; the longest part of "
            f"a step is {listed} machines, and on {some[-1].ranks:,} it takes {1e3 * total:.2f} ms in all."
        )
    counts = {each.collectives for each in recalls}
    return (
        f"A step of the memory has {' or '.join(map(str, sorted(counts)))} collectives, whatever the number of "
        f"machines. {' '.join(texts)} All machines list as many as the one with most, so that the lists grow with the "
        "number of machines while the supports do not: that, and the hops, are what is left once reading is shared by "
        "many."
    )


def _table_recalls(recalls: Sequence[Recall], machines: Machines) -> Table:
    names = list(recalls[0].parts(machines))
    rows: list[list[Cell]] = []
    for each in recalls:
        row: list[Cell] = [f"{each.spread:g}", f"{each.ranks:,}", each.support, each.listed, each.collectives]
        row += [f"{16 * each.listed * each.ranks:,}"]
        rows.append([*row, *(f"{1e3 * seconds:.3f}" for seconds in each.parts(machines).values())])
    header = ["σ", "machines", "largest support", "listed per query", "collectives", "bytes of lists per query"]
    return Table(
        [*header, *(f"{name}, ms" for name in names)],
        rows,
        caption=f"A step of a memory of {recalls[0].patterns:,} patterns at α = 1.5: supports, lists and collectives "
        f"as run; milliseconds of a batch of {QUERIES} queries by the model.",
    )


def _draw_recalls(recalls: Sequence[Recall], machines: Machines) -> Figure:
    spreads = sorted({each.spread for each in recalls})
    drawing, panels = style.panels(len(spreads), 1, height=2.2, sharex=True, sharey=True)
    for axes, spread in zip(panels, spreads, strict=True):
        some = [each for each in recalls if each.spread == spread]
        for name in some[0].parts(machines):
            seconds = [1e3 * each.parts(machines)[name] for each in some]
            axes.plot([each.ranks for each in some], seconds, "o-", ms=3.5, label=name)
        axes.set(title=f"σ = {spread:g}", ylabel="ms per batch", xscale="log", yscale="log")
    panels[0].legend(fontsize=7, ncols=2)
    panels[-1].set_xlabel("machines")
    return Figure(
        drawing,
        caption=f"A step of a memory of {recalls[0].patterns:,} patterns for {QUERIES} queries, by the number of "
        "machines: the parts of its time by the model, of lists as long as those of the run.",
        alt="Two panels of four lines over the number of machines: the time to read patterns falls, the time of "
        "the lists of supports rises, the other two hardly change.",
    )

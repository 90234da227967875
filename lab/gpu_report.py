"""Compile every kernel for GPUs for four targets, and write what each needs as a page of the documentation.

Run as ``make gpu-report``, in a process in which TRITON_INTERPRET is not set. What was compiled is kept in
``report/gpu.json`` as soon as it is known: a run that was interrupted goes on where it was, and one after a change
compiles what has changed. With ``--only attention`` rows of other calls stay as they are on the page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ahead_of_time import TARGETS, compile_for, prepare, record

from fenchel import progress
from fenchel.kernels.gpu import alignments, attention, attention_backward, boxes, chains, products, rows

_BEGIN, _END = "<!-- written by `make gpu-report` -->", "<!-- end -->"
_FAILS = "does not compile"


def launches(*, all_sizes: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that launch every kernel, with a name each; one configuration per kernel unless ``all_sizes``."""

    def chain(states: int, shared: bool, alpha: float, dtype: torch.dtype = torch.float32) -> None:
        zeros = partial(torch.zeros, dtype=dtype)
        unary, transition = zeros(2, 5, states), zeros(1, 1 if shared else 4, states, states)
        ends, lengths, weight = zeros(1, states), torch.tensor([5, 5]), torch.zeros(2, dtype=torch.float64)
        value, walk = chains.forward(unary, transition, (ends, ends), lengths, alpha, 1.0, True)
        chains.gradient(weight, value, walk, lengths, unary.shape, transition.shape[1])
        chains.hessian_product(weight, value, walk, lengths, unary, transition, alpha, 1.0)

    def alignment(size: int, alpha: float, dtype: torch.dtype = torch.float32) -> None:
        costs, lengths, weight = (
            torch.zeros(2, size, size, dtype=dtype),
            torch.tensor([[9, 9]] * 2),
            torch.zeros(2).double(),
        )
        value, walk = alignments.forward(costs, lengths, alpha, 1.0, True)
        alignments.gradient(weight, value, walk, lengths, costs.shape)
        alignments.hessian_product(weight, value, walk, lengths, costs, alpha, 1.0)

    widths = (1000, 4096, 16_384, 32_000) if all_sizes else (1000, 32_000)
    per_row, index = torch.full((4, 1), 1.3), torch.zeros(4, dtype=torch.long)
    for width in widths:
        z = torch.zeros(4, width)
        alphas: tuple[Any, ...] = (1.5, 2.0, 1.3, 3.0, per_row) if all_sizes else (1.5,)
        for alpha in alphas:
            name = f"α {'per row' if isinstance(alpha, torch.Tensor) else alpha}, {width} wide"
            yield f"entmax, {name}", partial(rows.entmax, z, alpha)
            yield f"its loss, {name}", partial(rows.entmax_loss, z, index, True, alpha)
            yield f"its product, {name}", partial(products.entmax_product, z, None, z, alpha)
        yield f"α's gradient, {width} wide", partial(products.entmax_pull, z, None, z, per_row)
        yield f"k-subsets, {width} wide", partial(boxes.project, z, 1.0, 2.0)
        yield f"their product, {width} wide", partial(products.projection_product, z, None, z, 1.0, 2.0)
        yield f"capped softmax, {width} wide", partial(boxes.capped_softmax, z, 1.0, 2.0)
        if all_sizes:
            yield f"bounds, {width} wide", partial(boxes.project, z, torch.ones(4, width), 2.0)
            yield f"capped softmax, bounds, {width} wide", partial(boxes.capped_softmax, z, torch.ones(4, width), 2.0)
            for dtype in (torch.bfloat16, torch.float64):
                own, name = z.to(dtype), f"{str(dtype).removeprefix('torch.')}, {width} wide"
                yield f"entmax, α 1.5, {name}", partial(rows.entmax, own, 1.5)
                yield f"its loss, α 1.5, {name}", partial(rows.entmax_loss, own, index, True, 1.5)
                yield f"its product, α 1.5, {name}", partial(products.entmax_product, own, None, own, 1.5)
            yield f"normmax, α 3, {width} wide", partial(rows.normmax, z, 3.0)
            yield f"its α's gradient, {width} wide", partial(products.normmax_pull, z, None, z, 3.0)
    for alpha in (1.0, 2.0) if all_sizes else (2.0,):
        omega = "Gini" if alpha == 2 else "Shannon"
        for states in (16, 64, 128) if all_sizes else (64,):
            yield f"chain, {states} states, {omega}", partial(chain, states, True, alpha)
        for size in (100, 1000, 2000) if all_sizes else (1000,):
            yield f"alignment, {size} × {size}, {omega}", partial(alignment, size, alpha)
    if all_sizes:
        yield "chain, 64 states, steps of their own, Gini", partial(chain, 64, False, 2.0)
        yield "chain, 64 states, Gini, float64", partial(chain, 64, True, 2.0, torch.float64)
        yield "alignment, 1000 × 1000, Gini, float64", partial(alignment, 1000, 2.0, torch.float64)
    yield from attention_launches(all_sizes=all_sizes)


def attention_launches(*, all_sizes: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of attention, both passes, and of decoding; what needs most registers comes together."""
    widths = {torch.bfloat16: (32, 64, 128, 256), torch.float16: (64,)}
    widths |= {torch.float32: (32, 64, 128, 256), torch.float64: (64, 128, 256)}
    per_head, masks = torch.full((1, 2, 2), 1.3), {"boolean": torch.ones(32, 32) > 0, "added": torch.zeros(32, 32)}
    for dtype, own in widths.items() if all_sizes else [(torch.bfloat16, (64,))]:
        for width in own:
            name = f"{str(dtype).removeprefix('torch.')}, heads {width} wide"
            yield f"attention, α 1.5, causal, {name}", partial(_attend, dtype, width, 1.5, None, causal=True)
            if all_sizes and dtype != torch.float16:
                rest = partial(_attend, dtype, width, per_head, masks["added"], causal=False, dropout=0.1)
                yield f"attention, α per head, mask added, dropout, {name}", rest
    if all_sizes:
        for width in (64, 128):
            name = f"bfloat16, heads {width} wide"
            rest = partial(_attend, torch.bfloat16, width, 1.5, masks["boolean"], causal=False)
            yield f"attention, α 1.5, boolean mask, {name}", rest
            yield (
                f"attention, α per head, causal, {name}",
                partial(_attend, torch.bfloat16, width, per_head, None, causal=True),
            )
    for dtype in (torch.bfloat16, torch.float32) if all_sizes else (torch.bfloat16,):
        for width in (64, 128) if all_sizes else (64,):
            query, key = torch.zeros(1, 2, 2, 1, width, dtype=dtype), torch.zeros(1, 2, 4096, width, dtype=dtype)
            options: dict[str, Any] = {"mask": None, "keep": False, "causal": False, "scale": 0.125}
            name = f"decoding, α 1.5, {str(dtype).removeprefix('torch.')}, heads {width} wide"
            yield name, partial(attention.attend, query, key, key, 1.5, **options)


def _attend(
    dtype: torch.dtype, width: int, alpha: Any, mask: torch.Tensor | None, *, causal: bool, dropout: float = 0.0
) -> None:
    query, key = torch.zeros(1, 2, 2, 32, width, dtype=dtype), torch.zeros(1, 2, 32, width, dtype=dtype)
    rest: dict[str, Any] = {"mask": None if mask is None else mask.expand(1, 2, 2, 32, 32), "dropout": dropout}
    rest |= {"causal": causal, "scale": width**-0.5, "seed": 3}
    _, state = attention.attend(query, key, key, alpha, keep=True, **rest)
    needed = (True, True, True, isinstance(alpha, torch.Tensor))
    attention_backward.attend_backward(query, state, query, key, key, alpha, needed=needed, **rest)


# -- the table -------------------------------------------------------------------------------------------------------


@cache
def _calls(all_sizes: bool) -> list[tuple[str, Callable[[], Any]]]:
    return list(launches(all_sizes=all_sizes))


@cache
def _recorded(all_sizes: bool, call: int, target: str) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    return record(_calls(all_sizes)[call][1], target)


def _compile(all_sizes: bool, call: int, place: int, target: str) -> str:
    """Registers / bytes spilled / bytes of shared memory of one kernel that a call launches, or that it fails."""
    try:
        found = compile_for(target, *_recorded(all_sizes, call, target)[place])
    except Exception:
        return _FAILS
    return f"{found.registers} / {found.spilled} / {found.shared}"


class Row(NamedTuple):
    """A row of the table: call, kernel, its warps on Nvidia's devices, number of the call, and its place in that."""

    name: str
    kernel: str
    warps: int
    call: int
    place: int


def _dtypes(given: Any) -> Any:
    return [_dtypes(each) for each in given] if isinstance(given, tuple) else getattr(given, "dtype", None)


def different(all_sizes: bool) -> Iterator[Row]:
    """The kernels that differ in their constants, options or dtypes."""
    seen = set()
    for call, (name, _) in enumerate(_calls(all_sizes)):
        for place, (kernel, args, options) in enumerate(_recorded(all_sizes, call, "sm_90")):
            key = kernel.__name__, str(sorted(options.items())), str(_dtypes(args))
            if key not in seen:
                seen.add(key)
                yield Row(name, kernel.__name__, options["num_warps"], call, place)


def compiled(tasks: dict[str, tuple[bool, int, int, str]], kept: Path, processes: int) -> dict[str, str]:
    """What each of the kernels needs, by its name; in so many processes, and kept in a file on the way."""
    found: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    missing = {name: task for name, task in tasks.items() if name not in found}
    context = multiprocessing.get_context("spawn")
    with progress.bar("kernels") as report, ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = {pool.submit(_compile, *task): name for name, task in missing.items()}
        for i, done in enumerate(as_completed(running), 1):
            if done.result() != _FAILS:  # which the next run tries again
                found[running[done]] = done.result()
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(found, indent=0))
            report(i / len(running), f"{i} of {len(running)}")
    return found


def table(
    page: str, *, all_sizes: bool = True, only: str = "", kept: Path = Path("report/gpu.json"), processes: int = 2
) -> list[str]:
    """A table in Markdown: registers / bytes spilled / bytes of shared memory, per target."""
    lines = ["| call | kernel | warps | " + " | ".join(TARGETS) + " |", "| --- " * (3 + len(TARGETS)) + "|"]
    before = {tuple(line.split(" | ")[:2]): line for line in page.splitlines() if line.startswith("| ")}
    chosen = list(different(all_sizes))
    tasks, names = {}, {}
    for row in chosen:
        for target in TARGETS if re.search(only, row.name) else ():
            names[row, target] = prepare(target, *_recorded(all_sizes, row.call, target)[row.place])[2]
            tasks[names[row, target]] = all_sizes, row.call, row.place, target
    found = compiled(tasks, kept, processes)
    for row in chosen:
        line = before.get((f"| {row.name}", f"`{row.kernel}`"))
        if re.search(only, row.name):
            cells = (found.get(names[row, target], _FAILS) for target in TARGETS)
            line = f"| {row.name} | `{row.kernel}` | {row.warps} | " + " | ".join(cells) + " |"
        if line is not None:
            lines.append(line)
    return lines


def _parts(page: Path) -> tuple[str, str, str]:
    """What stands on a page before, in and after the table."""
    before, rest = page.read_text().split(_BEGIN)
    table, after = rest.split(_END)
    return before, table, after


def main(arguments: list[str] | None = None) -> int:
    """Put the table into a page, in place of the one that is there; 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--only", default="", help="a regular expression: the calls to compile; other rows are kept")
    parser.add_argument("--brief", action="store_true", help="one configuration per kernel")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    _, old, _ = _parts(given.page)
    lines = table(old, all_sizes=not given.brief, only=given.only, processes=given.processes)
    before, _, after = _parts(given.page)  # which may have been edited meanwhile
    given.page.write_text("\n".join([before + _BEGIN, "", *lines, "", _END]) + after)
    return int(any(_FAILS in line for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())

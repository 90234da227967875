"""Compile every kernel for GPUs for four targets, and write what each needs as a page of the documentation.

Run as ``make gpu-report``, in a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ahead_of_time import TARGETS, compile_for, record

from fenchel.kernels.gpu import alignments, attention, attention_backward, boxes, chains, products, rows

_BEGIN, _END = "<!-- written by `make gpu-report` -->", "<!-- end -->"


def launches(*, all_sizes: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that launch every kernel, with a name each; one configuration per kernel unless ``all_sizes``."""

    def chain(states: int, shared: bool, alpha: float) -> None:
        unary, transition = torch.zeros(2, 5, states), torch.zeros(1, 1 if shared else 4, states, states)
        ends, lengths, weight = torch.zeros(1, states), torch.tensor([5, 5]), torch.zeros(2, dtype=torch.float64)
        value, walk = chains.forward(unary, transition, (ends, ends), lengths, alpha, 1.0, True)
        chains.gradient(weight, value, walk, lengths, unary.shape, transition.shape[1])
        chains.hessian_product(weight, value, walk, lengths, unary, transition, alpha, 1.0)

    def alignment(size: int, alpha: float) -> None:
        costs, lengths, weight = torch.zeros(2, size, size), torch.tensor([[9, 9]] * 2), torch.zeros(2).double()
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
    yield from attention_launches(all_sizes=all_sizes)


def attention_launches(*, all_sizes: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of attention, both passes, and of decoding; alpha per head comes with a mask that is added."""
    plain = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 64)]
    plain += [(torch.float32, 64), (torch.float32, 128), (torch.float64, 64)]
    learned = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)]
    for dtype, width in plain if all_sizes else plain[:1]:
        name = f"attention, α 1.5, causal, {str(dtype).removeprefix('torch.')}, heads {width} wide"
        yield name, partial(_attend, dtype, width, 1.5, None, causal=True)
    for dtype, width in learned if all_sizes else []:
        name = f"attention, α per head, mask, {str(dtype).removeprefix('torch.')}, heads {width} wide"
        yield name, partial(_attend, dtype, width, torch.full((1, 2, 2), 1.3), torch.zeros(32, 32), causal=False)
    query, key = torch.zeros(1, 2, 2, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 4096, 64, dtype=torch.bfloat16)
    rest: dict[str, Any] = {"mask": None, "keep": False, "causal": False, "scale": 0.125}
    yield "decoding, α 1.5, bfloat16, heads 64 wide", partial(attention.attend, query, key, key, 1.5, **rest)


def _attend(dtype: torch.dtype, width: int, alpha: Any, mask: torch.Tensor | None, *, causal: bool) -> None:
    query, key = torch.zeros(1, 2, 2, 32, width, dtype=dtype), torch.zeros(1, 2, 32, width, dtype=dtype)
    rest: dict[str, Any] = {"mask": None if mask is None else mask.expand(1, 2, 2, 32, 32)}
    rest |= {"causal": causal, "scale": width**-0.5}
    _, state = attention.attend(query, key, key, alpha, keep=True, **rest)
    needed = (True, True, True, isinstance(alpha, torch.Tensor))
    attention_backward.attend_backward(query, state, query, key, key, alpha, needed=needed, **rest)


def table(*, all_sizes: bool = True) -> list[str]:
    """A table in Markdown: registers / bytes spilled / bytes of shared memory, per target."""
    lines = ["| call | kernel | warps | " + " | ".join(TARGETS) + " |", "| --- " * (3 + len(TARGETS)) + "|"]
    seen = set()
    for name, call in launches(all_sizes=all_sizes):
        on_each = [record(call, target) for target in TARGETS]
        for i, (kernel, args, options) in enumerate(on_each[0]):
            key = kernel.__name__, str(sorted(options.items())), tuple(getattr(a, "dtype", None) for a in args)
            if key in seen:
                continue
            seen.add(key)
            cells = []
            for target, launched in zip(TARGETS, on_each, strict=True):
                found = compile_for(target, *launched[i])
                cells.append(f"{found.registers} / {found.spilled} / {found.shared}")
            lines.append(f"| {name} | `{kernel.__name__}` | {options['num_warps']} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def main(path: str, *, brief: bool = False) -> None:
    """Put the table into a page, in place of the one that is there; one configuration per kernel if ``brief``."""
    page = Path(path)
    text = page.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    page.write_text("\n".join([before + _BEGIN, "", *table(all_sizes=not brief), "", _END]) + after)


if __name__ == "__main__":
    main(sys.argv[1], brief="--brief" in sys.argv)

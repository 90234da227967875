"""Check the kernels for GPUs on a GPU: correctness, races, and times beside those of others. Writes Markdown.

    python lab/gpu_check.py > gpu.md                       # correctness and times
    compute-sanitizer --tool racecheck python lab/gpu_check.py --correctness
    compute-sanitizer --tool memcheck python lab/gpu_check.py --correctness

``entmax`` and ``adasplash`` are timed if they are installed. No test runs this, and no figure of it is in the
documentation until somebody has measured it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch.nn import functional as F

import fenchel
from fenchel.kernels.gpu.launch import STARTED


def correctness() -> bool:
    """Maps, losses and attention of the device beside those of the CPU in double precision; whether all agree."""
    print("| what | largest error |\n| --- | --- |")
    good = True
    for width in (37, 4096, 16_384, 50_000):
        for alpha in (0.7, 1.3, 1.5, 2.0, 3.0):
            z = torch.randn(64, width)
            STARTED.clear()
            found = fenchel.entmax(z.cuda(), alpha).cpu().double()
            good &= bool(STARTED)
            error = (found - fenchel.entmax(z.double(), alpha)).abs().max().item()
            good &= error < 3e-6
            print(f"| entmax, α {alpha}, {width} wide | {error:.1e} |")
    for name, error, allowed in _attention_errors():
        good &= error < allowed
        print(f"| attention, {name} | {error:.1e} |")
    return good


def _attention_errors() -> Iterator[tuple[str, float, float]]:
    """Largest errors of output and gradients for each kind of problem, and what is allowed."""
    cases: list[tuple[str, torch.dtype, int, int, dict[str, Any]]] = [
        ("130 tokens", torch.float32, 130, 64, {}),
        ("1024 tokens, causal", torch.float32, 1024, 64, {"is_causal": True}),
        ("300 tokens, heads 128 wide", torch.float32, 300, 128, {"is_causal": True}),
        ("300 tokens, heads 256 wide", torch.float32, 300, 256, {}),
        ("300 tokens, heads 20 wide", torch.float32, 300, 20, {}),
        ("300 tokens, α 2", torch.float32, 300, 64, {"omega": fenchel.Gini()}),
        ("300 tokens, α 1.2", torch.float32, 300, 64, {"omega": fenchel.Tsallis(1.2)}),
        ("300 tokens, boolean mask", torch.float32, 300, 64, {"attn_mask": torch.rand(300, 300) < 0.5}),
        ("300 tokens, mask that is added", torch.float32, 300, 64, {"attn_mask": torch.randn(4, 1, 300)}),
        ("130 tokens", torch.float64, 130, 64, {"is_causal": True}),
        ("1024 tokens, causal", torch.bfloat16, 1024, 64, {"is_causal": True}),
        ("1024 tokens, causal, heads 128 wide", torch.float16, 1024, 128, {"is_causal": True}),
    ]
    for name, dtype, length, width, options in cases:
        query = torch.randn(2, 4, length, width).to(dtype)
        key, value = torch.randn(2, 2, 2, length, width).to(dtype)  # two heads of the query share keys
        own = [t.cuda().requires_grad_() for t in (query, key, value)]
        exact = [t.double().requires_grad_() for t in (query, key, value)]
        on_device = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        STARTED.clear()
        output, expected = fenchel.attention(*own, **on_device), fenchel.attention(*exact, **options)
        grad = torch.randn_like(output)
        pairs = [(output, expected)]
        slopes = torch.autograd.grad(output, own, grad)
        pairs += zip(slopes, torch.autograd.grad(expected, exact, grad.cpu().double()), strict=True)
        errors = [((a.detach().cpu().double() - b.detach()).abs().max() / b.abs().max()).item() for a, b in pairs]
        reached = all(STARTED[kernel] for kernel in ("attend_kernel", "queries_kernel", "keys_kernel"))
        allowed = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}[dtype]
        label = f"{str(dtype).removeprefix('torch.')}, {name}"
        yield label if reached else f"{label} (no kernel)", max(errors) if reached else torch.inf, allowed
    query, key, value = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 5000, 64), torch.randn(2, 2, 5000, 64)
    found = fenchel.attention(query.cuda(), key.cuda(), value.cuda()).cpu().double()
    error = (found - fenchel.attention(query.double(), key.double(), value.double())).abs().max().item()
    yield "one query, 5000 keys", error, 1e-5


def _milliseconds(call: Callable[[], Any]) -> str:
    return f"{triton.testing.do_bench(call):.3f}"


def _peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def times() -> None:
    """Tables of milliseconds, forward and forward with backward."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}\n")
    peer = _peer("entmax")
    print(
        "| rows | torch.softmax | entmax, α 1.5 | sparsemax | entmax package, α 1.5 |\n| --- | --- | --- | --- | --- |"
    )
    for rows, width in ((8192, 1024), (8192, 4096), (4096, 16_384), (2048, 50_000)):
        z = torch.randn(rows, width, device="cuda")
        calls = [lambda z=z: torch.softmax(z, -1), lambda z=z: fenchel.entmax(z), lambda z=z: fenchel.sparsemax(z)]
        cells = [_milliseconds(call) for call in calls]
        cells.append("–" if peer is None else _milliseconds(lambda z=z: peer.entmax15(z)))
        print(f"| {rows} × {width} | " + " | ".join(cells) + " |")
    splash = _peer("adasplash")
    print("\n| tokens, causal, both passes | SDPA | entmax attention, α 1.5 | adasplash |\n| --- | --- | --- | --- |")
    for length in (4096, 16_384):
        q, k, v = (torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")

        def both(attend: Callable[..., Any], own: tuple[Any, ...] = (q, k, v), **options: Any) -> None:
            output = attend(*own, **options)
            torch.autograd.grad(output, own, torch.ones_like(output))

        cells = [
            _milliseconds(lambda run=both: run(F.scaled_dot_product_attention, is_causal=True)),
            _milliseconds(lambda run=both: run(fenchel.attention, is_causal=True)),
            "–" if splash is None else _milliseconds(lambda run=both: run(splash.adasplash, alpha=1.5, is_causal=True)),
        ]
        print(f"| {length} | " + " | ".join(cells) + " |")


def main() -> int:
    """Run the checks that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--correctness", action="store_true", help="no times")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    good = correctness()
    if not asked.correctness:
        times()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

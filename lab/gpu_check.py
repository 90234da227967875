"""Check the kernels for GPUs on a GPU: correctness, races, and times beside those of others. Writes Markdown.

    python lab/gpu_check.py > gpu.md                       # correctness and times
    compute-sanitizer --tool racecheck python lab/gpu_check.py --correctness    # races in shared memory
    compute-sanitizer --tool synccheck python lab/gpu_check.py --correctness    # barriers
    compute-sanitizer --tool memcheck python lab/gpu_check.py --correctness     # addresses
    compute-sanitizer --tool initcheck python lab/gpu_check.py --correctness    # reads before writes
    FENCHEL_KERNELS=triton TRITON_INTERPRET=1 python lab/gpu_check.py --tiny    # without a GPU: whether it runs

No tool sees races in global memory: a wrong order of the stores and loads that comments in the kernels argue about
would show as errors that differ from run to run. ``entmax`` and ``adasplash`` are timed if they are installed. No
figure of it is in the documentation until somebody has measured it.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

import fenchel
from fenchel import kernels
from fenchel.dp import Alignment, LinearChain
from fenchel.kernels.gpu.launch import STARTED


def correctness(device: str, tiny: bool) -> bool:
    """Maps, losses, attention and programs of the device beside torch operations on the CPU; whether all agree."""
    print("| what | largest error |\n| --- | --- |")
    good = True

    def compare(what: str, bound: float, call: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        nonlocal good
        results = call(*(t.to(device).requires_grad_() for t in inputs))
        with kernels.enabled(False):
            exact = call(*(t.double().requires_grad_() for t in inputs))
        pairs = zip(results, exact, strict=True)
        error = max((a.detach().cpu().double() - b.detach()).abs().max().item() for a, b in pairs)
        good &= error < bound
        print(f"| {what} | {error:.1e} |", flush=True)

    def with_gradients(result: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape).to(result)
        return result, *torch.autograd.grad((weight * result).sum(), inputs)

    def learned(choose: Callable[[Tensor, Tensor], Tensor], z: Tensor) -> Sequence[Tensor]:
        alpha = torch.linspace(1.2, 1.8, len(z), dtype=z.dtype, device=z.device)[:, None].requires_grad_()
        return with_gradients(choose(z, alpha), z, alpha)

    def loss(alpha: float, z: Tensor) -> Sequence[Tensor]:
        index = torch.arange(len(z), device=z.device)
        return with_gradients(fenchel.entmax_loss(z, index, alpha, reduction="none"), z)

    def bounded(choose: Callable[..., Tensor], z: Tensor) -> Sequence[Tensor]:
        upper = torch.linspace(0.2, 1.0, z.shape[-1], dtype=z.dtype, device=z.device)
        return with_gradients(choose(z, upper), z)

    checks: list[tuple[str, float, Callable[[Tensor], Sequence[Tensor]]]] = [
        *((f"entmax, α {a}", 3e-6, lambda z, a=a: [fenchel.entmax(z, a)]) for a in (0.7, 1.3, 1.5, 2.0, 3.0)),
        ("entmax of bfloat16", 1e-2, lambda z: [fenchel.entmax(z.bfloat16())]),
        ("entmax of bfloat16 and its gradient", 2e-2, lambda z: with_gradients(fenchel.entmax(z.bfloat16()), z)),
        ("entmax and its gradient", 1e-5, lambda z: with_gradients(fenchel.entmax(z), z)),
        ("entmax, α per row, and its gradients", 1e-4, partial(learned, fenchel.entmax)),
        ("normmax, α per row, and its gradients", 1e-4, partial(learned, fenchel.normmax)),
        *((f"loss and its gradient, α {a}", 1e-5, partial(loss, a)) for a in (1.3, 1.5, 3.0)),
        ("k-subsets and their gradient", 1e-5, lambda z: with_gradients(fenchel.k_subsets(z, 3), z)),
        ("bounds and the gradient, Gini", 1e-5, partial(bounded, fenchel.constrained_sparsemax)),
        ("bounds and the gradient, Shannon", 1e-5, partial(bounded, fenchel.constrained_softmax)),
    ]
    for width in (37, 17_000) if tiny else (37, 4096, 16_384, 50_000):
        z = torch.randn((4 if width < 100 else 1) if tiny else 64, width)
        for name, bound, call in checks:
            if width < 100 or not tiny or name in ("entmax, α 3.0", "k-subsets and their gradient"):
                compare(f"{name}, {width} wide", bound, call, z)
    for length, heads in ((20, 1),) if tiny else ((130, 4), (1024, 2)):
        inputs = torch.randn(3, 2, heads, length, 16 if tiny else 64).unbind()
        for causal in (False, True):
            compare(
                f"attention, {length} tokens{', causal' if causal else ''}",
                1e-3,
                lambda *own, c=causal: with_gradients(fenchel.attention(*own, is_causal=c), *own),
                *inputs,
            )
    options: dict[str, dict[str, Any]] = {
        "α 2": {"omega": fenchel.Gini()},
        "α 1.2": {"omega": fenchel.Tsallis(1.2)},
        "α per head": {"omega": fenchel.Tsallis(1.4, learnable=True, shape=(4, 1, 1))},
        "boolean mask": {"attn_mask": torch.rand(40, 40) < 0.5},
        "mask added": {"attn_mask": torch.randn(40, 40)},
        "heads that share keys": {},
    }
    for (name, given), width in itertools.product(options.items(), (16,) if tiny else (20, 64, 128, 256)):
        masked = {k: copy.deepcopy(v).to(device) if hasattr(v, "to") else v for k, v in given.items()}
        own = torch.randn(2, 4, 40, width), torch.randn(2, 2, 40, width), torch.randn(2, 2, 40, width)

        def attend(q: Tensor, k: Tensor, v: Tensor, given: Any = given, masked: Any = masked) -> Sequence[Tensor]:
            return with_gradients(
                fenchel.attention(q, k, v, **(given if q.dtype == torch.float64 else masked)), q, k, v
            )

        compare(f"attention, heads {width} wide, {name}", 1e-3, attend, *own)
    one = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1100, 16), torch.randn(1, 2, 1100, 16)
    compare("attention of one query", 1e-4, lambda *own: [fenchel.attention(*(t.detach() for t in own))], *one)

    def dropped_twice(*own: Tensor) -> Sequence[Tensor]:
        """The difference of two calls with one seed."""
        outputs = []
        for _ in range(2):
            torch.manual_seed(5)
            outputs.append(fenchel.attention(*own, dropout_p=0.3))
        return [outputs[0] - outputs[1]]

    compare("attention with dropout, repeated", 1e-6, dropped_twice, *torch.randn(3, 1, 2, 20, 16).unbind())
    for name, omega in (("Shannon", fenchel.Shannon()), ("Gini", fenchel.Gini())):
        for states, steps in ((3, 4),) if tiny else ((20, 100), (128, 50)):

            def chain(unary: Tensor, transition: Tensor, omega: Any = omega) -> Sequence[Tensor]:
                d = LinearChain(unary, transition, omega=omega)
                each = *with_gradients(d.value, unary, transition), *with_gradients(d.marginals, unary, transition)
                return [t.flatten() for t in each]

            inputs = torch.randn(2, steps, states), torch.randn(states, states)
            compare(f"chain of {steps} steps, {states} states, {name}", 1e-3, chain, *inputs)
        for size in (5,) if tiny else (100, 1000):

            def alignment(costs: Tensor, omega: Any = omega) -> Sequence[Tensor]:
                d = Alignment(costs, omega=omega)
                return *with_gradients(d.value, costs), *with_gradients(d.marginals, costs)

            compare(f"alignment, {size} × {size}, {name}", 1e-3, alignment, torch.rand(2, size, size + 2))
    print(f"\nKernels that were started: {dict(STARTED)}\n")
    return good and bool(STARTED)


def _peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def times(device: str, tiny: bool) -> None:
    """Tables of milliseconds, forward and forward with backward."""
    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    print(f"{name}, torch {torch.__version__}, Triton {triton.__version__}\n")

    def milliseconds(call: Callable[[], Any] | None) -> str:
        if call is None:
            return "–"
        if device == "cuda":
            return f"{triton.testing.do_bench(call):.3f}"
        start = time.perf_counter()
        call()
        return f"{1e3 * (time.perf_counter() - start):.3f}"

    peer = _peer("entmax")
    sizes = ((4, 64),) if tiny else ((8192, 1024), (8192, 4096), (4096, 16_384), (2048, 50_000))

    def both_passes(call: Callable[[Tensor], Tensor], z: Tensor) -> None:
        result = call(z)
        torch.autograd.grad(result, z, torch.ones_like(result))

    maps: list[Callable[[Tensor], Tensor] | None] = [
        lambda z: torch.softmax(z, -1),
        fenchel.entmax,
        fenchel.sparsemax,
        lambda z: fenchel.entmax(z, 1.3),
        lambda z: fenchel.k_subsets(z, 8),
        None if peer is None else lambda z: peer.entmax15(z),
    ]
    for title, run in (("forward", lambda call, z: call(z)), ("both passes", both_passes)):
        print(f"\n| rows, {title} | softmax | entmax, α 1.5 | sparsemax | α 1.3 | k-subsets | entmax package, α 1.5 |")
        print("| --- " * 7 + "|")
        for rows, width in sizes:
            z = torch.randn(rows, width, device=device).requires_grad_(run is both_passes)
            cells = [milliseconds(None if call is None else partial(run, call, z)) for call in maps]
            print(f"| {rows} × {width} | " + " | ".join(cells) + " |", flush=True)
    losses: list[Callable[[Tensor, Tensor], Tensor] | None] = [
        F.cross_entropy,
        fenchel.entmax_loss,
        None if peer is None else lambda z, y: peer.entmax15_loss(z, y).mean(),
    ]
    print("\n| losses, both passes | cross_entropy | entmax_loss, α 1.5 | entmax package, α 1.5 |")
    print("| --- " * 4 + "|")
    for rows, width in sizes:
        z, y = torch.randn(rows, width, device=device).requires_grad_(), torch.arange(rows, device=device) % width

        def passes(loss: Callable[..., Tensor], z: Tensor = z, y: Tensor = y) -> None:
            both_passes(lambda z: loss(z, y), z)

        cells = [milliseconds(None if loss is None else partial(passes, loss)) for loss in losses]
        print(f"| {rows} × {width} | " + " | ".join(cells) + " |", flush=True)
    splash = None if device == "cpu" else _peer("adasplash")
    print("\n| tokens, causal, both passes | SDPA | entmax attention, α 1.5 | adasplash |\n| --- | --- | --- | --- |")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for length in (16,) if tiny else (4096, 16_384):
        shape = (1, 1, length, 16) if tiny else (1, 8, length, 64)
        own = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in "qkv"]

        def both(attend: Callable[..., Any], own: Any = own, **options: Any) -> None:
            output = attend(*own, **options)
            torch.autograd.grad(output, own, torch.ones_like(output))

        calls = [
            lambda run=both: run(F.scaled_dot_product_attention, is_causal=True),
            lambda run=both: run(fenchel.attention, is_causal=True),
            None if splash is None else lambda run=both: run(splash.adasplash, alpha=1.5, is_causal=True),
        ]
        print(f"| {length} | " + " | ".join(map(milliseconds, calls)) + " |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--correctness", action="store_true", help="no times")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU, by Triton's interpreter")
    asked = parser.parse_args(arguments)
    device = "cpu" if asked.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    good = correctness(device, asked.tiny)
    if not asked.correctness:
        times(device, asked.tiny)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Warming up: afterwards the public interface has nothing left to compile, and it says what it did."""

import io
import itertools
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fenchel
from fenchel import kernels
from fenchel.__main__ import main
from fenchel._warmup import Warmth, calls, compiled_functions

CALLS = """
import torch, fenchel
from fenchel._warmup import compiled_functions

fenchel.warmup()

def known():
    return {(f.py_func.__module__, f.py_func.__qualname__, str(s)) for f in compiled_functions() for s in f.signatures}

def exercise(f, *leaves):
    with torch.no_grad():
        f(*leaves)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    f(*leaves).sum().backward()  # the gradient that comes back is expanded
    result = f(*leaves)
    torch.autograd.grad(result, leaves, torch.randn_like(result))

before = known()
assert before
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    narrow = dtype in (torch.float16, torch.bfloat16)  # computed in float32: once is enough
    for width in (64,) if narrow else (1, 5, 513, 3000):
        scores = torch.randn(4, width, dtype=dtype)
        target = torch.randint(width, (4,))
        mask = torch.rand(4, width) < 0.7
        maps = [fenchel.softmax, fenchel.sparsemax, fenchel.argmax, fenchel.entmax, fenchel.normmax]
        for f in maps:
            exercise(f, scores)
            exercise(lambda s: f(s, mask=mask), scores)
            exercise(lambda s: f(s, dim=0), scores)
            exercise(lambda s: f(s.t(), dim=0), scores)
        for alpha in (1.1, 1.25, 1.33, 1.5, 1.75, 2.0, 3.0, torch.linspace(1.3, 1.9, 4, dtype=dtype)[:, None]):
            exercise(lambda s: fenchel.entmax(s, alpha), scores)
            exercise(lambda s: fenchel.normmax(s, alpha), scores)
            exercise(lambda s: fenchel.Tsallis(alpha).max(s), scores)
            exercise(lambda s: fenchel.entmax_loss(s, target, alpha), scores)
            exercise(lambda s: fenchel.normmax_loss(s, target, alpha), scores)
        exercise(lambda s: fenchel.entmax(s, torch.tensor([[1.5]], dtype=dtype, requires_grad=True)), scores)
        exercise(lambda s: fenchel.sparsemax_loss(s, target), scores)
        exercise(lambda s: fenchel.sparsemax_loss(s, target, label_smoothing=0.1), scores)
        exercise((0.5 * fenchel.Gini()).argmax, scores)
        for alpha in (1.33, 1.5, 2.0):
            for scale in (0.01, 10.0):
                hidden, weight = scale * torch.randn(4, 6, dtype=dtype), torch.randn(width, 6, dtype=dtype)
                exercise(lambda h, w: fenchel.linear_entmax_loss(h, w, target, alpha=alpha), hidden, weight)
                bias = torch.randn(width, dtype=dtype)
                exercise(lambda h, w, b: fenchel.linear_entmax_loss(h, w, target, b, alpha=alpha), hidden, weight, bias)
    for length in (7,) if narrow else (1, 7, 600):
        query, key, value = torch.randn(3, 1, 2, length, 16, dtype=dtype).unbind()
        for omega in (None, fenchel.Gini(), fenchel.Tsallis(1.33), fenchel.Norm(2.0)):
            exercise(lambda q, k, v: fenchel.attention(q, k, v, omega), query, key, value)
            exercise(lambda q, k, v: fenchel.attention(q, k, v, omega, is_causal=True), query, key, value)
        exercise(fenchel.attention, query[..., :1, :], key, value)
        exercise(fenchel.attention, query.transpose(1, 2).contiguous().transpose(1, 2), key, value)
        exercise(lambda q, k, v: fenchel.attention(q[0], k[0], v[0]), query, key, value)
    if not narrow:
        exercise_twice = lambda d: d.value + d.marginals.square().flatten(1).sum(1)
        unary, lengths = torch.randn(2, 5, 4, dtype=dtype), torch.tensor([5, 3])
        for step in (torch.randn(4, 4, dtype=dtype), torch.randn(2, 4, 4, 4, dtype=dtype)):
            for omega in (fenchel.Shannon(), fenchel.Hard(), 0.5 * fenchel.Tsallis(1.5)):
                exercise(lambda u, w: exercise_twice(fenchel.dp.LinearChain(u, w, lengths, omega=omega)), unary, step)
            fenchel.dp.LinearChain(unary, step, lengths).map()
        exercise(lambda c: exercise_twice(fenchel.dp.Alignment(c, band=1)), unary)
        for dim in (1, 2):
            basis = fenchel.continuous.GaussianBasis(torch.rand(3, dim), torch.eye(dim).expand(3, dim, dim))
            for alpha in (1.0, 1.25, 1.5, 2.0):
                covariance = torch.eye(dim, dtype=dtype)
                exercise(lambda m, s: fenchel.continuous.expectation(m, s, basis, alpha), unary[..., :dim], covariance)
        nodes = torch.arange(5)
        exercise(lambda s: exercise_twice(fenchel.dp.Lattice(nodes, nodes + 1, s, 6)), unary[..., 0])
new = known() - before
assert not new, new
"""


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCHEL_KERNELS", raising=False)


def test_nothing_is_left_to_compile() -> None:
    # In a process of its own: what other tests have compiled would hide what the warm-up forgot.
    subprocess.run([sys.executable, "-W", "ignore", "-c", CALLS], check=True, timeout=1200)


@pytest.mark.slow
def test_it_tells_what_it_did() -> None:
    fenchel.warmup()
    again = fenchel.warmup()
    assert (again.compiled, again.loaded) == (0, 0)
    assert again.seconds > 0
    known = [each for each in compiled_functions() if each.signatures]
    assert known
    assert again.cache == Path(known[0].stats.cache_path)


def test_what_cannot_show_progress_is_refused() -> None:
    with pytest.raises(TypeError, match="progress must be a function"):
        fenchel.warmup("maps", progress=False)  # type: ignore[arg-type]


def test_progress_grows_to_one_and_names_every_call() -> None:
    seen: list[tuple[float, str]] = []
    fenchel.warmup(progress=lambda fraction, note="": seen.append((fraction, note)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    for name in itertools.chain(*calls().values()):
        assert {f"{name}, float32", f"{name}, float64"} <= {note for _, note in seen}


def test_rooms_choose_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    parts = {part: {part: lambda scores, part=part: made.append(part) or scores * 2} for part in calls()}
    monkeypatch.setattr(sys.modules["fenchel._warmup"], "calls", lambda: parts)
    monkeypatch.setattr(sys.modules["fenchel._warmup"], "_mark", lambda *key: None)
    fenchel.warmup("continuous", "losses")
    assert set(made) == {"continuous", "entmax", "normmax"}
    made.clear()
    fenchel.warmup()
    assert set(made) == set(parts)


def test_unknown_rooms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a room must be one of maps, losses, .*, got 'kitchen'"):
        fenchel.warmup("maps", "kitchen")
    done = subprocess.run([sys.executable, "-m", "fenchel", "warmup", "kitchen"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "a room must be one of maps" in done.stderr


def test_the_command_takes_rooms_and_a_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[torch.dtype] = []
    tiny = {"tiny": {"tiny": lambda scores: seen.append(scores.dtype) or scores * 2}}
    monkeypatch.setattr(sys.modules["fenchel._warmup"], "calls", lambda: tiny)
    monkeypatch.setattr(sys.modules["fenchel._warmup"], "_mark", lambda *key: None)
    main(["warmup", "tiny", "--dtype", "float64"])
    assert set(seen) == {torch.float64}
    assert capsys.readouterr().out.startswith("Compiled 0 kernels")
    with pytest.raises(SystemExit):
        main(["warmup", "kitchen"])
    assert "a room must be one of" in capsys.readouterr().err


def test_a_terminal_gets_a_bar_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys.modules["fenchel._warmup"], "calls", lambda: {"tiny": {"tiny": lambda s: s * 2}})
    monkeypatch.setattr(sys.modules["fenchel._warmup"], "_mark", lambda *key: None)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        fenchel.warmup()
        assert ("tiny, float32" in stream.getvalue()) == shown


def test_without_kernels_there_is_nothing_to_do(set_kernels: Callable[[bool], None]) -> None:
    set_kernels(False)
    warmth = fenchel.warmup()
    assert (warmth.compiled, warmth.loaded, warmth.seconds, warmth.cache) == (0, 0, 0.0, None)


def test_the_words_for_it_name_the_cache_or_its_absence(set_kernels: Callable[[bool], None]) -> None:
    assert str(Warmth(3, 4, 5.0, Path("cache"))) == (
        "Compiled 3 kernels and loaded 4 in 5.0 s. The cache lies in cache."
    )
    assert str(Warmth(3, 0, 5.0, None)).endswith("There is no folder to cache them in.")
    set_kernels(False)
    assert str(fenchel.warmup()) == "FENCHEL_KERNELS=off: there is nothing to compile."


def test_the_module_is_a_command_that_needs_the_library_alone() -> None:
    code = """
import runpy, sys
for name in ("typer", "rich", "matplotlib", "sklearn", "jinja2", "joblib", "safetensors", "fenchel_lab"):
    sys.modules[name] = None
sys.argv = ["fenchel", "warmup"]
import fenchel._warmup
fenchel._warmup.calls = lambda: {"tiny": {"twice": lambda scores: scores * 2}}
runpy.run_module("fenchel", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith("Compiled 0 kernels")
    assert "kernels   0%" in done.stderr
    assert "kernels 100%" in done.stderr


def test_where_nothing_can_be_cached_it_says_so() -> None:
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import sys, fenchel
from fenchel.kernels.cpu.compiler import kernel

def clear(x):
    x[:] = 0

clear.__module__ = "fenchel.kernels.of_this_test"
tiny = kernel(clear)

def call(scores):
    tiny(scores.detach().numpy())
    return scores

sys.modules["fenchel._warmup"].calls = lambda: {"tiny": {"clear": call}}
warmth = fenchel.warmup()
assert warmth.compiled == 2, warmth  # float32 and float64
assert warmth.loaded == 0 and warmth.cache is None
assert fenchel.warmup().compiled == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(("value", "enabled", "warned"), [("wait", True, 0), ("off", False, 0), ("maybe", True, 1)])
def test_the_variable_is_on_wait_or_off(
    monkeypatch: pytest.MonkeyPatch, value: str, enabled: bool, warned: int
) -> None:
    monkeypatch.setenv("FENCHEL_KERNELS", value)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert runpy.run_path(kernels.__file__)["ENABLED"] is enabled
    assert sum("FENCHEL_KERNELS" in str(each.message) for each in seen) == warned

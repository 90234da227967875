"""Workloads: their parts fit together, peers compute the same thing, and a missing one is told of."""

import sys

import pytest
import torch

from fenchel_lab.bench import UnknownWorkloadError, Workload, find, workloads
from fenchel_lab.bench.run import prepare


@pytest.mark.parametrize("workload", workloads(), ids=lambda w: w.name)
def test_goals_speak_of_contestants_and_cases_that_exist(workload: Workload) -> None:
    names = [each.name for each in workload.contestants]
    labels = [each.label for each in workload.cases]
    assert len(set(names)) == len(names)
    assert len(set(labels)) == len(labels)
    assert workload.goals or workload.name == "factors"  # rows per second alone: nothing to compare with
    for goal in workload.goals:
        assert goal.of in names
        assert set(goal.cases) <= set(labels)
        assert goal.at_most > 0
        if goal.statistic == "memory":
            weighed = [each.label for each in workload.cases if each.small is not None]
            assert set(goal.cases or labels) <= set(weighed)
        elif goal.statistic == "seconds":
            assert workload.stopwatch
        else:
            assert goal.against in names
    assert workload.contestants[0].function is not None
    assert [each.name for each in workload.contestants if each.function is None and not each.missing] == []


def test_names_are_unique_and_found_in_the_order_asked_for() -> None:
    names = [each.name for each in workloads()]
    assert len(set(names)) == len(names)
    assert [each.name for each in find()] == names
    assert [each.name for each in find(["loss", "maps", "loss"])] == ["loss", "maps"]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownWorkloadError, match=r"called 'losses'\. Did you mean loss.* Workloads: maps,"):
        find(["losses"])


PAIRS = [
    ("maps", "sparsemax", "entmax.sparsemax"),
    ("maps", "entmax 1.5", "entmax.entmax15"),
    ("entmax", "entmax 1.33", "entmax.entmax_bisect 1.33"),
    ("entmax", "entmax 1.75", "entmax.entmax_bisect 1.75"),
    ("loss", "entmax_loss 1.5", "entmax.entmax15_loss"),
    ("loss", "sparsemax_loss", "entmax.sparsemax_loss"),
]


@pytest.mark.parametrize(("name", "ours", "peer"), PAIRS)
def test_peers_compute_the_same_function(name: str, ours: str, peer: str) -> None:
    pytest.importorskip("entmax")
    (workload,) = find([name])
    scores = torch.randn(5, 40)
    inputs = (scores, torch.randint(40, (5,))) if name == "loss" else (scores,)
    results = [workload.contestant(each).function(*inputs) for each in (ours, peer)]
    assert torch.allclose(*results, atol=1e-5)


def test_without_the_peer_its_contestants_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    for name in ("maps", "entmax", "loss"):
        (workload,) = find([name])
        gone = [each for each in workload.contestants if each.function is None]
        assert [each.name for each in gone] == [e.name for e in workload.contestants if e.name.startswith("entmax.")]
        assert len(gone) == 2
        assert {each.missing for each in gone} == {
            "entmax is not installed and left out: pip install 'fenchel-lab[bench]' to compare"
        }


@pytest.mark.parametrize(("label", "sigma"), [("peaked, σ = 3.4", 3.4), ("flat, σ = 0.1", 0.1)])
def test_logits_are_as_peaked_as_told(label: str, sigma: float) -> None:
    (workload,) = find(["linear"])
    hidden, weight, target = prepare(workload.case(label), small=True)
    assert (hidden @ weight.T).std().item() == pytest.approx(sigma, rel=0.05)
    assert hidden.requires_grad
    assert weight.requires_grad
    assert not target.requires_grad


def test_attention_gets_heads_that_torchs_fused_kernel_takes() -> None:
    (workload,) = find(["attention"])
    query, key, value = prepare(workload.case("1 × 16384 × 64"), small=True)
    assert query.shape == key.shape == value.shape == (1, 1, 512, 64)
    assert not torch.equal(query, key)
    assert not torch.equal(key, value)


def test_inputs_are_the_same_at_every_call() -> None:
    (workload,) = find(["maps"])
    case = workload.case("4096 × 64, σ = 4")
    (first,), (second,) = prepare(case), prepare(case)
    assert first.shape == (4096, 64)
    assert torch.equal(first, second)
    assert first.std().item() == pytest.approx(4.0, rel=0.02)

"""Every Ω of the library is written to a file and read back; what cannot be is None, and what was spoilt is told."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import fenchel
from fenchel import (
    Capped,
    Custom,
    Fused,
    Gini,
    Hard,
    KSubsets,
    Norm,
    Oscar,
    Regularizer,
    Shannon,
    SparseMAP,
    TotalVariation2d,
    Tsallis,
)
from fenchel.structures import AtMost, Chain, DependencyTree, Matching, SequentialSubsets, Share, Structure, Subsets

PER_ROW = torch.tensor([[1.2], [1.7]])


def trained() -> Tsallis:
    omega = Tsallis(1.5, learnable=True, bounds=(1.0, 3.0), shape=(2, 1))
    with torch.no_grad():
        omega.raw_alpha.copy_(torch.tensor([[-0.3], [40.0]]))  # the second is at its bound, to rounding
    return omega


OMEGAS = [
    Hard(),
    Shannon(),
    Gini(),
    Tsallis(1.3),
    Tsallis(float("inf")),
    Tsallis(PER_ROW),
    Tsallis(nn.Parameter(PER_ROW.double())),
    trained(),
    Norm(3.0),
    Norm(PER_ROW),
    Capped(0.4),
    Capped(torch.tensor([0.5, 0.5, 0.5, 0.2]), Shannon()),
    KSubsets(2),
    KSubsets(torch.tensor([[2], [1]])),
    Fused(0.2),
    Oscar(torch.tensor([[0.1], [0.2]])),
    TotalVariation2d(0.1, shape=(2, 2)),
    0.5 * Gini(),
    nn.Parameter(torch.tensor(2.0)) * Fused(0.1),
    SparseMAP(Subsets(2)),
    SparseMAP(Subsets(Share(0.5)), tol=1e-5, max_iter=77),
    SparseMAP(AtMost(2)),
    SparseMAP(SequentialSubsets(2, nn.Parameter(torch.tensor(0.3)))),
]
MATRICES = [SparseMAP(Chain(0.5 * torch.eye(2))), SparseMAP(Matching()), SparseMAP(DependencyTree(projective=True))]


@pytest.mark.parametrize("omega", OMEGAS + MATRICES, ids=lambda o: type(o).__name__)
def test_an_omega_is_read_back_as_it_was_written(omega: Regularizer) -> None:
    config = omega.config()
    read = Regularizer.from_config(json.loads(json.dumps(config)))
    assert type(read) is type(omega)
    assert str(read) == str(omega)
    assert read.config() == config
    torch.manual_seed(0)
    scores = torch.randn((2, 3) if omega is MATRICES[-1] else (2, 2) if omega in MATRICES else (2, 4))
    assert torch.equal(read.argmax(scores), omega.argmax(scores))
    ours, theirs = dict(read.named_parameters()), dict(omega.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


def test_every_omega_and_every_structure_of_the_library_is_tried() -> None:
    """So that a new one is not forgotten: those made of a function are the only ones that cannot be written."""

    def kinds(cls: type) -> set[str]:
        own = {cls.__name__} if cls.__module__.startswith("fenchel.") and not cls.__name__.startswith("_") else set()
        return own.union(*(kinds(each) for each in cls.__subclasses__()))

    tried: set[str] = set()

    def visit(config: Any) -> None:
        if isinstance(config, dict):
            tried.update([config["kind"]] if "kind" in config else [])
            for each in config.values():
                visit(each)

    for omega in OMEGAS + MATRICES:
        visit(omega.config())
    public = set(fenchel.__all__) | set(fenchel.structures.__all__) | {"Scaled"}
    expected = (kinds(Regularizer) | kinds(Structure)) & public
    assert expected - tried == {"Regularizer", "Structure", "Custom", "LPSparseMAP"}
    assert fenchel.LPSparseMAP(lambda graph, variables: None).config() is None


class Mine(Tsallis):
    pass


class Pairs(Structure):
    def map(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(scores)


@pytest.mark.parametrize(
    "omega", [Custom(lambda p: p.sum(-1)), 2.0 * Custom(lambda p: p.sum(-1)), Mine(1.5), SparseMAP(Pairs())], ids=str
)
def test_what_a_file_cannot_hold_is_none(omega: Regularizer) -> None:
    assert omega.config() is None


def test_descriptions_of_the_first_version_are_read() -> None:
    old = {"kind": "Tsallis", "alpha": 1.5, "bounds": [1.0, 2.0], "shape": [2, 1, 1]}
    omega = Regularizer.from_config({"kind": "Scaled", "gamma": 0.5, "omega": old})
    assert omega.omega.raw_alpha.shape == (2, 1, 1)
    assert omega.gamma == 0.5
    with pytest.raises(ValueError, match="shape must have at most"):
        Regularizer.from_config(old | {"shape": [10**9]})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "kind among .*Tsallis.*got None"),
        ({"kind": "Custom"}, "got 'Custom'"),
        ({"kind": ["Gini"]}, "kind among"),
        ({"kind": "Tsallis", "alpha": "1.5"}, "config of Tsallis does not fit: alpha must be a number"),
        ({"kind": "Tsallis", "alpha": -1.0}, "alpha must satisfy"),
        ({"kind": "Tsallis", "alpha": None}, "alpha must be a number"),
        ({"kind": "Norm", "beta": 2.0}, "config of Norm does not fit"),
        ({"kind": "Scaled", "gamma": 2.0}, "config of Scaled does not fit"),
        ({"kind": "Subsets", "k": 2}, "must be that of a Regularizer, got Subsets"),
        ({"kind": "SparseMAP", "structure": {"kind": "Gini"}, "max_iter": 9, "tol": 1e-6}, "structure must be"),
        (
            {"kind": "Norm", "alpha": {"values": [[2.0], [3.0, 4.0]], "dtype": "float32", "trained": False}},
            "lists of numbers|expected sequence",
        ),
        ({"kind": "Norm", "alpha": {"values": ["a"], "dtype": "float32", "trained": False}}, "lists of numbers"),
        ({"kind": "Norm", "alpha": {"values": [2.0], "dtype": "manual_seed", "trained": False}}, "name of a dtype"),
        ({"kind": "Norm", "alpha": {"values": [2], "dtype": "int64", "trained": True}}, "lists of numbers"),
        ({"kind": "Norm", "alpha": {"values": [2.0], "trained": False}}, "name of a dtype, got None"),
        ({"kind": "Norm", "alpha": {"values": [2.0], "dtype": "float32"}}, "whether it is trained"),
        ({"kind": "Tsallis"}, "config of Tsallis does not fit: alpha must be a number or a tensor, and there is none"),
        ({"kind": "Tsallis", "alpha": 1.5, "shape": [2, 1, 1]}, "there are no bounds"),
        ({"kind": "Tsallis", "alpha": 1.5, "bounds": [1.0, 2.0]}, "there is no raw_alpha"),
        ({"kind": "SparseMAP", "structure": {"kind": "Matching"}, "tol": 1e-6}, "there is no max_iter"),
        ({"kind": "DependencyTree", "projective": True}, "there is no single_root"),
        ("Gini", "must be that of a Regularizer, got str"),
    ],
)
def test_what_was_spoilt_is_told(config: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Regularizer.from_config(config)


def test_deep_nesting_is_refused() -> None:
    config: dict[str, Any] = {"kind": "Gini"}
    for _ in range(900):
        config = {"kind": "Scaled", "gamma": 1.0, "omega": config}
    with pytest.raises(ValueError, match="must not be nested more than 16 times"):
        Regularizer.from_config(config)

"""Training: the best epoch is kept, patience ends it, and the rate falls to zero."""

import pytest
import torch
from torch import Tensor, nn

from fenchel.loops import DivergedError
from fenchel.studies.training import Course, trained


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([3.0, -2.0]))


def distance(model: Point, target: Tensor) -> Tensor:
    return (model.x - target).square().sum()


def test_a_convex_problem_is_solved_and_progress_told() -> None:
    torch.manual_seed(0)
    told: list[float] = []
    target = torch.tensor([1.0, 0.5])
    model, best = trained(
        Point(), [target] * 20, distance, lambda m: 10 - distance(m, target).item(), Course(40, 0.1, 0.0), told.append
    )
    torch.testing.assert_close(model.x.detach(), target, atol=1e-3, rtol=0)
    assert best == pytest.approx(10, abs=1e-5)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert not model.training


def test_the_best_epoch_is_kept_and_patience_ends_training() -> None:
    scores, seen = iter([0.6, 0.8, 0.7, 0.8, 0.5, 0.99]), []

    def score(model: Point) -> float:
        assert not model.training
        seen.append(model.x.detach().clone())
        return next(scores)

    model, best = trained(Point(), [torch.zeros(2)], distance, score, Course(6, 0.1, patience=3), lambda _: None)
    assert best == 0.8
    assert len(seen) == 5
    assert torch.equal(model.x, seen[1])
    assert not torch.equal(model.x, seen[0])


@pytest.mark.parametrize("spoilt", ["loss", "parameters"])
def test_what_is_not_finite_stops_training_and_is_never_the_best(spoilt: str) -> None:
    judged: list[float] = []

    def loss(model: Point, target: Tensor) -> Tensor:
        value = distance(model, target)
        return value * torch.nan if spoilt == "loss" and len(judged) == 1 else value

    def score(model: Point) -> float:
        judged.append(1.0)
        if spoilt == "parameters":
            model.x.data[0] = torch.inf
        return len(judged)

    with pytest.raises(DivergedError, match="so training stopped"):
        trained(Point(), [torch.zeros(2)], loss, score, Course(3, 0.1), lambda _: None)
    assert len(judged) == 1


@pytest.mark.parametrize("rate", [0.0, -1.0, torch.inf, torch.nan])
def test_a_course_has_a_rate_that_is_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be positive and finite"):
        Course(3, rate)
    with pytest.raises(ValueError, match="patience must be at least 1"):
        Course(3, patience=0)

"""Training: the best epoch is kept, patience ends it, and the rate falls to zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fenchel import Shannon
from fenchel.seq2seq.checkpoints import DivergedError
from fenchel_lab.models import agents, bags, bits, parsing, tagging
from fenchel_lab.models.training import Course, trained


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
    with pytest.raises(ValueError, match="rate must satisfy 0 < rate < inf"):
        Course(3, rate)
    with pytest.raises(ValueError, match="patience must be at least 1"):
        Course(3, patience=0)


IMAGES = torch.full((8, 4), torch.nan)
BAGS = bags.Bags(IMAGES, torch.arange(8).view(4, 2), torch.tensor([True, False] * 2))
LOOPS: dict[str, Callable[[float], object]] = {
    "agents": lambda rate: agents.trained(
        IMAGES, agents.Setting(8, 2, 4, 4, rate=rate, batch=4), agents.CHANNELS["K-D Hard Concrete"], print
    ),
    "bits": lambda rate: bits.trained(IMAGES, bits.Setting(4, 4, rate), bits.KINDS["Gumbel-Softmax"], print),
    "bags": lambda rate: bags.trained(BAGS, BAGS, Shannon(), bags.Setting(width=4, hidden=4, rate=rate), print),
    "parsing": lambda rate: parsing.train(
        [parsing.Sentence(("a",), ("A",), (0,), ("dep",))], lambda s, _: s * torch.nan, parsing.Size(rate=rate), print
    ),
    "tagging": lambda rate: tagging.train(
        [tagging.Sentence(("a",), ("O",)), tagging.Sentence(("b",), ("B-PER",))],
        Shannon(),
        tagging.Size(epochs=9, rate=1e38 if rate < 1 else rate),
        print,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_of_the_studies_stops_at_a_loss_that_is_not_finite(name: str) -> None:
    with pytest.raises(ValueError, match="rate must satisfy 0 < rate < inf"):
        LOOPS[name](torch.inf)
    with pytest.raises(DivergedError, match="so training stopped"):
        LOOPS[name](1e-3)

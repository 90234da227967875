"""On thousands of machines: the study on few, and what it draws and emulates."""

import pytest
import scipy.stats
import torch

import fenchel
from fenchel_lab.chapters import many_machines as study
from fenchel_lab.chapters.many_machines import Machines, Protocol
from fenchel_lab.report import Context


def test_the_study_says_what_it_ran() -> None:
    protocol = Protocol(ranks=(2, 5), classes=(300, 2000), rows=4, patterns=10**6, queries=2, many_rows=(4, 16))
    told: list[float] = []
    result = study.simulate(Context(progress=lambda share, note="": told.append(share)), protocol, Machines())
    losses, recalls = result.tables
    assert len(losses.rows) == 2 * 2 * 2
    assert len(recalls.rows) == 2 * 2
    assert len(result.figures) == 2
    assert told == sorted(told)
    assert "histogram" in result.summary


@pytest.mark.parametrize("ranks", [3, 16])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_emulation_has_the_rounds_of_the_real_exchange(ranks: int, spread: float) -> None:
    scores = spread * torch.randn(8, 5000, generator=torch.Generator().manual_seed(3))
    found = study.run_loss(scores, torch.arange(8), ranks, spread)
    assert found.newton == found.collectives - 1
    assert 1 <= found.after <= found.newton
    assert found.support > 1
    assert list(found.per_row) == [3, 4, *[3] * (found.collectives - 2)]


def test_a_histogram_bounds_the_offset_from_below() -> None:
    scores = 2 * torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    start = study._local_offsets(scores, 7, 1.5)
    bound = study._histogram_offsets(scores, start, 1.5)
    largest = fenchel.entmax(scores.double()).amax(-1, keepdim=True)
    offset = (1 - largest**0.5) / 0.5  # p = (1 + (z − A)/2)² at the largest score, which is 0 here
    assert (torch.maximum(start, bound) <= offset).all()
    assert (offset - bound).mean() < (offset - start).mean()


def test_the_largest_of_many_gaussian_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    every = study.largest_scores(30, 30, 400, generator)  # all of them: a Gaussian sample
    assert scipy.stats.kstest(every.flatten().numpy(), "norm").pvalue > 0.01
    assert (every.diff(dim=-1) <= 0).all()
    most = study.largest_scores(10**6, 3, 4000, generator)[:, 2]  # the third largest is a beta variable's quantile
    law = scipy.stats.beta(10**6 - 2, 3)
    assert scipy.stats.kstest(scipy.stats.norm.cdf(most.numpy()), law.cdf).pvalue > 0.01


def test_the_model_of_time() -> None:
    machines = Machines(hop=1.0, wire=10.0)
    assert machines.all_reduce(0, 4) == 4.0  # two hops up the tree and two down
    assert machines.all_reduce(100, 2) == 2.0 + 10.0
    assert machines.all_gather(10, 5) == 3.0 + 4.0

"""Multiple instances: bags as the paper makes them, scores that are what they say, and the paper's table."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from sklearn.metrics import roc_auc_score

from fenchel import KSubsets, Shannon
from fenchel_lab.chapters import multiple_instances
from fenchel_lab.chapters.multiple_instances import METHODS, PAPER, SIZES, TARGET
from fenchel_lab.models import bags
from fenchel_lab.models.bags import NONE, Bags, Classifier, Setting
from fenchel_lab.report import Context, Run, find, run
from fenchel_lab.report.records import Records

SMALL = Setting(width=8, hidden=4, heads=2, epochs=2, batch=16)


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that carry their digit in every pixel."""
    labels = torch.arange(count) % 10
    return labels.float().reshape(-1, 1, 1).expand(-1, 4, 4).contiguous(), labels


@pytest.mark.parametrize("least", [1, 2, 3, 5])
def test_bags_have_the_sizes_and_targets_of_the_paper(least: int) -> None:
    images, labels = digits(2000)
    made = bags.of_digits(images, labels, TARGET, least, SIZES[least], 3000, np.random.default_rng(0))
    assert made.targets is not None
    present = made.members != NONE
    sizes = present.sum(1)
    shown = torch.where(present, labels[made.members], -1)
    targets = (shown == TARGET).sum(1)
    assert torch.equal(targets, made.targets)
    assert torch.equal(made.labels, targets >= least)
    assert made.labels.float().mean() == 0.5
    assert sizes.min() >= least
    mean, deviation = SIZES[least]
    kept = np.maximum(np.random.default_rng(1).normal(mean, deviation, 10**6).round(), max(least, 1))
    assert sizes.double().mean().item() == pytest.approx(kept.mean(), abs=0.3)
    assert sizes.double().std().item() == pytest.approx(kept.std(), abs=0.3)
    negative = torch.bincount(targets[~made.labels], minlength=least) / (len(made) / 2)
    assert negative.tolist() == pytest.approx([1 / least] * least, abs=0.05)
    share = ((targets - least) / (sizes - least).clamp_min(1))[made.labels & (sizes > least)]
    assert share.double().mean().item() == pytest.approx(0.5, abs=0.05)
    for row in made.members[:50]:
        assert len(set(row[row != NONE].tolist())) == int((row != NONE).sum())
    again = bags.of_digits(images, labels, TARGET, least, SIZES[least], 3000, np.random.default_rng(0))
    assert torch.equal(made.members, again.members)


def lists() -> Bags:
    random = np.random.default_rng(0)
    instances = [random.normal(size=(size, 3)) for size in (2, 5, 1)]
    return bags.of_lists(instances, torch.tensor([True, False, True]))


def test_lists_become_bags_and_rows_of_them_are_cut_to_size() -> None:
    made = lists()
    assert made.members.tolist() == [[0, 1, NONE, NONE, NONE], [2, 3, 4, 5, 6], [7, NONE, NONE, NONE, NONE]]
    part = made[torch.tensor([2, 0])]
    assert part.members.tolist() == [[7, NONE], [0, 1]]
    assert part.labels.tolist() == [True, True]


def test_features_are_standardized_by_the_bags_that_train() -> None:
    made = lists()
    train = made[torch.tensor([1])]
    pool = bags.standardized(made, train).pool
    assert pool[2:7].mean(0).tolist() == pytest.approx([0] * 3, abs=1e-6)
    assert pool[2:7].std(0).tolist() == pytest.approx([1] * 3, abs=1e-6)


def test_a_bag_is_scored_the_same_among_others_and_alone() -> None:
    made = lists()
    classifier = Classifier(made.pool.shape[1:], SMALL, KSubsets(2)).eval()
    alone = torch.cat([classifier(made[torch.tensor([row])]) for row in range(3)])
    assert torch.allclose(bags.scores(classifier, made), alone, atol=1e-6)
    weights = classifier.weights(made)
    assert weights.shape == (3, 2, 5)
    assert weights.sum(-1).tolist() == [pytest.approx([n] * 2, abs=1e-5) for n in (2, 2, 1)]


def test_accuracy_and_area_count_what_they_say() -> None:
    made = lists()
    classifier = Classifier(made.pool.shape[1:], SMALL, Shannon())
    values = torch.tensor([0.5, -0.1, -0.2])
    classifier.forward = lambda part: values[: len(part)]  # type: ignore[method-assign]
    assert bags.accuracy(classifier, made) == pytest.approx(2 / 3)
    assert bags.area_under_curve(classifier, made) == roc_auc_score([1, 0, 1], values) == 0.5


def test_the_best_epoch_is_kept_and_patience_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lists()
    areas = iter([0.6, 0.8, 0.7, 0.8, 0.5, 0.99])
    seen = []

    def area(classifier: Classifier, part: Bags) -> float:
        seen.append(classifier.score.weight.detach().clone())
        return next(areas)

    monkeypatch.setattr(bags, "area_under_curve", area)
    setting = replace(SMALL, epochs=6, patience=3)
    classifier, best = bags.trained(made, made, Shannon(), setting, lambda _: None)
    assert best == 0.8
    assert len(seen) == 5
    assert torch.equal(classifier.score.weight, seen[1])


def test_the_grid_has_every_combination_of_the_paper() -> None:
    full = multiple_instances.FULL
    settings = multiple_instances._grid(full.digits, full.digits_grid)
    assert len(settings) == len(set(settings.values())) == 2 * 2 * 2 * 2 * 6 * 2
    assert len(multiple_instances._grid(full.corel, full.corel_grid)) == 2 * 2 * 2 * 2 * 3 * 2
    assert multiple_instances._grid(SMALL, {}) == {"given": SMALL}
    assert full.digits.epochs == full.corel.epochs == 50
    assert (full.runs, full.digits.patience, full.digits.embedding) == (5, 5, "convolutional")


def test_the_setting_is_chosen_on_validation_bags_of_the_first_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lists()
    used: list[tuple[float, int]] = []

    def trained(*arguments: object) -> tuple[Classifier, float]:
        setting = arguments[3]
        assert isinstance(setting, Setting)
        used.append((setting.beta, int(torch.initial_seed())))
        return Classifier(made.pool.shape[1:], setting, Shannon()), {1.0: 0.7, 2.0: 0.9, 4.0: 0.8}[setting.beta]

    monkeypatch.setattr(bags, "trained", trained)
    monkeypatch.setattr(multiple_instances, "METHODS", METHODS[:1])
    protocol = replace(multiple_instances.TOY, runs=2)
    split = multiple_instances.Split(made, made, made)
    settings = multiple_instances._grid(SMALL, {"beta": (1.0, 2.0, 4.0)})
    # Test scores would choose another setting, the one with the smallest beta.
    task = multiple_instances.Task("K = 1", lambda seed: [split, split], 2, lambda c, _: 1 / used[-1][0], settings)
    context = Context(data=None, seed=7, records=Records(tmp_path))
    (entry,), missing = multiple_instances._entries(context, [task], protocol)
    assert missing == 0
    assert used == [
        (beta, seed)
        for beta, first in ((1.0, 7), (2.0, 7), (4.0, 7), (2.0, 8))
        for seed in (1000 * first, 1000 * first + 1)
    ]
    assert entry.scores == {7: 50.0, 8: 50.0}
    again, missing = multiple_instances._entries(context, [task], protocol)
    assert len(used) == 8  # nothing is run twice
    assert again[0].scores == entry.scores


def test_only_what_is_finished_is_shown(tmp_path: Path) -> None:
    context = Context(data=None, records=Records(tmp_path, minutes=0))
    result = multiple_instances.multiple_instances(context)
    assert not result.tables
    assert f"{len(METHODS)} runs are not finished" in result.summary


def test_folds_cover_every_bag_once_and_never_train_on_it() -> None:
    random = np.random.default_rng(0)
    instances = [np.full((1 + i % 4, 2), float(i)) + random.normal(size=(1 + i % 4, 2)) * 0.1 for i in range(40)]
    whole = bags.of_lists(instances, torch.arange(40) % 2 == 1)
    tested = []
    for split in multiple_instances._folds(whole, 5, seed=0):
        groups = [set(part.members[part.members != NONE].tolist()) for part in (split.train, split.valid, split.test)]
        assert not groups[0] & groups[1]
        assert not groups[0] & groups[2]
        assert not groups[1] & groups[2]
        assert (len(split.train), len(split.valid), len(split.test)) == (24, 8, 8)
        assert split.test.labels.float().mean() == 0.5
        tested += split.test.members[:, 0].tolist()
    assert sorted(tested) == whole.members[:, 0].tolist()


def test_the_papers_table_is_there_to_the_last_cell() -> None:
    assert len(PAPER) == 7 * 8
    assert PAPER["K = 3", "3-subsets"] == (96.5, 0.5)
    assert PAPER["elephant", "5-subsets"] == (91.2, 1.0)
    assert PAPER["fox", "1-entmax (softmax)"] == (66.4, 2.0)


@pytest.mark.slow
def test_the_right_number_of_subsets_counts_better_than_an_average_of_one(chapter: Callable[[str], Run]) -> None:
    result = chapter("multiple_instances").result
    assert result is not None
    (table,) = result.tables
    found = {str(row[0]): float(str(row[1])) for row in table.rows}
    assert list(found) == [name for name, _ in METHODS]
    assert found["3-subsets"] > 90
    assert min(found.values()) > 55


@pytest.mark.slow
def test_the_columns_of_real_data_are_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiple_instances, "_images", lambda folder, halved: [digits(300)] * 3)
    random = np.random.default_rng(0)
    ids = np.repeat(np.arange(200), 2)
    labels = np.where(ids % 2 == 1, 1.0, -1.0)
    features = random.normal(size=(400, 5)) + labels[:, None]
    (tmp_path / "mil").mkdir()
    for name in ("fox", "tiger", "elephant"):
        content = {"features": features, "bag_ids": ids, "labels": labels}
        savemat(tmp_path / "mil" / f"{name}_100x100.mat", content)
    grids = {"digits_grid": {"beta": (1.0,)}, "corel_grid": {"beta": (1.0,), "dropout": (0.0,)}}
    one = replace(SMALL, epochs=1)
    few = replace(multiple_instances.TOY, bags=(8, 8, 40), digits=one, corel=SMALL, folds=3, runs=2, **grids)
    monkeypatch.setattr(multiple_instances, "SCALED", few)
    monkeypatch.setattr(multiple_instances, "METHODS", METHODS[:1] + METHODS[2:3] + METHODS[6:7])
    records = Records(tmp_path / "runs")
    outcome = run(find("multiple_instances"), Context(data=tmp_path, seed=3, records=records))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    first, second, _ = outcome.result.tables
    columns = [f"K = {k}" for k in (1, 2, 3, 5)], ["fox", "tiger", "elephant"]
    for table, names in zip((first, second), columns, strict=True):
        assert list(table.header) == ["", *(word for name in names for word in (name, f"{name} runs", f"{name} paper"))]
    assert second.rows[0][3] == "66.4 ± 2.0"
    assert all(float(str(row[1]).split()[0]) > 80 for row in second.rows)
    assert records.count == 7 * 3 * 2
    assert "with 2 seeds" in outcome.result.summary
    assert len(outcome.result.claims) == 7

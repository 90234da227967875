"""The bit-vector auto-encoder: a chapter whose numbers hang together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fenchel_lab.chapters import bit_vector_vae
from fenchel_lab.chapters.bit_vector_vae import FULL, SCALED, Protocol
from fenchel_lab.data import images
from fenchel_lab.data.images import Images
from fenchel_lab.models.bits import KINDS, Setting
from fenchel_lab.report import Context, Run, find, run


def test_the_full_protocol_is_the_authors() -> None:
    setting = FULL.setting
    assert (setting.bits, setting.batch, setting.epochs, setting.rate) == (128, 64, 100, 1e-3)
    assert FULL.samples == 1024
    assert SCALED.setting.epochs < setting.epochs


@pytest.mark.slow
def test_the_chapter_adds_up(chapter: Callable[[str], Run]) -> None:
    result = chapter("bit_vector_vae").result
    assert result is not None
    (table,) = result.tables
    assert [row[0] for row in table.rows] == list(KINDS)
    exact = {}
    for name, bound, distortion, rate, silent, likelihood, _, share in table.rows:
        assert float(str(bound)) == pytest.approx(float(str(distortion)) + float(str(rate)), abs=0.02)
        assert 0 <= float(str(silent)) <= float(str(rate))
        assert (float(str(silent)) > 0) == (name in ("Hard Concrete", "Gaussian-Sparsemax"))
        assert float(str(likelihood)) < 64 * 0.6931  # a fair coin for every pixel
        exact[name] = float(str(share))
    assert (exact["Gumbel-Softmax"], exact["Gumbel-Softmax ST"]) == (0, 100)
    assert 20 < exact["Hard Concrete"] < 100
    assert 20 < exact["Gaussian-Sparsemax"] < 100
    assert len(result.figures) == 2


def test_real_images_are_cut_to_zeros_and_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    trained = bit_vector_vae.bits.trained

    def load(folder: Path | None, halved: bool) -> Images:
        assert folder == tmp_path
        assert halved
        torch.manual_seed(5)
        return Images(*(torch.rand(count, 4, 4) for count in (40, 10, 20)))

    def spied(shown: torch.Tensor, *rest: object) -> object:
        seen.append(shown)
        return trained(shown, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "load", load)
    monkeypatch.setattr(bit_vector_vae.bits, "trained", spied)
    small = Protocol(Setting(bits=4, hidden=8, batch=20, epochs=1), halved=True, runs=2, weighted=5, samples=3)
    monkeypatch.setattr(bit_vector_vae, "SCALED", small)
    outcome = run(find("bit_vector_vae"), Context(data=tmp_path, seed=4))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    assert len(seen) == 2 * len(KINDS)
    assert all(set(shown.unique().tolist()) == {0.0, 1.0} for shown in seen)
    assert "2 seeds" in outcome.result.tables[0].caption
    assert "±" in str(outcome.result.tables[0].rows[0][1])

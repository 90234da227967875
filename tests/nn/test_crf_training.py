"""The tagging layer in the loops that users train with: DistributedDataParallel, Lightning, transformers' Trainer."""

import datetime
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from fenchel.nn import CRF

LABELS = ["O", "B-X", "I-X"]
LIMIT = 120  # seconds, for all processes


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.crf = torch.nn.Linear(4, 3), CRF(3, constraints="BIO", labels=LABELS)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        return self.crf(self.score(x), tags != -100).loss(tags).mean()


def batch() -> tuple[Tensor, Tensor]:
    """Sentences with holes, and an empty one; as many in both halves."""
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
    tags = torch.tensor([[0, 1, 2, 0, 1]]).repeat(6, 1)
    tags[1, 0], tags[2, 3:], tags[3, 1:3], tags[4] = -100, -100, -100, -100
    return x, tags


def work(rank: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    limit = datetime.timedelta(seconds=LIMIT)
    init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    try:
        model = DistributedDataParallel(Tagger())
        x, tags = batch()
        half = slice(3 * rank, 3 * rank + 3)
        model(x[half], tags[half]).backward()
        torch.save([each.grad for each in model.module.parameters()], f"{folder}/{rank}.pt")
    finally:
        destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    model = Tagger()
    model(*batch()).backward()
    alone = [each.grad for each in model.parameters()]
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_restores_it(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tagger = Tagger()

        def training_step(self, given: list[Tensor], _: int) -> Tensor:
            return self.tagger(*given)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    module = Module()
    before = module.tagger(*batch()).item()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=3)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=20, default_root_dir=tmp_path, **options)
    trainer.fit(module, data)
    after = module.tagger(*batch())
    assert after.item() < 0.5 * before
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    restored = Module.load_from_checkpoint(tmp_path / "last.ckpt")
    torch.testing.assert_close(restored.tagger(*batch()), after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_trains_and_predicts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(Tagger):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            chain = self.crf(self.score(x), labels != -100)
            return {"loss": chain.loss(labels).mean(), "logits": chain.map()}

    model = Model()
    data = [{"x": x, "labels": tags} for x, tags in zip(*batch(), strict=True)]
    before = model(*batch())["loss"].item()
    how = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=20, learning_rate=0.1, report_to="none", disable_tqdm=True, use_cpu=True
    )
    trainer = transformers.Trainer(model, how, train_dataset=data)
    trainer.train()
    assert model(*batch())["loss"].item() < 0.5 * before
    found = trainer.predict(data)
    assert torch.equal(torch.tensor(found.predictions), model(*batch())["logits"])
    assert (found.predictions[found.label_ids == -100] == -1).all()

"""Token classification with the Hugging Face Trainer: a tiny BERT, word pieces, and a conditional random field.

Pieces other than the first of a word have the label −100 and are left out of the chain: ``mask = labels != -100``.

It prints:

    loss 3.41 at first, 0.00 after 30 steps
    predicted [[1, 2, 0, 1], [0, 1, 2, 0]]
    labels    [[1, 2, 0, 1], [0, 1, 2, 0]]
"""

import tempfile

import torch
from transformers import BertConfig, BertModel, PrinterCallback, Trainer, TrainingArguments

import fenchel


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        self.encode = BertModel(BertConfig(vocab_size=40, **sizes), add_pooling_layer=False)
        self.score, self.crf = torch.nn.Linear(32, 3), fenchel.nn.CRF(3, constraints="BIO", labels=["O", "B-X", "I-X"])

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.encode(input_ids, attention_mask=attention_mask).last_hidden_state
        chain = self.crf(self.score(hidden), mask=labels != -100)
        return {"loss": chain.loss(labels).mean(), "logits": chain.map()}


def sentence(seed: int) -> dict[str, torch.Tensor]:
    """Four words of two pieces: 3 to 12 is outside, 13 to 22 begins a name, 23 to 32 goes on; second pieces from 33."""
    tags = [[1, 2, 0, 1], [0, 1, 2, 0], [0, 0, 1, 2]][seed % 3]
    first, second = torch.randint(70, (2, 4), generator=torch.Generator().manual_seed(seed)).tolist()
    pieces = [p for tag, a, b in zip(tags, first, second, strict=True) for p in (3 + 10 * tag + a % 10, 33 + b % 7)]
    labels = [label for tag in tags for label in (tag, -100)]
    return {
        "input_ids": torch.tensor([1, *pieces, 2]),
        "attention_mask": torch.ones(10, dtype=torch.long),
        "labels": torch.tensor([-100, *labels, -100]),
    }


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    how = TrainingArguments(folder, max_steps=30, per_device_train_batch_size=16, learning_rate=1e-2, logging_steps=1,
                            report_to="none", disable_tqdm=True, log_level="error", use_cpu=True)  # fmt: skip
    trainer = Trainer(Tagger(), how, train_dataset=[sentence(seed) for seed in range(120)])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
    found = trainer.predict([sentence(300), sentence(301)])
kept = found.label_ids != -100
print("predicted", [row[k].tolist() for row, k in zip(found.predictions, kept, strict=True)])
print("labels   ", [row[k].tolist() for row, k in zip(found.label_ids, kept, strict=True)])

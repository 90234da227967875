"""Tag the words of sentences: a conditional random field on a small Transformer.

Half of the tags are left out in training: −100 is a tag that is not observed. The rules of BIO are constraints.
It prints:

    step   0  loss 4.34
    step  20  loss 0.21
    step  40  loss 0.02
    Ada/B-PER Lovelace/I-PER met/O Turing/B-PER in/O Paris/B-LOC
"""

import torch

import fenchel

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]
FIRST, LAST, VERBS = ["Ada", "Alan", "Emmy"], ["Lovelace", "Turing", "Noether"], ["met", "saw", "called"]
WORDS, PLACES = ["in", "near", "and"], ["Paris", "London", "Rome"]
VOCABULARY = {word: i for i, word in enumerate([*FIRST, *LAST, *PLACES, *VERBS, *WORDS])}


def sentence() -> tuple[list[int], list[int]]:
    def draw(words: list[str]) -> str:
        return words[int(torch.randint(len(words), ()))]

    parts = [(draw(FIRST), 1), (draw(LAST), 2), (draw(VERBS), 0), (draw(LAST), 1), (draw(WORDS), 0), (draw(PLACES), 3)]
    parts = parts[int(torch.randint(3, ())) :]
    parts[0] = parts[0][0], min(parts[0][1], 1)  # a last name that comes first begins a name
    return [VOCABULARY[word] for word, _ in parts], [tag for _, tag in parts]


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(len(VOCABULARY), 32), torch.nn.Embedding(6, 32)
        self.encode = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.score, self.crf = torch.nn.Linear(32, 4), fenchel.nn.CRF(4, constraints="BIO", labels=LABELS)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return self.score(self.encode(x, src_key_padding_mask=~mask))


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(41):
    words, tags = zip(*(sentence() for _ in range(16)), strict=True)
    pad = [torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in rows], True, -100) for rows in (words, tags)]
    mask, observed = pad[0] >= 0, torch.where(torch.rand(pad[1].shape) < 0.5, pad[1], -100)
    loss = model.crf(model(pad[0].clamp_min(0), mask), mask).loss(observed).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss:.2f}")
text = ["Ada", "Lovelace", "met", "Turing", "in", "Paris"]
given = torch.tensor([[VOCABULARY[word] for word in text]])
tags = model.crf.decode(model(given, given >= 0))[0]
print(*(f"{word}/{LABELS[tag]}" for word, tag in zip(text, tags, strict=True)))

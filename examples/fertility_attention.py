"""A decoder spends a limited amount of attention on each letter: what was spent on a letter lowers its bound.

A model learns to write words backwards, and may spend at most 1.2 steps of attention on each letter in all. So it has
to move on: without bounds it could look at one letter at every step.
"""

import torch

from fenchel.seq2seq import Pair, Recurrent, Training, Vocabulary, beam_search, train

torch.manual_seed(0)
letters = Vocabulary("abcdefgh")
words = ["".join(letters.symbols[i] for i in torch.randint(8, (n,))) for n in torch.randint(3, 7, (400,)).tolist()]
pairs = [Pair(tuple(word), tuple(reversed(word))) for word in words]
model = Recurrent(letters, letters, embedding=16, hidden=32, layers=1, dropout=0.0, fertility=1.2)
train(model, pairs[:360], pairs[360:], training=Training(epochs=15, batch=20, rate=1e-2))

source = "badge"
(found,) = beam_search(model.eval(), [source])
written = "".join(letters.decode(found.best.tokens))
print(f"{source} → {written}, exact search: {found.exact}")
print(" " * 6 + "".join(f"{letter:>8}" for letter in source) + "     sum")
for letter, weights in zip([*written, "end"], model.attend(source, written), strict=True):
    print(
        f"{letter:<6}" + "".join(f"{w:8.3f}" if w else f"{'·':>8}" for w in [*weights.tolist(), weights.sum().item()])
    )
print("spent " + "".join(f"{spent:8.3f}" for spent in found.best.coverage.tolist()))

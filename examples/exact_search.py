"""A model that reverses short words, and a beam search that knows when it has seen every word the model can write."""

import itertools

import torch

from fenchel import Shannon, Tsallis
from fenchel.seq2seq import Pair, Recurrent, Training, Vocabulary, beam_search, train

letters = Vocabulary("abc")
words = ["".join(word) for length in (1, 2, 3) for word in itertools.product("abc", repeat=length)]
pairs = [Pair(tuple(word), tuple(reversed(word))) for word in words]

for name, omega in (("softmax", Shannon()), ("1.5-entmax", Tsallis(1.5))):
    torch.manual_seed(0)
    model = Recurrent(letters, letters, embedding=8, hidden=16, layers=1, dropout=0.0, attention=omega, output=omega)
    train(model, pairs, pairs, training=Training(epochs=12, batch=8, rate=1e-2))
    beams = beam_search(model, words)
    right = sum(model.target.decode(beam.best.tokens) == pair.target for beam, pair in zip(beams, pairs, strict=True))
    exact = sum(beam.exact for beam in beams)
    print(f"{name}: {right} of {len(words)} words reversed, {exact} beams exact")
    shown = [("".join(letters.decode(each.tokens)), round(each.probability, 3)) for each in beams[20].hypotheses]
    print(f"  {words[20]}: {shown}")

import fenchel
from fenchel.seq2seq import Pair, Recurrent, Training, Vocabulary, beam_search, train

letters = Vocabulary("abcdef")
words = [Pair(tuple(word), tuple(word[::-1])) for word in ("abc", "fed", "bad", "cafe", "face", "bead")]
sizes = dict(embedding=16, hidden=32, layers=1, dropout=0.0)
model = Recurrent(letters, letters, **sizes, attention=fenchel.Gini(), output=fenchel.Tsallis(1.5))
train(model, words, words, training=Training(epochs=30, batch=2, rate=1e-2, patience=30))
(found,) = beam_search(model, ["cafe"])
print(found.exact, ["".join(letters.decode(each.tokens)) for each in found.hypotheses])

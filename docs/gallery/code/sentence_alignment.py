import torch, fenchel
from fenchel.structures import Matching

words, others = torch.randn(4, 16), torch.randn(4, 16)
scores = words @ others.T / 4
print(fenchel.softmax(scores))  # every word with every other
print(fenchel.SparseMAP(Matching()).argmax(scores))  # a few whole matchings

import torch, fenchel
from fenchel.hopfield import HopfieldPooling
from fenchel.structures import SequentialSubsets, Share

pool = HopfieldPooling(64, omega=fenchel.SparseMAP(SequentialSubsets(Share(0.2), transition=0.5)))
words = torch.randn(2, 30, 64)
padding = torch.arange(30) >= torch.tensor([[30], [12]])
weights = pool.get_association_matrix(words, padding).flatten(0, 2)
print(weights.sum(-1))  # a fifth of 30 and of 12 words

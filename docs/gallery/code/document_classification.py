import torch
from fenchel.continuous import ContinuousAttention, GaussianBasis, PooledEncoder

words = torch.randn(8, 280, 64)
basis = GaussianBasis.line(64, widths=(0.1, 0.5))
attention = ContinuousAttention(basis, alpha=2.0, encoder=PooledEncoder(64))  # an interval of the text
print(attention(words, words.amax(1)).shape)

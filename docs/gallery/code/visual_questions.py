import torch
from fenchel.continuous import ContinuousAttention, GaussianBasis, PooledEncoder

pixels = torch.randn(8, 14 * 14, 64)
attention = ContinuousAttention(GaussianBasis.grid(10), encoder=PooledEncoder(64, dim=2))  # an ellipse
print(attention(pixels, pixels.mean(1), shape=(14, 14)).shape)

import torch
from fenchel.continuous import GaussianBasis, LongMemory
from fenchel.nn import LongMemoryAttention

memory = LongMemory(GaussianBasis.line(32, widths=(0.03,)), 16, num_heads=4, contraction=0.75)
layer, state = LongMemoryAttention(memory, recent=64), None
for chunk in torch.randn(2, 1000, 16).split(128, dim=1):  # a stream, chunk by chunk
    found = layer(chunk, state)
    state = found.state.detach()
print(found.output.shape, state.memory.lengths + state.recent.shape[1])

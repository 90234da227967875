import torch
from fenchel.mixed import MixedDirichlet

message = MixedDirichlet(torch.zeros(8), torch.ones(1))
print(message.sample())  # a sparse mixture of symbols
print(f"entropy {message.entropy().item():.2f} nats")

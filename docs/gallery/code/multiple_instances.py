import torch, fenchel
from fenchel.hopfield import HopfieldPooling

pool = HopfieldPooling(32, omega=fenchel.KSubsets(2))  # adds up two instances of each bag
bags = torch.randn(4, 12, 32)
absent = torch.arange(12) >= torch.tensor([[12], [3], [7], [1]])
print(pool(bags, stored_pattern_padding_mask=absent).shape)
print(pool.get_association_matrix(bags, absent)[1, 0, 0, :4])  # a bag of three instances

"""Read the attention weights of a fast attention: those that are not zero, as one sparse matrix (CSR).

No matrix of queries × keys is made: memory grows with the number of weights above zero. It prints:

    6222 weights of 2000000, (2000, 1000), torch.sparse_csr
    head 1, query 500: 4 keys, which sum to 1.0000
      key 433  weight 0.696
      key 470  weight 0.157
      key 112  weight 0.102
    the output is their mean of the values: True
"""

import torch

import fenchel

torch.manual_seed(0)
heads, length, width = 2, 1000, 32
query, key, value = 2 * torch.randn(3, 1, heads, length, width)
output, weights = fenchel.attention(query, key, value, fenchel.Tsallis(1.5), is_causal=True, return_weights="sparse")
print(f"{weights.values().numel()} weights of {heads * length * length}, {tuple(weights.shape)}, {weights.layout}")

# Row h · length + i holds the keys of query i in head h.
starts, keys, values = weights.crow_indices(), weights.col_indices(), weights.values()
head, place = 1, 500
row = slice(starts[head * length + place], starts[head * length + place + 1])
best = values[row].topk(3)
print(f"head {head}, query {place}: {len(keys[row])} keys, which sum to {values[row].sum():.4f}")
for weight, k in zip(best.values.tolist(), keys[row][best.indices].tolist(), strict=True):
    print(f"  key {k:3d}  weight {weight:.3f}")
mixed = values[row] @ value[0, head, keys[row]]
print("the output is their mean of the values:", torch.allclose(mixed, output[0, head, place], atol=1e-5))

"""Sparse attention in an existing Hugging Face model: one argument, and the same weights.

A tiny Llama with random weights stands for a trained one. It prints:

    eager      loss 5.914  100% of the keys have weight
    temperate  loss 5.945  55% of the keys have weight
    entmax15   loss 5.613  34% of the keys have weight
    sparsemax  loss 5.450  23% of the keys have weight
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fenchel
from fenchel.integrations.transformers import register

register()  # attn_implementation="entmax15" and "sparsemax"
register("temperate", 2.0 * fenchel.Tsallis(1.5))  # and any regularizer under a name of yours
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=50, initializer_range=0.3, **sizes)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(50, (1, 12))
with torch.no_grad():
    for name in ("eager", "temperate", "entmax15", "sparsemax"):
        model.set_attn_implementation(name)
        output = model(tokens, output_attentions=True, labels=tokens)
        weights = torch.stack(output.attentions)  # (layers, 1, heads, queries, keys)
        share = (weights > 0).float().sum() / weights.numel() * 2 * 12 / 13  # of the keys that a query may see
        print(f"{name:<10} loss {output.loss:.3f}  {share:.0%} of the keys have weight")

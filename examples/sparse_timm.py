"""Sparse attention in a Vision Transformer of timm: the same weights, another choice of patches.

Needs ``pip install timm``. A small model with random weights stands for a trained one. It prints:

    softmax     65.0 of 65 patches per query, logits changed by 0.00
    1.5-entmax   8.6 of 65 patches per query, logits changed by 0.21
    sparsemax    2.5 of 65 patches per query, logits changed by 0.26
"""

import timm
import torch
from timm.layers import Attention
from torch import Tensor

import fenchel


class SparseAttention(Attention):
    """timm's attention with argmax_Ω in place of softmax; the state_dict is the same."""

    omega: fenchel.Regularizer

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key = self.q_norm(query), self.k_norm(key)
        dropout_p = self.attn_drop.p if self.training else 0.0
        out, self.weights = fenchel.attention(
            query, key, value, self.omega, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p,
            return_weights=True,  # only to show them; without it no matrix is made
        )  # fmt: skip
        return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).flatten(2))))


torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10).eval()
with torch.no_grad():
    for block in model.blocks:
        block.attn.qkv.weight.mul_(8)  # as sharp as a trained model
images = torch.rand(2, 3, 32, 32)
before = model(images)
for name, omega in (
    ("softmax", fenchel.Shannon()),
    ("1.5-entmax", fenchel.Tsallis(1.5)),
    ("sparsemax", fenchel.Gini()),
):
    for block in model.blocks:
        block.attn.__class__ = SparseAttention  # the module keeps its weights and gets the new forward
        block.attn.omega = omega
    change = (model(images) - before).abs().max()
    weights = torch.stack([block.attn.weights for block in model.blocks])  # (blocks, batch, heads, patches, patches)
    used = (weights > 0).sum(-1).float().mean()
    print(f"{name:<11} {used:4.1f} of {weights.shape[-1]} patches per query, logits changed by {change:.2f}")

import torch, fenchel

crf = fenchel.nn.CRF(3, omega=fenchel.Gini(), constraints="BIO", labels=["O", "B-PER", "I-PER"])
emissions = torch.randn(1, 6, 3)
best = crf(emissions).top(4)
print(best.paths[0].tolist())
print(best.probs[0])  # sparse: some of the four have probability zero

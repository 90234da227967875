import torch, fenchel

scores = torch.randn(1, 40)
for name, weights in {"softmax": fenchel.softmax(scores), "1.5-entmax": fenchel.entmax(scores, 1.5)}.items():
    print(f"{name}: {int(fenchel.support_size(weights))} of 40 words are shown to the listener")

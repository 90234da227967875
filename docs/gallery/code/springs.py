import torch, fenchel


def springs(p):  # half the squared norm, plus a spring between neighbours
    return 0.5 * p.square().sum(-1) + 0.5 * p.diff().square().sum(-1)


scores = torch.tensor([0.1, 0.9, 0.3, -0.4, 0.8, -0.6])
print(fenchel.sparsemax(scores))
print(fenchel.Custom(springs).argmax(scores))

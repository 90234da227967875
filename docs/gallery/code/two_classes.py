import torch, fenchel

scores = torch.stack([torch.linspace(-1, 2, 4), torch.zeros(4)], -1)  # the lead of class 0: -1, 0, 1, 2
for omega in (fenchel.Shannon(), fenchel.Tsallis(1.5), fenchel.Gini()):
    loss = omega.loss(scores, torch.zeros(4, dtype=torch.long))
    print(f"{omega}: margin {omega.margin:g}, loss", [round(x, 3) for x in loss.tolist()])

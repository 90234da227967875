import torch, fenchel

scores = torch.tensor([1.0, 0.6, 0.2])
for temperature in (0.2, 0.5, 1.0, 2.0):
    rows = {f"{omega}": (temperature * omega).argmax(scores).tolist() for omega in (fenchel.Shannon(), fenchel.Gini())}
    print(temperature, {name: [round(p, 2) for p in row] for name, row in rows.items()})

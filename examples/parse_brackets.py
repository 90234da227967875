"""Learn to bracket formulas: that * binds before + is learned from bracketed examples.

A formula such as ``a + b * c`` is a binary tree over its tokens, ``(a (+ (b (* c))))``. A small network scores each
span by its first and last token and the tokens before and after it; the loss is that of the tree under a sparse parser.
The parser then brackets formulas that are longer than those it was trained on.

    python examples/parse_brackets.py
"""

import random

import torch
from torch import nn

import fenchel
from fenchel.dp import Constituency, from_brackets, to_brackets

TOKENS = "abcd+*"
START, END = len(TOKENS), len(TOKENS) + 1


def formula(terms: int, generator: random.Random) -> str:
    """A random formula, bracketed: * before +, and operators from the left."""
    tokens = [generator.choice("abcd")]
    for _ in range(terms - 1):
        tokens += [generator.choice("+*"), generator.choice("abcd")]
    summands = [tokens[0]]
    for operator, name in zip(tokens[1::2], tokens[2::2], strict=True):
        if operator == "*":
            summands[-1] = f"({summands[-1]} (* {name}))"
        else:
            summands.append(name)
    tree = summands[0]
    for each in summands[1:]:
        tree = f"({tree} (+ {each}))"
    return tree


class Parser(nn.Module):
    """Scores of all spans from their first and last tokens and the two outside."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(TOKENS) + 2, width)
        self.first, self.last = nn.Linear(2 * width, 64), nn.Linear(2 * width, 64)
        self.score = nn.Linear(64, 1)

    def forward(self, sentences: list[list[str]]) -> Constituency:
        lengths = torch.tensor([len(s) for s in sentences])
        padded = torch.full((len(sentences), int(lengths.max()) + 2), END)
        for row, words in zip(padded, sentences, strict=True):
            row[: len(words) + 1] = torch.tensor([START, *(TOKENS.index(w) for w in words)])
        x = self.tokens(padded)
        left, right = torch.cat([x[:, :-2], x[:, 1:-1]], -1), torch.cat([x[:, 1:-1], x[:, 2:]], -1)
        hidden = torch.relu(self.first(left).unsqueeze(2) + self.last(right).unsqueeze(1))
        return Constituency(self.score(hidden).squeeze(-1), lengths, fenchel.Gini())


def main() -> None:
    torch.manual_seed(0)
    generator = random.Random(0)
    parser = Parser()
    optimizer = torch.optim.Adam(parser.parameters(), lr=1e-2)
    for step in range(201):
        gold = from_brackets([formula(generator.randint(2, 5), generator) for _ in range(32)])
        loss = parser(gold.words).loss(gold.trees).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    gold = from_brackets([formula(8, generator) for _ in range(200)])
    with torch.no_grad():
        parsed = parser(gold.words)
        right = (parsed.map() == gold.trees).flatten(1).all(-1)
        print(f"longer formulas bracketed as they should be: {right.float().mean().item():.0%}")
        print(to_brackets(parsed.map()[0], gold.words[0]))
        print(f"trees with probability, on average: {(parsed.top(20).probs > 0).sum(-1).float().mean().item():.1f}")


if __name__ == "__main__":
    main()

"""Binary trees as bracketed strings, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_kind, check_mask


@dataclass(frozen=True)
class Bracketing:
    """Trees that were read from strings.

    Args:
        trees: boolean, (B, N, N), or with labels (B, N, N, L): True at the spans of each tree, as
            :class:`fenchel.dp.Constituency` has them. N is the largest number of words.
        lengths: (B,), the numbers of words.
        words: the words of each tree.

    Example:
        >>> from fenchel.dp import from_brackets
        >>> found = from_brackets(["((the cat) sleeps)", "(cats sleep)"])
        >>> found.trees.shape, found.lengths, found.words[1]
        (torch.Size([2, 3, 3]), tensor([3, 2]), ['cats', 'sleep'])
    """

    trees: Tensor
    lengths: Tensor
    words: list[list[str]]


def to_brackets(tree: Tensor, words: Sequence[Any] | None = None, labels: Sequence[str] | None = None) -> Any:
    """Write binary trees as bracketed strings, such as ``(S (NP the cat) sleeps)``.

    Args:
        tree: boolean, (…, N, N) or, if ``labels`` are given, (…, N, N, L): True at the spans of a tree, [first word,
            last word], both included. One without any span becomes an empty string.
        words: the words; for batches a list of such lists, nested as the leading dimensions. Their positions, 0, 1, …,
            if None.
        labels: the names of the L labels. A span with label "" is written without one; words are in brackets of their
            own if they have one.

    Returns:
        A string, or nested lists of strings, one for each tree.

    Example:
        >>> import torch
        >>> from fenchel.dp import to_brackets
        >>> tree = torch.eye(3, dtype=torch.bool)
        >>> tree[0, 1] = tree[0, 2] = True
        >>> to_brackets(tree), to_brackets(tree, ["the", "cat", "sleeps"])
        ('((0 1) 2)', '((the cat) sleeps)')
    """
    check_mask(tree, "tree", "in the tree")
    spans = tree.unsqueeze(-1) if labels is None else tree
    names = [""] if labels is None else list(labels)
    if spans.dim() < 3 or spans.shape[-3] != spans.shape[-2] or spans.shape[-1] != len(names):
        wanted = "(…, N, N)" if labels is None else f"(…, N, N, {len(names)}), one for each of labels"
        raise ValueError(f"tree must have shape {wanted}, got {tuple(tree.shape)}")
    if spans.dim() > 3:
        if words is not None and len(words) != len(spans):
            raise ValueError(f"words must be a list for each of {len(spans)} trees, got {len(words)}")
        each = [None] * len(spans) if words is None else words
        return [to_brackets(t, w, labels) for t, w in zip(tree, each, strict=True)]
    found: dict[tuple[int, int], int] = {}
    for i, j, label in spans.nonzero().tolist():
        if i > j or (i, j) in found:
            raise ValueError(f"tree must have spans from left to right with one label each, got {(i, j)}")
        found[i, j] = label
    length = 1 + max((j for _, j in found), default=-1)
    given = [str(i) for i in range(length)] if words is None else [str(w) for w in words]
    if len(given) < length:
        raise ValueError(f"words must be {length}, as many as the tree has, got {len(given)}")
    for word in given[:length]:
        if not word or word in names or re.search(r"[\s()]", word):
            raise ValueError(f"words must have no space and no bracket, and not be the name of a label; got {word!r}")
    return _write(found, length, given, names) if length else ""


def _write(found: dict[tuple[int, int], int], length: int, words: list[str], names: list[str]) -> str:
    text: list[str] = []
    left: list[str | tuple[int, int]] = [(0, length - 1)]  # a stack, as trees may be deeper than Python's recursion
    while left:
        part = left.pop()
        if isinstance(part, str):
            text.append(part)
            continue
        if part not in found:
            raise ValueError(f"tree must have the span {part}: the whole sentence, its words, two parts of each span")
        (i, j), label = part, names[found[part]]
        if i == j:
            text.append(f"({label} {words[i]})" if label else words[i])
            continue
        splits = [k for k in range(i, j) if (i, k) in found and (k + 1, j) in found]
        if len(splits) != 1:
            raise ValueError(f"tree must split span {(i, j)} into two parts that it has, in one way; got {len(splits)}")
        left += [")", (splits[0] + 1, j), " ", (i, splits[0]), f"({label} " if label else "("]
    return "".join(text)


def from_brackets(texts: str | Sequence[str], labels: Sequence[str] | None = None) -> Bracketing:
    """Read binary trees from bracketed strings, which :func:`to_brackets` writes.

    Args:
        texts: one string, which is then a batch of one, or several.
        labels: the names that follow opening brackets, in the order of the last dimension of the result; "" among them
            is for brackets and words without a name. Without labels, brackets hold words and brackets alone.

    Returns:
        ``trees``, ``lengths`` and ``words``.

    Example:
        >>> from fenchel.dp import from_brackets, to_brackets
        >>> found = from_brackets("(S (NP the cat) sleeps)", labels=["", "NP", "S"])
        >>> found.trees.shape, found.words, to_brackets(found.trees[0], found.words[0], ["", "NP", "S"])
        (torch.Size([1, 3, 3, 3]), [['the', 'cat', 'sleeps']], '(S (NP the cat) sleeps)')
    """
    if isinstance(texts, str):
        texts = [texts]
    check_kind(texts, "texts", Sequence, what="a string or a sequence of strings")
    if labels is not None and (isinstance(labels, str) or not isinstance(labels, Sequence)):
        raise TypeError(f"labels must be a sequence of strings, got {type(labels).__name__}")
    if labels is not None and len(set(labels)) < len(labels):
        raise ValueError(f"labels must differ from each other, got {list(labels)}")
    names = None if labels is None else {name: i for i, name in enumerate(labels)}
    read = [_read(text, names) for text in texts]
    longest = max((len(words) for words, _ in read), default=0)
    trees = torch.zeros((len(texts), longest, longest, 1 if labels is None else len(labels)), dtype=torch.bool)
    for tree, (_, spans) in zip(trees, read, strict=True):
        for span in spans:
            tree[span] = True
    lengths = torch.tensor([len(words) for words, _ in read], dtype=torch.long)
    return Bracketing(trees if labels is not None else trees.squeeze(-1), lengths, [words for words, _ in read])


def _read(text: str, names: dict[str, int] | None) -> tuple[list[str], list[tuple[int, int, int]]]:
    """The words of a string and the spans of its tree: first word, last word, label."""
    if not isinstance(text, str):
        raise TypeError(f"texts must be strings, got {type(text).__name__}")
    tokens = re.findall(r"[()]|[^\s()]+", text)
    words: list[str] = []
    spans: list[tuple[int, int, str]] = []
    opened: list[tuple[int, str]] = []  # brackets that are open: their first word and their name
    parts = [0]  # of each of them, below them those of the text

    def fail(problem: str) -> ValueError:
        return ValueError(f"texts must hold one binary tree each, but {problem} in {text!r}")

    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        if parts == [1]:
            raise fail("something follows the tree")
        if token == "(":
            # A name follows the bracket if something else follows the name.
            name = ""
            if names is not None and at < len(tokens) and tokens[at] in names:
                name, at = tokens[at], at + 1
            opened.append((len(words), name))
            parts.append(0)
            continue
        if token != ")":
            words.append(token)
            spans.append((len(words) - 1, len(words) - 1, ""))
        elif not opened:
            raise fail("a word or an opening bracket is missing")
        else:
            (first, name), count = opened.pop(), parts.pop()
            if count == 1 and tokens[at - 2] != ")" and name:  # a word with a name of its own
                spans[-1] = (first, first, name)
            elif count != 2:
                raise fail(f"a bracket has {count} parts instead of two (words may have brackets with a label)")
            else:
                spans.append((first, len(words) - 1, name))
        parts[-1] += 1
    if opened:
        raise fail("a closing bracket is missing")
    if parts != [1]:
        raise fail("a word or an opening bracket is missing")
    if names is None:
        return words, [(first, last, 0) for first, last, _ in spans]
    for _, _, name in spans:
        if name not in names:
            raise fail(f"{name!r} is not one of labels {list(names)}")
    return words, [(first, last, names[name]) for first, last, name in spans]

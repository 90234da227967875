"""Trees as strings: what is written is read again, and what is not a binary tree is refused."""

import itertools

import pytest
import torch

from fenchel.dp import Constituency, from_brackets, to_brackets

LABELS = ["", "NP", "VP", "S"]


def all_trees(words: list[str]) -> list[str]:
    """All bracketings, by concatenation."""
    if len(words) == 1:
        return words
    cuts = range(1, len(words))
    return [f"({a} {b})" for k in cuts for a, b in itertools.product(all_trees(words[:k]), all_trees(words[k:]))]


def test_what_is_read_is_written_again() -> None:
    texts = all_trees(list("abcde"))
    assert len(texts) == 14
    found = from_brackets(texts)
    assert found.words == [list("abcde")] * 14
    assert to_brackets(found.trees, found.words) == texts
    assert len({tuple(t.flatten().tolist()) for t in found.trees}) == 14
    assert (Constituency(torch.zeros(14, 5, 5)).loss(found.trees) > 0).all()  # all are trees


def test_trees_of_several_lengths_and_labels() -> None:
    texts = ["(S (NP the cat) (VP sleeps))", "(VP go)", "word", "(S (NP we) (VP see (NP the cat)))", "((NP it) is)"]
    found = from_brackets(texts, LABELS)
    assert found.trees.shape == (5, 4, 4, 4)
    assert found.lengths.tolist() == [3, 1, 1, 4, 2]
    assert found.trees[0].nonzero().tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 3], [1, 1, 0], [2, 2, 2]]
    assert to_brackets(found.trees, found.words, LABELS) == texts
    assert Constituency(torch.zeros(5, 4, 4, 4), found.lengths).log_prob(found.trees).isfinite().all()


def test_a_tree_in_which_everything_has_a_label_needs_no_empty_one() -> None:
    text, labels = "(S (DT the) (VP (NN cat) (VB sleeps)))", ["S", "DT", "VP", "NN", "VB"]
    found = from_brackets(text, labels)
    spans = {(0, 2, 0), (0, 0, 1), (1, 2, 2), (1, 1, 3), (2, 2, 4)}
    assert {tuple(span) for span in found.trees[0].nonzero().tolist()} == spans
    assert to_brackets(found.trees[0], found.words[0], labels) == text


def test_trees_may_be_deeper_than_the_stack_of_the_interpreter() -> None:
    words = 1500
    right = "".join(f"({i} " for i in range(words - 1)) + str(words - 1) + ")" * (words - 1)
    found = from_brackets(right)
    assert found.trees[0, :, -1].all()
    assert int(found.trees.sum()) == 2 * words - 1
    assert to_brackets(found.trees[0]) == right


def test_positions_batches_and_blank_trees() -> None:
    trees = from_brackets(["((a b) c)", "(a (b c))"]).trees
    assert to_brackets(trees) == ["((0 1) 2)", "(0 (1 2))"]
    assert to_brackets(trees.unsqueeze(1)) == [["((0 1) 2)"], ["(0 (1 2))"]]
    assert to_brackets(torch.zeros(3, 3, dtype=torch.bool)) == ""
    assert from_brackets([]).trees.shape == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a b c)", "a bracket has 3 parts"),
        ("((a b))", "a bracket has 1 parts"),
        ("(a)", "a bracket has 1 parts"),
        ("(a b", "a closing bracket is missing"),
        ("(a b) c", "something follows the tree"),
        ("", "a word or an opening bracket is missing"),
        ("()", "a bracket has 0 parts"),
        (")", "a word or an opening bracket is missing"),
    ],
)
def test_what_is_not_one_binary_tree_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_brackets(text)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: from_brackets("(S a b)", ["S"]), ValueError, r"'' is not one of labels \['S'\]"),
        (lambda: from_brackets([3]), TypeError, "texts must be strings, got int"),
        (lambda: to_brackets(torch.eye(3).bool()), ValueError, r"tree must have the span \(0, 2\)"),
        (lambda: to_brackets(torch.eye(3)), TypeError, "tree must be a boolean"),
        (lambda: to_brackets(torch.ones(3, 3).bool()), ValueError, "from left to right"),
        (lambda: to_brackets(torch.ones(3, 3).triu().bool()), ValueError, "in one way; got 2"),
        (lambda: to_brackets(torch.ones(3, 3, 2).bool(), labels=["A"]), ValueError, "tree must have shape"),
        (lambda: to_brackets(torch.ones(1, 1).bool(), ["a b"]), ValueError, "no space and no bracket.*'a b'"),
        (lambda: to_brackets(torch.ones(1, 1).bool(), []), ValueError, "words must be 1"),
        (lambda: to_brackets(torch.ones(2, 1, 1).bool(), [["a"]]), ValueError, "a list for each of 2 trees, got 1"),
    ],
)
def test_bad_input_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()

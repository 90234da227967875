"""Loops over sequential subsets: the best k positions when neighbours matter."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import helper, kernel


@helper
def best_sequence(scores, between, k, off, on, chosen):  # type: ignore[no-untyped-def]
    """Exactly k positions of a row, and a transition score wherever two neighbours are chosen.

    Dynamic programming over positions: off[t, j + 1] and on[t, j + 1] are the best scores with j of the first t + 1
    chosen, t left out or in; the first column is −inf, so that "one less than nothing" can be read. ``chosen`` is
    filled up with −1. Returns the sum of the transitions, −inf if nothing is allowed.
    """
    length, width = off.shape
    off[0] = -np.inf
    on[0] = -np.inf
    off[0, 1] = 0.0
    if k:
        on[0, 2] = scores[0]
    for t in range(1, length):
        score, link = scores[t], between[t - 1]
        rest, held, out, into = off[t - 1], on[t - 1], off[t], on[t]
        out[0] = -np.inf
        into[0] = -np.inf
        for j in range(1, width):
            together = held[j - 1] + link
            apart = rest[j - 1]
            into[j] = (together if together > apart else apart) + score
            out[j] = held[j] if held[j] > rest[j] else rest[j]
    j = k + 1
    inside = on[length - 1, j] > off[length - 1, j]
    bonus = 0.0
    chosen[:] = -1
    if not (on[length - 1, j] if inside else off[length - 1, j]) > -np.inf:
        return -np.inf
    # The same comparisons again, along the best path alone: cheaper than to keep their outcomes.
    for t in range(length - 1, -1, -1):
        if inside:
            j -= 1
            chosen[j - 1] = t
            inside = t > 0 and on[t - 1, j] + between[t - 1] > off[t - 1, j]
            if inside:
                bonus += between[t - 1]
        else:
            inside = t > 0 and on[t - 1, j] > off[t - 1, j]
    return bonus


@kernel
def best_sequences(first, last, live, scores, transition, sizes, chosen, bonus):  # type: ignore[no-untyped-def]
    """``best_sequence`` of sizes[b] positions for every row b = live[i]; of ``transition`` there may be one for all."""
    length, most = scores.shape[1], chosen.shape[1]
    off, on = np.empty((length, most + 2)), np.empty((length, most + 2))
    for i in range(first, last):
        b = live[i]
        between = transition[b if transition.shape[0] > 1 else 0]
        bonus[i] = best_sequence(scores[b], between, sizes[b], off, on, chosen[i])

"""Loops over sequential subsets: the best k positions when neighbours matter."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.compiler import kernel


@kernel
def best_sequences(first, last, live, scores, transition, sizes, chosen, bonus):  # type: ignore[no-untyped-def]
    """Exactly ``sizes[b]`` positions of row b = live[i], and a transition score wherever two neighbours are chosen.

    Dynamic programming over positions: off[j] and on[j] are the best scores with j chosen so far, the last position
    left out or in. chosen (n, k) is filled up with −1; bonus is the sum of the transitions, −inf if nothing is allowed.
    """
    length = scores.shape[1]
    most = chosen.shape[1]
    off, on = np.empty(most + 1), np.empty(most + 1)
    skipped = np.empty((length, most + 1), np.uint8)  # whether, arriving at `off`, the position before was chosen
    joined = np.empty((length, most + 1), np.uint8)
    for i in range(first, last):
        b = live[i]
        k = sizes[b]
        between = transition[b if transition.shape[0] > 1 else 0]
        off[:] = -np.inf
        on[:] = -np.inf
        off[0] = 0.0
        if k:
            on[1] = scores[b, 0]
        for t in range(1, length):
            score, link = scores[b, t], between[t - 1]
            skip, join = skipped[t], joined[t]
            for j in range(k, 0, -1):
                apart, together = off[j - 1], on[j - 1] + link
                rest, held = off[j], on[j]
                skip[j] = held > rest
                off[j] = held if held > rest else rest
                join[j] = together > apart
                on[j] = (together if together > apart else apart) + score
            skip[0] = 0
        into = on[k] > off[k]
        bonus[i] = 0.0
        chosen[i] = -1
        if not (on[k] if into else off[k]) > -np.inf:
            bonus[i] = -np.inf
            continue
        j = k
        for t in range(length - 1, -1, -1):
            if into:
                j -= 1
                chosen[i, j] = t
                into = t > 0 and joined[t, j + 1] == 1
                if into:
                    bonus[i] += between[t - 1]
            else:
                into = t > 0 and skipped[t, j] == 1

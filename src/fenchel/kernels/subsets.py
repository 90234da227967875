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
    # One column more than there are sizes, so that "one less than nothing" can be read, and is −inf.
    off, on = np.empty((length, most + 2)), np.empty((length, most + 2))
    for i in range(first, last):
        b = live[i]
        k = sizes[b]
        between = transition[b if transition.shape[0] > 1 else 0]
        off[0] = -np.inf
        on[0] = -np.inf
        off[0, 1] = 0.0
        if k:
            on[0, 2] = scores[b, 0]
        for t in range(1, length):
            score, link = scores[b, t], between[t - 1]
            rest, held, out, into = off[t - 1], on[t - 1], off[t], on[t]
            out[0] = -np.inf
            into[0] = -np.inf
            for j in range(1, most + 2):
                together = held[j - 1] + link
                apart = rest[j - 1]
                into[j] = (together if together > apart else apart) + score
                out[j] = held[j] if held[j] > rest[j] else rest[j]
        j = k + 1
        inside = on[length - 1, j] > off[length - 1, j]
        bonus[i] = 0.0
        chosen[i] = -1
        if not (on[length - 1, j] if inside else off[length - 1, j]) > -np.inf:
            bonus[i] = -np.inf
            continue
        # The same comparisons again, along the best path alone: cheaper than to keep their outcomes.
        for t in range(length - 1, -1, -1):
            if inside:
                j -= 1
                chosen[i, j - 1] = t
                inside = t > 0 and on[t - 1, j] + between[t - 1] > off[t - 1, j]
                if inside:
                    bonus[i] += between[t - 1]
            else:
                inside = t > 0 and on[t - 1, j] > off[t - 1, j]

"""The best sequence of states of chains."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel


@kernel
def best_paths(first, last, unary, transition, lengths, states):  # type: ignore[no-untyped-def]
    """Find the best states (B, T) of chains by Viterbi's algorithm.

    Scores: unary (B, T, S), transition (1 or B, 1 or T−1, S, S). They are summed in double precision, because
    in single precision a step of 1 is lost in a sum of 10⁸. Among equals the lowest state wins.
    """
    _, steps, size = unary.shape
    best, reached = np.empty(size), np.empty(size)
    back = np.empty((steps, size), np.int32)
    for b in range(first, last):
        length = lengths[b]
        for t in range(length, steps):
            states[b, t] = -1
        if length == 0:
            continue
        for s in range(size):
            best[s] = unary[b, 0, s]
        scores = transition[b if transition.shape[0] > 1 else 0]
        for t in range(1, length):
            step = scores[t - 1 if scores.shape[0] > 1 else 0]
            before = back[t]
            for s in range(size):
                reached[s] = best[0] + step[0, s]
                before[s] = 0
            for p in range(1, size):
                for s in range(size):
                    candidate = best[p] + step[p, s]
                    better = candidate > reached[s]
                    reached[s] = candidate if better else reached[s]
                    before[s] = p if better else before[s]
            for s in range(size):
                best[s] = reached[s] + unary[b, t, s]
        state = 0
        for s in range(1, size):
            if best[s] > best[state]:
                state = s
        for t in range(length - 1, -1, -1):
            states[b, t] = state
            if t:
                state = back[t, state]

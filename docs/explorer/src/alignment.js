/** Monotonic alignments of two sequences: smoothed best score and the probability of every pair. */

import { gini, shannon } from "./maps.js";

/** @typedef {import("./maps.js").Omega} Omega */
/** @typedef {{value: number, marginals: number[][]}} Alignment */

export const SMOOTHERS = { gini: gini(), shannon: shannon() };

/** Align two sequences by their scores.
 *
 * A path goes from the first cell to the last; each step moves on by one row, one column, or both. The best score of a
 * cell is its own plus the smoothed maximum over the cells that a path may come from; the probability of a cell is what
 * flows back to it from the last one.
 * @param {number[][]} scores one row per item of the first sequence
 * @param {Omega} omega smooths every maximum
 * @param {number} gamma temperature: how much it smooths
 * @returns {Alignment}
 */
export function align(scores, omega, gamma) {
  const [rows, columns] = [scores.length, scores[0].length];
  const best = scores.map((row) => row.slice());
  /** @type {Float64Array[][]} */
  const steps = scores.map(() => []);
  const candidates = new Float64Array(3);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const from = sources(i, j);
      const p = new Float64Array(from.length);
      if (from.length) {
        const before = candidates.subarray(0, from.length);
        from.forEach(([a, b], k) => (before[k] = best[a][b] / gamma));
        omega.argmax(before, p);
        let total = -omega.value(p);
        for (let k = 0; k < from.length; k++) total += p[k] * before[k];
        best[i][j] += gamma * total;
      }
      steps[i].push(p);
    }
  }
  const marginals = scores.map((row) => row.map(() => 0));
  marginals[rows - 1][columns - 1] = 1;
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      sources(i, j).forEach(([a, b], k) => (marginals[a][b] += steps[i][j][k] * marginals[i][j]));
    }
  }
  return { value: best[rows - 1][columns - 1], marginals };
}

/** Cells that a path may come from: diagonally, from above, from the left.
 * @param {number} i @param {number} j
 * @returns {[number, number][]}
 */
function sources(i, j) {
  /** @type {[number, number][]} */
  const all = [
    [i - 1, j - 1],
    [i - 1, j],
    [i, j - 1],
  ];
  return all.filter(([a, b]) => a >= 0 && b >= 0);
}

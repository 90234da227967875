/** Associative memories in the plane: energy, updates, where a query ends, and from how far a memory is exact. */

import { choose } from "./maps.js";

/** @typedef {[number, number]} Point */
/** @typedef {import("./maps.js").Omega} Omega */

/**
 * @typedef {object} Retrieval
 * @property {Point[]} path the query and every state after it
 * @property {Float64Array} weights of the memories in the last state
 * @property {boolean} converged
 * @property {boolean} whole whether each memory is either in the last state with weight 1, or not at all
 */

/** How close to a memory the last state counts as that memory, if Ω has no zeros. */
export const NEAR = 0.01;

export class Memory {
  /**
   * @param {Point[]} patterns
   * @param {Omega} omega
   * @param {number} beta
   */
  constructor(patterns, omega, beta) {
    this.patterns = patterns;
    this.omega = omega;
    this.beta = beta;
    this.scores = new Float64Array(patterns.length);
    this.weights = new Float64Array(patterns.length);
    this.constant = 0;
    if (omega.zeroAtVertices && omega.mass === 1) {
      const longest = Math.max(...patterns.map(([x, y]) => x * x + y * y));
      this.constant = choose(omega, new Float64Array(patterns.length)).max / beta + longest / 2;
    }
  }

  /** The weights of all memories for a state; valid until the next call.
   * @param {number} x @param {number} y
   */
  weigh(x, y) {
    const { patterns, beta, scores } = this;
    for (let i = 0; i < patterns.length; i++) scores[i] = beta * (patterns[i][0] * x + patterns[i][1] * y);
    return this.omega.argmax(scores, this.weights);
  }

  /** One update of a state: the memories, weighted by argmax_Ω.
   * @param {number} x @param {number} y
   * @returns {Point}
   */
  step(x, y) {
    const weights = this.weigh(x, y);
    let [nextX, nextY] = [0, 0];
    for (let i = 0; i < weights.length; i++) {
      nextX += weights[i] * this.patterns[i][0];
      nextY += weights[i] * this.patterns[i][1];
    }
    return [nextX, nextY];
  }

  /** ½‖q‖² − (Ω*(βXq) − Ω*(0))/β + ½M²; without the two constants for an Ω that is not zero at single items.
   * @param {number} x @param {number} y
   */
  energy(x, y) {
    const weights = this.weigh(x, y);
    let score = 0;
    for (let i = 0; i < weights.length; i++) score += weights[i] * this.scores[i];
    return (x * x + y * y) / 2 - (score - this.omega.value(weights)) / this.beta + this.constant;
  }

  /** Update a query until it stays where it is.
   * @param {Point} query
   * @param {number} [steps] at most so many updates
   * @returns {Retrieval}
   */
  retrieve(query, steps = 100) {
    /** @type {Point[]} */
    const path = [query];
    let converged = false;
    for (let k = 0; k < steps && !converged; k++) {
      const [x, y] = path[path.length - 1];
      const next = this.step(x, y);
      converged = Math.hypot(next[0] - x, next[1] - y) <= 1e-9 * Math.max(1, Math.hypot(next[0], next[1]));
      if (!converged) path.push(next);
    }
    const [x, y] = path[path.length - 1];
    const weights = Float64Array.from(this.weigh(x, y));
    return { path, weights, converged, whole: weights.every((w) => Math.abs(w - Math.round(w)) <= 1e-9) };
  }

  /** Where a query ends, as a bit set of memories; 0 for a mixture. Coarser than `retrieve`, for drawing.
   * @param {number} x @param {number} y
   */
  ends(x, y) {
    const { patterns } = this;
    for (let k = 0; k < 60; k++) {
      const [nextX, nextY] = this.step(x, y);
      const weights = this.weights;
      let bits = 0;
      let whole = true;
      for (let i = 0; i < weights.length; i++) {
        if (weights[i] === 1) bits |= 1 << i;
        else if (weights[i] !== 0) whole = false;
      }
      const moved = Math.abs(nextX - x) + Math.abs(nextY - y);
      [x, y] = [nextX, nextY];
      if (moved > 1e-4) continue;
      if (whole) return bits;
      if (this.omega.margin !== Infinity) return 0;
      const near = patterns.findIndex(([a, b]) => Math.hypot(x - a, y - b) <= NEAR);
      return near < 0 ? 0 : 1 << near;
    }
    return 0;
  }

  /** For every memory the radius of the largest ball from which one update returns it exactly; negative if none does.
   * @returns {number[] | null} null if Ω has no known margin, or chooses several at once
   */
  radii() {
    const { margin, mass } = this.omega;
    if (margin === null || mass !== 1) return null;
    return this.patterns.map((here, i) => {
      let least = Infinity;
      this.patterns.forEach((other, j) => {
        if (i === j) return;
        const apart = [here[0] - other[0], here[1] - other[1]];
        const lead = here[0] * apart[0] + here[1] * apart[1] - margin / this.beta;
        least = Math.min(least, lead / Math.hypot(apart[0], apart[1]));
      });
      return least;
    });
  }
}

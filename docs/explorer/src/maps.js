/**
 * The maps of the library for one row of scores: argmax_Ω, Ω, and what follows from them.
 *
 * Every Ω is an object that answers four questions; `choose`, `conjugate` and `loss` ask them and know nothing else.
 */

/** @typedef {ArrayLike<number>} Row */

/**
 * @typedef {object} Omega
 * @property {(scores: Row, out: Float64Array) => Float64Array} argmax writes argmax_p ⟨p, scores⟩ − Ω(p) into `out`
 * @property {(p: Row) => number} value Ω(p)
 * @property {number | null} margin the lead that gives one item everything; Infinity: no lead does; null: not known
 * @property {number} mass what a choice sums to
 * @property {boolean} zeroAtVertices whether Ω is zero where a single item has everything
 * @property {number} cap the largest weight that one item may have
 */

/** @typedef {{p: Float64Array, support: number, max: number}} Choice */

/** Ω(p) of `gamma` Ω at scores: the weights, how many are positive, and the maximum γΩ*(s/γ).
 * @param {Omega} omega
 * @param {Row} scores
 * @param {number} [gamma] temperature
 * @returns {Choice}
 */
export function choose(omega, scores, gamma = 1) {
  const n = scores.length;
  const scaled = new Float64Array(n);
  for (let i = 0; i < n; i++) scaled[i] = scores[i] / gamma;
  const p = omega.argmax(scaled, new Float64Array(n));
  let support = 0;
  for (let i = 0; i < n; i++) if (p[i] > 0) support++;
  return { p, support, max: dot(p, scores) - gamma * omega.value(p) };
}

/** The Fenchel-Young loss γΩ*(s/γ) + γΩ(y) − ⟨s, y⟩ of a target y in the domain of Ω. Its gradient is p − y.
 * @param {Omega} omega
 * @param {Row} scores
 * @param {Row} target
 * @param {number} [gamma]
 */
export function loss(omega, scores, target, gamma = 1) {
  const value = choose(omega, scores, gamma).max + gamma * omega.value(target) - dot(scores, target);
  return Math.max(value, 0); // rounding alone makes it negative
}

/** The target that shares the mass of Ω evenly among the marked items; null if Ω does not allow it.
 * @param {Omega} omega
 * @param {ArrayLike<boolean>} marked
 * @returns {Float64Array | null}
 */
export function evenTarget(omega, marked) {
  let count = 0;
  for (let i = 0; i < marked.length; i++) if (marked[i]) count++;
  const share = omega.mass / count;
  if (count === 0 || share > omega.cap + 1e-12) return null;
  return Float64Array.from(marked, (each) => (each ? share : 0));
}

/** @param {Row} a @param {Row} b */
export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** @param {Row} scores */
function largest(scores) {
  let top = -Infinity;
  for (let i = 0; i < scores.length; i++) if (scores[i] > top) top = scores[i];
  return top;
}

const SIMPLEX = { mass: 1, zeroAtVertices: true, cap: 1 };

/** Argmax: everything to the best; ties share.
 * @returns {Omega}
 */
export function hard() {
  return {
    ...SIMPLEX,
    margin: 0,
    value: () => 0,
    argmax(scores, out) {
      const top = largest(scores);
      let ties = 0;
      for (let i = 0; i < out.length; i++) if (scores[i] === top) ties++;
      for (let i = 0; i < out.length; i++) out[i] = scores[i] === top ? 1 / ties : 0;
      return out;
    },
  };
}

/** Softmax: Ω is the negative entropy Σ p log p.
 * @returns {Omega}
 */
export function shannon() {
  return { ...SIMPLEX, margin: Infinity, value: negativeEntropy, argmax: softmax };
}

/** @param {Row} p */
function negativeEntropy(p) {
  let sum = 0;
  for (let i = 0; i < p.length; i++) if (p[i] > 0) sum += p[i] * Math.log(p[i]);
  return sum;
}

/** @param {Row} scores @param {Float64Array} out */
function softmax(scores, out) {
  const top = largest(scores);
  let sum = 0;
  for (let i = 0; i < out.length; i++) sum += out[i] = Math.exp(scores[i] - top);
  for (let i = 0; i < out.length; i++) out[i] /= sum;
  return out;
}

/** Sparsemax: Ω is ½(‖p‖² − 1).
 * @returns {Omega}
 */
export function gini() {
  return { ...SIMPLEX, margin: 1, value: (p) => halfSquare(p, 1), argmax: (scores, out) => clipped(scores, out, 1, 1) };
}

/** @param {Row} p @param {number} mass */
function halfSquare(p, mass) {
  return 0.5 * (dot(p, p) - mass);
}

/** α-entmax: Ω is (Σ pᵅ − 1) / (α(α − 1)), and p = [(α − 1)(s − τ)]₊ to the power 1/(α − 1).
 * @param {number} alpha above 1
 * @returns {Omega}
 */
export function tsallis(alpha) {
  if (alpha === 2) return gini();
  const power = 1 / (alpha - 1);
  return {
    ...SIMPLEX,
    margin: power,
    value(p) {
      let sum = 0;
      for (let i = 0; i < p.length; i++) if (p[i] > 0) sum += p[i] ** alpha;
      return (sum - 1) / (alpha * (alpha - 1));
    },
    argmax(scores, out) {
      const top = largest(scores);
      for (let i = 0; i < out.length; i++) out[i] = (alpha - 1) * (scores[i] - top);
      return raise(out, threshold(out, power), power);
    },
  };
}

/** α-normmax: Ω is ‖p‖_α − 1, and p is proportional to [s − τ]₊ to the power 1/(α − 1).
 * @param {number} alpha above 1
 * @returns {Omega}
 */
export function norm(alpha) {
  const power = 1 / (alpha - 1);
  return {
    ...SIMPLEX,
    margin: 1,
    value(p) {
      const top = largest(p);
      let sum = 0;
      for (let i = 0; i < p.length; i++) if (p[i] > 0) sum += (p[i] / top) ** alpha;
      return top * sum ** (1 / alpha) - 1;
    },
    argmax(scores, out) {
      const top = largest(scores);
      for (let i = 0; i < out.length; i++) out[i] = scores[i] - top;
      return raise(out, threshold(out, alpha * power), power); // α/(α − 1), the exponent of the dual norm
    },
  };
}

/** The τ at which Σ [z − τ]₊ to a power is 1, for z with maximum 0: Newton's method, kept in a bracket by bisection.
 * @param {Row} z
 * @param {number} power
 */
function threshold(z, power) {
  const n = z.length;
  let low = -1; // the largest entry alone gives 1
  let high = -(n ** (-1 / power)); // n equal entries would
  let tau = low;
  for (let step = 0; step < 100; step++) {
    let sum = -1;
    let slope = 0;
    for (let i = 0; i < n; i++) {
      const above = z[i] - tau;
      if (above > 0) {
        const raised = power === 2 ? above * above : above ** power;
        sum += raised;
        slope += raised / above;
      }
    }
    if (sum >= 0) low = tau;
    else high = tau;
    const next = tau + sum / (power * slope);
    const moved = next > low && next < high ? next : (low + high) / 2;
    if (Math.abs(moved - tau) <= 1e-15 || low >= high) break;
    tau = moved;
  }
  return tau;
}

/** Entries above τ to a power, scaled to sum 1, in place.
 * @param {Float64Array} z
 * @param {number} tau
 * @param {number} power
 */
function raise(z, tau, power) {
  let sum = 0;
  for (let i = 0; i < z.length; i++) {
    const above = z[i] - tau;
    sum += z[i] = above > 0 ? (power === 2 ? above * above : above ** power) : 0;
  }
  for (let i = 0; i < z.length; i++) z[i] /= sum;
  return z;
}

/** k-subsets: weights between 0 and 1 that sum to k; Ω is ½(‖p‖² − k).
 * @param {number} k
 * @returns {Omega}
 */
export function kSubsets(k) {
  return {
    margin: 1,
    mass: k,
    zeroAtVertices: true,
    cap: 1,
    value: (p) => halfSquare(p, k),
    argmax: (scores, out) => clipped(scores, out, 1, Math.min(k, scores.length)),
  };
}

/** Constrained sparsemax: no item may have more than the cap.
 * @param {number} upper
 * @returns {Omega}
 */
export function cappedGini(upper) {
  return {
    mass: 1,
    zeroAtVertices: upper >= 1,
    cap: upper,
    margin: upper >= 1 ? 1 : Infinity,
    value: (p) => halfSquare(p, 1),
    argmax: (scores, out) => clipped(scores, out, upper, 1),
  };
}

/** Constrained softmax: items at the cap keep it, the others share the rest as softmax would.
 * @param {number} upper
 * @returns {Omega}
 */
export function cappedShannon(upper) {
  return {
    mass: 1,
    zeroAtVertices: upper >= 1,
    cap: upper,
    margin: Infinity,
    value: negativeEntropy,
    argmax(scores, out) {
      const n = out.length;
      const top = largest(scores);
      const full = new Uint8Array(n);
      let rest = 1;
      for (let again = true; again; ) {
        let sum = 0;
        for (let i = 0; i < n; i++) if (!full[i]) sum += Math.exp(scores[i] - top);
        again = false;
        const share = rest / sum;
        for (let i = 0; i < n; i++) {
          if (full[i]) continue;
          out[i] = Math.min(share * Math.exp(scores[i] - top), upper);
          if (out[i] === upper) {
            full[i] = 1;
            rest -= upper;
            again = true;
          }
        }
        rest = Math.max(rest, 0);
        again = again && full.includes(0);
      }
      return out;
    },
  };
}

/** Clip scores − τ to [0, upper], with the τ at which the entries sum to mass: that sum is piecewise linear in τ.
 * @param {Row} scores
 * @param {Float64Array} out
 * @param {number} upper
 * @param {number} mass
 */
function clipped(scores, out, upper, mass) {
  const n = out.length;
  if (mass >= n * upper) return out.fill(upper);
  const top = largest(scores);
  let low = top - upper - mass; // bracket: the sum at low is at least the mass, at high it is 0
  for (let i = 0; i < n; i++) low = Math.min(low, scores[i] - upper);
  let high = top;
  let tau = high - mass;
  for (let step = 0; step < 200; step++) {
    let sum = 0;
    let inside = 0;
    for (let i = 0; i < n; i++) {
      const z = scores[i] - tau;
      if (z > upper) sum += upper;
      else if (z > 0) {
        sum += z;
        inside++;
      }
    }
    if (sum === mass || low >= high) break;
    if (sum > mass) low = tau;
    else high = tau;
    const next = inside ? tau + (sum - mass) / inside : NaN;
    if (Math.abs(next - tau) <= 1e-16 * Math.max(1, Math.abs(tau))) break;
    tau = next > low && next < high ? next : (low + high) / 2;
  }
  const noise = 2e-15 * Math.max(1, Math.abs(tau)); // of the difference: what is nearer to a bound lies on it
  for (let i = 0; i < n; i++) {
    const z = scores[i] - tau;
    out[i] = z <= noise ? 0 : z >= upper - noise ? upper : z;
  }
  return out;
}

/** Fusedmax: Ω is ½(‖p‖² − 1) + strength · Σ |pᵢ − pᵢ₊₁|. Neighbours get equal weights.
 * @param {number} strength
 * @returns {Omega}
 */
export function fused(strength) {
  return {
    ...SIMPLEX,
    zeroAtVertices: strength === 0,
    margin: 1 + 3 * strength,
    value(p) {
      let jumps = 0;
      for (let i = 1; i < p.length; i++) jumps += Math.abs(p[i] - p[i - 1]);
      return halfSquare(p, 1) + strength * jumps;
    },
    argmax: (scores, out) => clipped(tautString(scores, strength), out, 1, 1),
  };
}

/** Scores with their total variation penalized: slopes of the shortest path in a tube around the cumulative sums.
 * @param {Row} scores
 * @param {number} strength half the height of the tube
 */
export function tautString(scores, strength) {
  const n = scores.length;
  const sums = new Float64Array(n + 1);
  for (let i = 0; i < n; i++) sums[i + 1] = sums[i] + scores[i];
  const slopes = new Float64Array(n);
  let at = 0;
  let height = 0;
  while (at < n) {
    let steepest = -Infinity; // the least slope that stays above the floor so far, and where it touches
    let flattest = Infinity; // the greatest slope that stays below the ceiling
    let floor = at;
    let ceiling = at;
    let end = n;
    let slope = NaN;
    for (let j = at + 1; j <= n; j++) {
      const half = j === n ? 0 : strength;
      const lower = (sums[j] - half - height) / (j - at);
      const upper = (sums[j] + half - height) / (j - at);
      if (upper < steepest) {
        [end, slope] = [floor, steepest];
        break;
      }
      if (lower > flattest) {
        [end, slope] = [ceiling, flattest];
        break;
      }
      if (lower >= steepest) [steepest, floor] = [lower, j];
      if (upper <= flattest) [flattest, ceiling] = [upper, j];
      slope = lower; // at the last point the tube is closed: both are equal
    }
    slopes.fill(slope, at, end);
    height += slope * (end - at);
    at = end;
  }
  return slopes;
}

/** Oscarmax: Ω is ½(‖p‖² − 1) + strength · Σ over pairs of max(pᵢ, pⱼ). Similar items get equal weights.
 * @param {number} strength
 * @returns {Omega}
 */
export function oscar(strength) {
  return {
    ...SIMPLEX,
    zeroAtVertices: strength === 0,
    margin: null,
    value(p) {
      let pairs = 0;
      for (let i = 0; i < p.length; i++) for (let j = 0; j < i; j++) pairs += Math.max(p[i], p[j]);
      return halfSquare(p, 1) + strength * pairs;
    },
    argmax: (scores, out) => clipped(evened(scores, strength), out, 1, 1),
  };
}

/** Scores less strength times the number of lower ones, then pooled wherever that would turn their order around.
 * @param {Row} scores
 * @param {number} strength
 */
function evened(scores, strength) {
  const n = scores.length;
  const order = Array.from(scores, (_, i) => i).sort((a, b) => scores[b] - scores[a]);
  /** @type {{sum: number, count: number}[]} */
  const blocks = [];
  order.forEach((i, rank) => {
    blocks.push({ sum: scores[i] - strength * (n - 1 - rank), count: 1 });
    for (let k = blocks.length - 1; k > 0; k--) {
      const [above, below] = [blocks[k - 1], blocks[k]];
      if (above.sum / above.count > below.sum / below.count) break;
      blocks[k - 1] = { sum: above.sum + below.sum, count: above.count + below.count };
      blocks.pop();
    }
  });
  const out = new Float64Array(n);
  let rank = 0;
  for (const { sum, count } of blocks) for (let k = 0; k < count; k++) out[order[rank++]] = sum / count;
  return out;
}

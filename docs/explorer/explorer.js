// Written by tools/build.py from the modules in src: change those, and run it again.
"use strict";
(() => {
const module_maps = (() => {
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
function choose(omega, scores, gamma = 1) {
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
function loss(omega, scores, target, gamma = 1) {
  const value = choose(omega, scores, gamma).max + gamma * omega.value(target) - dot(scores, target);
  return Math.max(value, 0); // rounding alone makes it negative
}

/** The target that shares the mass of Ω evenly among the marked items; null if Ω does not allow it.
 * @param {Omega} omega
 * @param {ArrayLike<boolean>} marked
 * @returns {Float64Array | null}
 */
function evenTarget(omega, marked) {
  let count = 0;
  for (let i = 0; i < marked.length; i++) if (marked[i]) count++;
  const share = omega.mass / count;
  if (count === 0 || share > omega.cap + 1e-12) return null;
  return Float64Array.from(marked, (each) => (each ? share : 0));
}

/** @param {Row} a @param {Row} b */
function dot(a, b) {
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
function hard() {
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
function shannon() {
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
function gini() {
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
function tsallis(alpha) {
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
function norm(alpha) {
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
function kSubsets(k) {
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
function cappedGini(upper) {
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
function cappedShannon(upper) {
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
function fused(strength) {
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
function tautString(scores, strength) {
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
function oscar(strength) {
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
return { choose, loss, evenTarget, dot, hard, shannon, gini, tsallis, norm, kSubsets, cappedGini, cappedShannon, fused, tautString, oscar };
})();

const module_alignment = (() => {
/** Monotonic alignments of two sequences: smoothed best score and the probability of every pair. */

const { gini, shannon } = module_maps;

/** @typedef {import("./maps.js").Omega} Omega */
/** @typedef {{value: number, marginals: number[][]}} Alignment */

const SMOOTHERS = { gini: gini(), shannon: shannon() };

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
function align(scores, omega, gamma) {
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
return { SMOOTHERS, align };
})();

const module_dom = (() => {
/** Elements, sliders, dragging, and the time that handlers take. */

/** @typedef {Record<string, string | number | boolean>} Attributes */

/** @param {Element} element @param {Attributes} attributes */
function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** An HTML element with attributes and children.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Attributes} [attributes] @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[T]}
 */
function html(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** An SVG element with attributes and children.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag @param {Attributes} [attributes] @param {Node[]} children
 * @returns {SVGElementTagNameMap[T]}
 */
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** The element of the page with an id.
 * @param {string} id
 * @returns {HTMLElement}
 */
function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element #${id}`);
  return element;
}

/** A word with an explanation that shows on hover, focus and touch.
 * @param {string} word @param {string} meaning
 */
function term(word, meaning) {
  const tip = html("span", { class: "tip", role: "tooltip" }, meaning);
  const term = html("span", { class: "term", tabindex: 0 }, word, tip);
  const place = () => {
    tip.style.removeProperty("--shift");
    const beyond = tip.getBoundingClientRect().right - document.documentElement.clientWidth + 8;
    if (beyond > 0) tip.style.setProperty("--shift", `${-beyond}px`);
  };
  term.addEventListener("pointerenter", place);
  term.addEventListener("focus", place);
  return term;
}

/** A number with a fixed count of digits and a true minus sign.
 * @param {number} value @param {number} [digits]
 */
function shown(value, digits = 2) {
  if (value === Infinity) return "∞";
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** Milliseconds of script of every call, by handler; the browser's test reads them.
 * @type {Record<string, number[]>}
 */
const timings = {};

/** A handler that keeps account of its time.
 * @template {unknown[]} A
 * @param {string} name @param {(...args: A) => void} handler
 * @returns {(...args: A) => void}
 */
function timed(name, handler) {
  const spent = (timings[name] ??= []);
  return (...args) => {
    const start = performance.now();
    handler(...args);
    if (spent.length < 2000) spent.push(performance.now() - start);
  };
}

/** Call `move` with the position of the pointer while it is held down, with mouse, pen or finger.
 * @param {HTMLElement | SVGElement} element
 * @param {string} name of the handler in `timings`
 * @param {(event: PointerEvent, first: boolean) => void} move
 * @param {() => void} [end]
 */
function onDrag(element, name, move, end) {
  let held = false;
  const moved = timed(name, move);
  element.addEventListener("pointerdown", (event) => {
    const pointer = /** @type {PointerEvent} */ (event);
    if (pointer.button !== 0) return;
    held = true;
    element.setPointerCapture(pointer.pointerId);
    moved(pointer, true);
  });
  element.addEventListener("pointermove", (event) => {
    if (held) moved(/** @type {PointerEvent} */ (event), false);
  });
  const release = () => {
    if (held) end?.();
    held = false;
  };
  element.addEventListener("pointerup", release);
  element.addEventListener("pointercancel", release);
}

/** How far a key moves a slider, in steps; 0 for keys that do not.
 * @param {KeyboardEvent} event
 * @param {number} whole the number of steps from one end to the other
 */
function keySteps(event, whole) {
  const large = event.shiftKey ? 5 : 1;
  const keys = /** @type {Record<string, number>} */ ({
    ArrowRight: large,
    ArrowUp: large,
    ArrowLeft: -large,
    ArrowDown: -large,
    PageUp: 10,
    PageDown: -10,
    Home: -whole,
    End: whole,
  });
  return keys[event.key] ?? 0;
}

/** @param {number} value @param {number} low @param {number} high */
function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** The nearest multiple of a step, as one would write it: 28 steps of 0.05 are 1.4, not 1.4000000000000001.
 * @param {number} value @param {number} step
 */
function stepped(value, step) {
  return Number((Math.round(value / step) * step).toFixed(6));
}

/**
 * @typedef {object} Knob
 * @property {string} id
 * @property {string} label
 * @property {string} meaning
 * @property {number} min
 * @property {number} max
 * @property {number} step
 * @property {number} value
 * @property {number} [digits]
 */

/** A labelled slider; `change` is called with its value.
 * @param {Knob} knob @param {(value: number) => void} change
 */
function slider(knob, change) {
  const { id, min, max, step, value, digits = 2 } = knob;
  const output = html("output", { for: id }, shown(value, digits));
  const input = html("input", { type: "range", id, min, max, step, value });
  input.addEventListener(
    "input",
    timed(id, () => {
      output.textContent = shown(Number(input.value), digits);
      change(Number(input.value));
    }),
  );
  const label = html("label", { for: id }, knob.label);
  return html("div", { class: "knob" }, label, term("?", knob.meaning), output, input);
}

/** Do work in short slices, one per frame, until it says that it is done; a new start drops the old work.
 * @param {string} name of a slice in `timings`
 * @param {number} [budget] milliseconds per slice
 */
function slices(name, budget = 4) {
  /** @type {number | undefined} */
  let frame;
  /** @type {Iterator<void> | undefined} */
  let work;
  const slice = timed(name, () => {
    const end = performance.now() + budget;
    do {
      if (work?.next().done) {
        work = undefined;
        frame = undefined;
        return;
      }
    } while (performance.now() < end);
    frame = requestAnimationFrame(slice);
  });
  return {
    /** @param {Iterator<void>} next */
    start(next) {
      work = next;
      frame ??= requestAnimationFrame(slice);
    },
    get busy() {
      return work !== undefined;
    },
  };
}

/** Whether the reader asked for less motion. */
function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
return { set, html, svg, byId, term, shown, timings, timed, onDrag, keySteps, clamp, stepped, slider, slices, calm };
})();

const module_alignments = (() => {
/** Third panel, first half: the alignment of a sentence pair moves as scores are dragged. */

const { align, SMOOTHERS } = module_alignment;
const { byId, clamp, html, keySteps, onDrag, set, shown, slider, stepped, timed } = module_dom;

const SOURCE = ["the", "old", "man", "walks", "slowly", "home"];
const TARGET = ["der", "alte", "Mann", "geht", "langsam", "nach", "Hause"];
/** Made-up scores, one row per English word. */
const SCORES = [
  [3.0, 0.8, 0.4, 0.0, 0.0, 0.2, 0.0],
  [0.6, 2.8, 0.7, 0.1, 0.3, 0.0, 0.1],
  [0.3, 0.7, 3.0, 0.4, 0.1, 0.1, 0.5],
  [0.0, 0.2, 0.5, 2.4, 1.2, 0.8, 0.2],
  [0.1, 0.2, 0.1, 1.3, 2.2, 0.9, 0.3],
  [0.0, 0.1, 0.4, 0.6, 0.5, 1.5, 2.6],
];
const TOP = 4;
const STEP = 0.1;
const PIXELS = 40;

/** Build the panel and keep it up to date. */
function alignments() {
  const scores = SCORES.map((row) => row.slice());
  /** @type {keyof typeof SMOOTHERS} */
  let smoother = "gini";
  let gamma = 1;
  const grid = byId("grid");
  set(grid, { style: `--columns: ${TARGET.length}` });
  grid.append(html("span"), ...TARGET.map((word) => html("span", { class: "heading" }, word)));
  const cells = SOURCE.map((word, i) => {
    const row = TARGET.map((other, j) => cell(i, j, `${word} – ${other}`));
    grid.append(html("span", { class: "heading side" }, word), ...row.map((each) => each.element));
    return row;
  });
  for (const input of document.querySelectorAll('input[name="smoother"]')) {
    const radio = /** @type {HTMLInputElement} */ (input);
    radio.addEventListener("change", timed("smoother", () => {
      smoother = radio.value === "shannon" ? "shannon" : "gini";
      update();
    }));
  }
  const knob = {
    id: "gamma",
    label: "Smoothing",
    meaning: "How much worse an alignment may be and still get some probability.",
    min: 0.05,
    max: 4,
    step: 0.05,
    value: gamma,
  };
  byId("alignment-knobs").append(
    slider(knob, (value) => {
      gamma = value;
      update();
    }),
  );
  byId("reset").addEventListener("click", timed("reset", () => {
    scores.forEach((row, i) => row.forEach((_, j) => (row[j] = SCORES[i][j])));
    update();
  }));
  update();

  function update() {
    const { value, marginals } = align(scores, SMOOTHERS[smoother], gamma);
    let possible = 0;
    cells.forEach((row, i) => row.forEach((each, j) => {
      each.show(scores[i][j], marginals[i][j]);
      if (marginals[i][j] > 0) possible++;
    }));
    byId("alignment-value").textContent = shown(value);
    byId("possible").textContent = `${possible} of ${SOURCE.length * TARGET.length}`;
  }

  /** A pair of words: drag, or press arrow keys, to change its score.
   * @param {number} i @param {number} j @param {string} name
   */
  function cell(i, j, name) {
    const fill = html("span", { class: "fill" });
    const share = html("span", { class: "share" });
    const small = html("span", { class: "small" });
    const element = html("div", {
      class: "cell",
      role: "slider",
      tabindex: 0,
      "aria-label": `Score of ${name}`,
      "aria-valuemin": 0,
      "aria-valuemax": TOP,
    }, fill, share, small);
    /** @param {number} score */
    const move = (score) => {
      scores[i][j] = clamp(stepped(score, STEP), 0, TOP);
      update();
    };
    let [from, x, y] = [0, 0, 0];
    onDrag(element, "cell", (event, first) => {
      if (first) [from, x, y] = [scores[i][j], event.clientX, event.clientY];
      else move(from + (event.clientX - x - (event.clientY - y)) / PIXELS);
    });
    element.addEventListener("keydown", timed("cell key", (event) => {
      const steps = keySteps(event, TOP / STEP);
      if (!steps) return;
      event.preventDefault();
      move(scores[i][j] + steps * STEP);
    }));
    return {
      element,
      /** @param {number} score @param {number} p */
      show(score, p) {
        fill.style.opacity = String(p);
        share.textContent = p === 0 ? "" : p < 0.005 ? "<.01" : p > 0.995 ? "1" : p.toFixed(2).replace(/^0/, "");
        share.classList.toggle("dark", p > 0.7);
        small.textContent = shown(score, 1);
        small.classList.toggle("dark", p > 0.7);
        element.dataset.marginal = p.toFixed(6);
        set(element, { "aria-valuenow": score.toFixed(1), "aria-valuetext": `${shown(score, 1)}, aligned ${shown(p)}` });
      },
    };
  }
}
return { alignments };
})();

const module_choices = (() => {
/** First panel: the same scores through every map. */

const { byId, clamp, html, keySteps, onDrag, set, shown, slider, stepped, term, timed } = module_dom;
const {
  cappedGini,
  cappedShannon,
  choose,
  evenTarget,
  fused,
  gini,
  hard,
  kSubsets,
  loss,
  norm,
  oscar,
  shannon,
  tsallis,
} = module_maps;

/** @typedef {import("./maps.js").Omega} Omega */
/** @typedef {{alpha: number, temperature: number, strength: number, k: number, cap: number}} Settings */

/**
 * @typedef {object} Card
 * @property {string} id
 * @property {string} caption
 * @property {(settings: Settings) => string} title
 * @property {(settings: Settings) => Omega} omega
 */

const WORDS = ["sofa", "mat", "bed", "roof", "moon", "idea"];
const EXAMPLES = /** @type {Record<string, number[]>} */ ({
  "A clear favourite": [2.2, 0.6, 0.3, -0.2, -0.9, -1.6],
  "Two that are close": [1.4, 1.2, 0.3, 0.1, -0.6, -1.2],
  "All alike": [0.2, 0.15, 0.1, 0.05, 0, -0.05],
});
const FIRST = "Two that are close";
const REACH = 3;
const STEP = 0.05;

/** @type {Card[]} */
const CARDS = [
  { id: "softmax", title: () => "softmax", omega: shannon, caption: "Everyone gets something, always." },
  {
    id: "entmax",
    title: ({ alpha }) => `entmax, α = ${shown(alpha)}`,
    omega: ({ alpha }) => tsallis(alpha),
    caption: "From softmax (α near 1) to sparsemax (2) and on.",
  },
  { id: "sparsemax", title: () => "sparsemax", omega: gini, caption: "Low scores get exactly zero." },
  { id: "argmax", title: () => "argmax", omega: hard, caption: "The best takes all. Nothing to learn from." },
  {
    id: "normmax",
    title: ({ alpha }) => `normmax, α = ${shown(alpha)}`,
    omega: ({ alpha }) => norm(alpha),
    caption: "Picks a few and treats them evenly.",
  },
  {
    id: "ksubsets",
    title: ({ k }) => `k-subsets, k = ${k}`,
    omega: ({ k }) => kSubsets(k),
    caption: "Not one choice but k: the weights sum to k.",
  },
  {
    id: "fusedmax",
    title: ({ strength }) => `fusedmax, ${shown(strength)}`,
    omega: ({ strength }) => fused(strength),
    caption: "Neighbours in the list share one weight.",
  },
  {
    id: "oscarmax",
    title: ({ strength }) => `oscarmax, ${shown(strength)}`,
    omega: ({ strength }) => oscar(strength),
    caption: "Words with similar scores share one weight.",
  },
  {
    id: "constrained_sparsemax",
    title: ({ cap }) => `constrained sparsemax, ≤ ${shown(cap)}`,
    omega: ({ cap }) => cappedGini(cap),
    caption: "Sparsemax in which nobody may exceed the cap.",
  },
  {
    id: "constrained_softmax",
    title: ({ cap }) => `constrained softmax, ≤ ${shown(cap)}`,
    omega: ({ cap }) => cappedShannon(cap),
    caption: "Softmax in which nobody may exceed the cap.",
  },
];

/** @param {Settings} settings */
function knobs(settings) {
  return [
    {
      id: "temperature",
      label: "Temperature",
      meaning: "Scores are divided by it before the choice: high makes every map more even, low more decided.",
      min: 0.1,
      max: 4,
      step: 0.05,
      value: settings.temperature,
    },
    {
      id: "alpha",
      label: "α (alpha)",
      meaning: "Of entmax: how readily a word gets exactly zero. Of normmax: how even the kept words are.",
      min: 1.05,
      max: 4,
      step: 0.05,
      value: settings.alpha,
    },
    {
      id: "strength",
      label: "Strength",
      meaning: "Of fusedmax and oscarmax: how strongly weights are pulled together into groups.",
      min: 0,
      max: 1,
      step: 0.01,
      value: settings.strength,
    },
    {
      id: "k",
      label: "k",
      meaning: "Of k-subsets: how many words to choose.",
      min: 1,
      max: WORDS.length - 1,
      step: 1,
      value: settings.k,
      digits: 0,
    },
    {
      id: "cap",
      label: "Cap",
      meaning: "Of the constrained maps: the most that one word may get.",
      min: 0.2,
      max: 1,
      step: 0.01,
      value: settings.cap,
    },
  ];
}

/** Build the panel and keep it up to date. */
function choices() {
  const scores = EXAMPLES[FIRST].slice();
  const marked = WORDS.map((_, i) => i === 0);
  /** @type {Settings} */
  const settings = { alpha: 1.5, temperature: 1, strength: 0.2, k: 2, cap: 0.35 };
  const bars = byId("scores");
  const cards = CARDS.map((card) => drawCard(card));
  byId("cards").append(...cards.map((card) => card.element));
  const rows = WORDS.map((word, i) => scoreRow(word, i));
  bars.append(...rows.map((row) => row.element));
  const names = /** @type {(keyof Settings)[]} */ (["temperature", "alpha", "strength", "k", "cap"]);
  byId("knobs").append(
    ...knobs(settings).map((knob, i) =>
      slider(knob, (value) => {
        settings[names[i]] = value;
        update();
      }),
    ),
  );
  byId("examples").append(
    ...Object.entries(EXAMPLES).map(([name, values]) => {
      const button = html("button", { type: "button" }, name);
      button.addEventListener(
        "click",
        timed("example", () => {
          values.forEach((value, i) => (scores[i] = value));
          update();
        }),
      );
      return button;
    }),
  );
  update();

  function update() {
    rows.forEach((row, i) => row.show(scores[i], marked[i]));
    for (const card of cards) card.show(scores, marked, settings);
    const sorted = [...scores].sort((a, b) => b - a);
    byId("lead").textContent = shown(sorted[0] - sorted[1]);
  }

  /** One word: whether it is a right answer, and its score as a bar to drag.
   * @param {string} word @param {number} i
   */
  function scoreRow(word, i) {
    const box = html("input", { type: "checkbox", "aria-label": `${word} is a right answer` });
    box.addEventListener("change", timed("target", () => {
      marked[i] = box.checked;
      update();
    }));
    const bar = html("span", { class: "bar" });
    const track = html("div", {
      class: "track",
      role: "slider",
      tabindex: 0,
      "aria-label": `Score of ${word}`,
      "aria-valuemin": -REACH,
      "aria-valuemax": REACH,
    }, bar);
    const text = html("span", { class: "number" });
    /** @param {number} value */
    const move = (value) => {
      scores[i] = clamp(stepped(value, STEP), -REACH, REACH);
      update();
    };
    onDrag(track, "score", (event) => {
      const { left, width } = track.getBoundingClientRect();
      move(((event.clientX - left) / width) * 2 * REACH - REACH);
    });
    track.addEventListener("keydown", timed("score key", (event) => {
      const steps = keySteps(event, (2 * REACH) / STEP);
      if (!steps) return;
      event.preventDefault();
      move(scores[i] + steps * STEP);
    }));
    const element = html("div", { class: `score item-${i}` }, box, html("span", { class: "word" }, word), track, text);
    return {
      element,
      /** @param {number} score @param {boolean} right */
      show(score, right) {
        const share = Math.abs(score) / (2 * REACH);
        bar.style.left = `${100 * (score < 0 ? 0.5 - share : 0.5)}%`;
        bar.style.width = `${100 * share}%`;
        text.textContent = shown(score);
        set(track, { "aria-valuenow": score.toFixed(2), "aria-valuetext": shown(score) });
        box.checked = right;
      },
    };
  }
}

/** One map: its weights as columns, the gradient below them, and its numbers.
 * @param {Card} card
 */
function drawCard(card) {
  const title = html("h3");
  const columns = WORDS.map((word, i) => {
    const number = html("span", { class: "weight" });
    const column = html("span", { class: "column" });
    const pull = html("span", { class: "pull" });
    const element = html(
      "div",
      { class: `option item-${i}` },
      html("div", { class: "stack" }, number, column),
      html("div", { class: "pulls" }, pull),
      html("span", { class: "word" }, word),
    );
    return { number, column, pull, element };
  });
  const kept = html("span", { class: "value", "data-name": "kept" });
  const margin = html("span", { class: "value", "data-name": "margin" });
  const cost = html("span", { class: "value", "data-name": "loss" });
  const element = html(
    "article",
    { class: "card", id: `card-${card.id}` },
    title,
    html("p", { class: "caption" }, card.caption),
    html("div", { class: "options", "aria-hidden": "true" }, ...columns.map((column) => column.element)),
    html(
      "dl",
      {},
      html("dt", {}, term("kept", "How many words have a weight above zero: the support.")),
      html("dd", {}, kept),
      html("dt", {}, term("lead needed", "The margin: how far the best score must lead before it gets everything.")),
      html("dd", {}, margin),
      html("dt", {}, term("loss", "How far this choice is from the right answers; zero only if they are equal.")),
      html("dd", {}, cost),
    ),
  );
  return {
    element,
    /** @param {number[]} scores @param {boolean[]} marked @param {Settings} settings */
    show(scores, marked, settings) {
      const omega = card.omega(settings);
      const { p, support } = choose(omega, scores, settings.temperature);
      const target = evenTarget(omega, marked);
      title.textContent = card.title(settings);
      columns.forEach(({ number, column, pull, element: option }, i) => {
        number.textContent = p[i] === 0 ? "0" : p[i] < 0.005 ? "<.01" : p[i].toFixed(2).replace(/^0/, "");
        column.style.transform = `scaleY(${p[i]})`;
        option.classList.toggle("zero", p[i] === 0);
        const gradient = target ? p[i] - target[i] : 0;
        pull.style.transform = `scaleY(${-gradient})`;
        option.dataset.weight = p[i].toFixed(6);
        option.dataset.gradient = target ? gradient.toFixed(6) : "";
      });
      kept.textContent = `${support} of ${scores.length}`;
      margin.textContent = lead(omega.margin, settings.temperature);
      const allowed = omega.mass > 1 ? `mark ${omega.mass} or more` : marked.includes(true) ? "mark more" : "mark one";
      cost.textContent = target ? shown(loss(omega, scores, target, settings.temperature), 3) : allowed;
      cost.classList.toggle("missing", !target);
    },
  };
}

/** @param {number | null} margin @param {number} temperature */
function lead(margin, temperature) {
  if (margin === null) return "not known";
  return margin === Infinity ? "no lead is enough" : shown(margin * temperature);
}
return { choices };
})();

const module_memory = (() => {
/** Associative memories in the plane: energy, updates, where a query ends, and from how far a memory is exact. */

const { choose } = module_maps;

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
const NEAR = 0.01;

class Memory {
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
return { NEAR, Memory };
})();

const module_memories = (() => {
/** Second panel: queries fall into memories in the plane, the energy beneath, basins coloured. */

const { byId, calm, clamp, html, keySteps, onDrag, set, shown, slider, slices, svg, timed } = module_dom;
const { fused, gini, hard, kSubsets, norm, oscar, shannon, tsallis } = module_maps;
const { Memory, NEAR } = module_memory;

/** @typedef {import("./maps.js").Omega} Omega */
/** @typedef {import("./memory.js").Point} Point */
/** @typedef {{alpha: number, beta: number, strength: number, k: number}} Settings */

const NAMES = ["A", "B", "C", "D", "E", "F"];
/** @type {Point[]} */
const PATTERNS = [
  [0.95, 0.25],
  [0.2, 1.0],
  [-0.75, 0.7],
  [-0.85, -0.4],
  [-0.1, -1.0],
  [0.7, -0.65],
];
const SIDE = 1.3;
const CELLS = 96;
const SMALL = 32;
const STEP = 0.02;
const PAUSE = 350;

/** @type {{id: string, title: (s: Settings) => string, omega: (s: Settings) => Omega}[]} */
const FAMILY = [
  { id: "softmax", title: () => "softmax", omega: shannon },
  { id: "entmax", title: ({ alpha }) => `entmax ${shown(alpha)}`, omega: ({ alpha }) => tsallis(alpha) },
  { id: "sparsemax", title: () => "sparsemax", omega: gini },
  { id: "normmax", title: ({ alpha }) => `normmax ${shown(alpha)}`, omega: ({ alpha }) => norm(alpha) },
  { id: "argmax", title: () => "argmax", omega: hard },
  { id: "ksubsets", title: ({ k }) => `${k}-subsets`, omega: ({ k }) => kSubsets(k) },
  { id: "fusedmax", title: () => "fusedmax", omega: ({ strength }) => fused(strength) },
  { id: "oscarmax", title: () => "oscarmax", omega: ({ strength }) => oscar(strength) },
];

/** Colours of the memories, of mixtures, and whether the page is dark; read from the style sheet. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  /** @param {string} name */
  const colour = (name) => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  };
  return { items: NAMES.map((_, i) => colour(`--item-${i}`)), none: colour("--mixture"), paper: colour("--paper") };
}

/** Build the panel and keep it up to date. */
function memories() {
  const patterns = PATTERNS.map(([x, y]) => /** @type {Point} */ ([x, y]));
  /** @type {Point} */
  let query = [-0.1, 0.3];
  /** @type {Settings} */
  const settings = { alpha: 1.5, beta: 8, strength: 0.1, k: 2 };
  let chosen = FAMILY[1];
  let memory = new Memory(patterns, chosen.omega(settings), settings.beta);
  let colours = palette();
  /** @type {number | undefined} */
  let timer;
  const plane = byId("plane");
  const canvas = /** @type {HTMLCanvasElement} */ (byId("field"));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  canvas.width = canvas.height = CELLS;
  const image = context.createImageData(CELLS, CELLS);
  const drawing = slices("field slice");
  const thumbing = slices("thumbnail slice", 3);
  const overlay = svg("svg", { viewBox: "-100 -100 200 200" });
  plane.append(overlay);
  const circles = patterns.map((_, i) => svg("circle", { class: `ball item-${i}` }));
  const path = svg("polyline", { class: "path" });
  const dots = svg("g", { class: "dots" });
  const start = svg("circle", { class: "query", r: 4, tabindex: 0, role: "button" });
  const state = svg("circle", { class: "state", r: 5.5 });
  const markers = patterns.map((_, i) => marker(i));
  overlay.append(...circles, path, dots, state, start, ...markers);
  const thumbs = FAMILY.map((each) => thumb(each));
  byId("family").append(...thumbs.map((each) => each.button));
  const weights = NAMES.map((name, i) => {
    const bar = html("span", { class: "bar" });
    const number = html("span", { class: "number" });
    byId("weights").append(
      html("div", { class: `score item-${i}` }, html("b", {}, name), html("div", { class: "track still" }, bar), number),
    );
    return { bar, number };
  });
  const names = /** @type {(keyof Settings)[]} */ (["beta", "alpha", "k", "strength"]);
  byId("memory-knobs").append(
    ...memoryKnobs(settings).map((knob, i) =>
      slider(knob, (value) => {
        settings[names[i]] = value;
        update();
      }),
    ),
  );

  let held = false;
  onDrag(plane, "query", (event, first) => {
    if (first) held = event.target instanceof Element && event.target.closest(".memory") !== null;
    if (held) return; // a memory is being dragged, not the query
    query = place(event);
    follow(true);
  });
  start.addEventListener("keydown", timed("query key", (event) => nudge(event, query, (point) => {
    query = point;
    follow(true);
  })));
  byId("again").addEventListener("click", () => follow(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours = palette();
    update();
  });
  update();

  /** Half the width of what is drawn: sums of several memories lie farther out. */
  function side() {
    return memory.omega.mass > 1 ? 1.7 * SIDE : SIDE;
  }

  /** The point of the plane under the pointer.
   * @param {PointerEvent} event
   * @returns {Point}
   */
  function place(event) {
    const { left, top, width, height } = plane.getBoundingClientRect();
    const half = side();
    const x = ((event.clientX - left) / width) * 2 * half - half;
    const y = half - ((event.clientY - top) / height) * 2 * half;
    return [clamp(x, -half, half), clamp(y, -half, half)];
  }

  /** @param {KeyboardEvent} event @param {Point} from @param {(point: Point) => void} move */
  function nudge(event, from, move) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!steps || !keySteps(event, 1)) return;
    event.preventDefault();
    const far = STEP * (event.shiftKey ? 5 : 1);
    move([clamp(from[0] + far * steps[0], -SIDE, SIDE), clamp(from[1] + far * steps[1], -SIDE, SIDE)]);
  }

  /** A memory: a letter that can be dragged.
   * @param {number} i
   */
  function marker(i) {
    const group = svg("g", { class: `memory item-${i}`, tabindex: 0, role: "button" });
    const letter = svg("text", { dy: "0.36em" });
    letter.textContent = NAMES[i];
    group.append(svg("circle", { r: 7 }), letter);
    /** @param {Point} point */
    const move = (point) => {
      patterns[i] = point;
      update();
    };
    onDrag(group, "memory", (event) => {
      event.stopPropagation();
      move(limited(place(event)));
    });
    group.addEventListener("keydown", timed("memory key", (event) => nudge(event, patterns[i], move)));
    return group;
  }

  /** Build the memory anew, and draw everything. */
  function update() {
    memory = new Memory(patterns, chosen.omega(settings), settings.beta);
    for (const each of thumbs) each.show();
    const radii = memory.radii();
    const scale = 100 / side();
    patterns.forEach(([x, y], i) => {
      set(markers[i], {
        transform: `translate(${x * scale} ${-y * scale})`,
        "aria-label": `Memory ${NAMES[i]} at ${shown(x)}, ${shown(y)}; arrow keys move it`,
      });
      const radius = radii ? radii[i] : -1;
      set(circles[i], { cx: x * scale, cy: -y * scale, r: radius > 0 && radius < Infinity ? radius * scale : 0 });
    });
    const exact = radii ? radii.filter((radius) => radius > 0).length : null;
    byId("certified").textContent =
      exact === null
        ? "No circles here: they are drawn for maps that choose one memory and whose margin is known."
        : `${exact} of ${patterns.length} memories have a circle. One update from anywhere inside it returns the memory exactly.`;
    drawing.start(field());
    thumbing.start(thumbnails());
    follow(true);
  }

  /** Colour the plane, from coarse blocks to single cells.
   * @returns {Generator<void>}
   */
  function* field() {
    const half = side();
    let [lowest, highest] = [Infinity, -Infinity];
    const corner = Math.round(CELLS / 8);
    for (let i = 0; i <= CELLS; i += corner) {
      for (let j = 0; j <= CELLS; j += corner) {
        const energy = memory.energy((2 * i * half) / CELLS - half, (2 * j * half) / CELLS - half);
        [lowest, highest] = [Math.min(lowest, energy), Math.max(highest, energy)];
      }
      yield;
    }
    for (const block of [8, 3, 1]) {
      for (let row = 0; row < CELLS; row += block) {
        for (let column = 0; column < CELLS; column += block) {
          const x = ((2 * column + block) * half) / CELLS - half;
          const y = half - ((2 * row + block) * half) / CELLS;
          const level = clamp((memory.energy(x, y) - lowest) / (highest - lowest), 0, 1);
          paint(image, CELLS, row, column, block, memory.ends(x, y), level);
          if (column % 4 === 0) yield;
        }
        if (row % 12 === 0) context.putImageData(image, 0, 0);
      }
      context.putImageData(image, 0, 0);
    }
  }

  /** Fill a block of cells: the hue tells where a query ends, the shade the energy, in bands.
   * @param {ImageData} target @param {number} cells @param {number} row @param {number} column @param {number} block
   * @param {number} bits @param {number} level from 0, lowest, to 1
   */
  function paint(target, cells, row, column, block, bits, level) {
    let [red, green, blue, count] = [0, 0, 0, 0];
    for (let i = 0; i < colours.items.length; i++) {
      if (!(bits & (1 << i))) continue;
      const [r, g, b] = colours.items[i];
      [red, green, blue, count] = [red + r, green + g, blue + b, count + 1];
    }
    if (!count) [red, green, blue, count] = [...colours.none, 1];
    const share = 0.75 - 0.6 * (Math.floor(Math.sqrt(level) * 12) / 12);
    const mixed = [red, green, blue].map((part, i) => share * (part / count) + (1 - share) * colours.paper[i]);
    for (let r = row; r < Math.min(row + block, cells); r++) {
      for (let c = column; c < Math.min(column + block, cells); c++) {
        const at = 4 * (r * cells + c);
        [target.data[at], target.data[at + 1], target.data[at + 2], target.data[at + 3]] = [...mixed, 255];
      }
    }
  }

  /** A small picture of the basins of one Ω, to choose it by.
   * @param {typeof FAMILY[number]} each
   */
  function thumb(each) {
    const small = html("canvas", { width: SMALL, height: SMALL, "aria-hidden": "true" });
    const name = html("span");
    const button = html("button", { type: "button", id: `omega-${each.id}` }, small, name);
    button.addEventListener("click", timed("family", () => {
      chosen = each;
      update();
    }));
    return {
      button,
      each,
      context: /** @type {CanvasRenderingContext2D} */ (small.getContext("2d")),
      show() {
        name.textContent = each.title(settings);
        set(button, { "aria-pressed": each === chosen ? "true" : "false" });
      },
    };
  }

  /** Draw the basins of every Ω, small.
   * @returns {Generator<void>}
   */
  function* thumbnails() {
    for (const each of thumbs) {
      const other = new Memory(patterns, each.each.omega(settings), settings.beta);
      const half = other.omega.mass > 1 ? 1.7 * SIDE : SIDE;
      const picture = each.context.createImageData(SMALL, SMALL);
      for (let row = 0; row < SMALL; row++) {
        for (let column = 0; column < SMALL; column++) {
          const x = ((2 * column + 1) * half) / SMALL - half;
          const y = half - ((2 * row + 1) * half) / SMALL;
          paint(picture, SMALL, row, column, 1, other.ends(x, y), 0.1);
          if (column % 2 === 0) yield;
        }
      }
      each.context.putImageData(picture, 0, 0);
    }
  }

  /** Show the path of the query, at once or update by update.
   * @param {boolean} atOnce
   */
  function follow(atOnce) {
    clearTimeout(timer);
    const found = memory.retrieve(query);
    const scale = 100 / side();
    const points = found.path.map(([x, y]) => /** @type {Point} */ ([x * scale, -y * scale]));
    set(start, {
      cx: points[0][0],
      cy: points[0][1],
      "aria-label": `Query at ${shown(query[0])}, ${shown(query[1])}; arrow keys move it`,
    });
    /** @param {number} count */
    const draw = (count) => {
      const upTo = points.slice(0, count + 1);
      set(path, { points: upTo.map((point) => point.join(",")).join(" ") });
      dots.replaceChildren(...upTo.slice(1, 30).map(([x, y]) => svg("circle", { cx: x, cy: y, r: 1.8 })));
      const [x, y] = upTo[upTo.length - 1];
      set(state, { cx: x, cy: y });
      const [realX, realY] = found.path[upTo.length - 1];
      byId("energy").textContent = shown(memory.energy(realX, realY), 3);
      if (upTo.length < points.length) timer = setTimeout(() => draw(count + 1), PAUSE);
    };
    draw(atOnce || calm() ? points.length - 1 : 0);
    weights.forEach(({ bar, number }, i) => {
      bar.style.left = "0";
      bar.style.width = `${100 * found.weights[i]}%`;
      number.textContent = found.weights[i] === 0 ? "0" : shown(found.weights[i], 3);
    });
    byId("ending").textContent = told(found, memory);
    byId("ending").dataset.exact = String(found.whole && found.converged);
  }
}

/** A point that a memory may be moved to.
 * @param {Point} point
 * @returns {Point}
 */
function limited([x, y]) {
  return [clamp(x, -SIDE, SIDE), clamp(y, -SIDE, SIDE)];
}

/** Where a query ended, in words.
 * @param {import("./memory.js").Retrieval} found @param {Memory} memory
 */
function told(found, memory) {
  const steps = found.path.length - 1;
  const updates = `${steps} update${steps === 1 ? "" : "s"}`;
  const kept = NAMES.filter((_, i) => found.weights[i] > 0);
  if (!found.converged) return `Still moving after ${updates}.`;
  if (found.whole) return `Exactly ${kept.join(" + ")} after ${updates}: the others have weight zero.`;
  const [x, y] = found.path[steps];
  const near = memory.patterns.findIndex(([a, b]) => Math.hypot(a - x, b - y) <= NEAR);
  if (near >= 0) return `Close to ${NAMES[near]} after ${updates}, but never exactly there.`;
  return `A mixture of ${kept.length === NAMES.length ? "all memories" : kept.join(", ")} after ${updates}.`;
}

/** @param {Settings} settings */
function memoryKnobs(settings) {
  return [
    {
      id: "beta",
      label: "β (contrast)",
      meaning: "How strongly a memory that fits better is preferred: the inverse of a temperature.",
      min: 0.5,
      max: 12,
      step: 0.1,
      value: settings.beta,
      digits: 1,
    },
    {
      id: "memory-alpha",
      label: "α (alpha)",
      meaning: "Of entmax and normmax: see the first panel.",
      min: 1.05,
      max: 5,
      step: 0.05,
      value: settings.alpha,
    },
    {
      id: "memory-k",
      label: "k",
      meaning: "Of k-subsets: how many memories are recalled at once; the query ends at their sum.",
      min: 1,
      max: 4,
      step: 1,
      value: settings.k,
      digits: 0,
    },
    {
      id: "memory-strength",
      label: "Strength",
      meaning: "Of fusedmax and oscarmax: how strongly weights are pulled together.",
      min: 0,
      max: 1,
      step: 0.01,
      value: settings.strength,
    },
  ];
}
return { memories };
})();

const module_frames = (() => {
/** Written by tools/library_numbers.py: SparseMAP over trees while the score of one arc moves. */

/** @typedef {{weight: number, heads: number[]}} Tree the head of every word, 0 for the root */
/** @typedef {{score: number, arcs: number[][], trees: Tree[]}} Frame arcs: modifier, head, marginal */

/** @type {{words: string[], moved: number[], frames: Frame[]}} */
const FRAMES = {
  words: ["She", "saw", "the", "man", "with", "a", "telescope"],
  moved: [5, 4],
  frames: [
    {"score": 0.0, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.1, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.2, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.3, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.4, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.5, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.6, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.7, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.8, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 0.9, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 1.0, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 1.1, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 1.2, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 1.3, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.625], [5, 7, 0.375], [6, 7, 1.0], [7, 2, 0.375], [7, 5, 0.625]], "trees": [{"weight": 0.625, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.375, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 1.4, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.6143], [5, 4, 0.0143], [5, 7, 0.3714], [6, 7, 1.0], [7, 2, 0.3714], [7, 5, 0.6286]], "trees": [{"weight": 0.6143, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.3714, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.0143, "heads": [2, 0, 4, 2, 4, 7, 5]}]},
    {"score": 1.5, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.5714], [5, 4, 0.0714], [5, 7, 0.3571], [6, 7, 1.0], [7, 2, 0.3571], [7, 5, 0.6429]], "trees": [{"weight": 0.5714, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.3571, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.0714, "heads": [2, 0, 4, 2, 4, 7, 5]}]},
    {"score": 1.6, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.5286], [5, 4, 0.1286], [5, 7, 0.3429], [6, 7, 1.0], [7, 2, 0.3429], [7, 5, 0.6571]], "trees": [{"weight": 0.5286, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.3429, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.1286, "heads": [2, 0, 4, 2, 4, 7, 5]}]},
    {"score": 1.7, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.4857], [5, 4, 0.1857], [5, 7, 0.3286], [6, 7, 1.0], [7, 2, 0.3286], [7, 5, 0.6714]], "trees": [{"weight": 0.4857, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.3286, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.1857, "heads": [2, 0, 4, 2, 4, 7, 5]}]},
    {"score": 1.8, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.4429], [5, 4, 0.2429], [5, 7, 0.3143], [6, 7, 1.0], [7, 2, 0.3143], [7, 5, 0.6857]], "trees": [{"weight": 0.4429, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.3143, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.2429, "heads": [2, 0, 4, 2, 4, 7, 5]}]},
    {"score": 1.9, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.4], [5, 4, 0.3], [5, 7, 0.3], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.4, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 2.0, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.3667], [5, 4, 0.3667], [5, 7, 0.2667], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.3667, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3333, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.2667, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.0333, "heads": [2, 0, 4, 2, 2, 7, 2]}]},
    {"score": 2.1, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.3333], [5, 4, 0.4333], [5, 7, 0.2333], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.4333, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.2667, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.2333, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.0667, "heads": [2, 0, 4, 2, 2, 7, 2]}]},
    {"score": 2.2, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.3], [5, 4, 0.5], [5, 7, 0.2], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.5, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.2, "heads": [2, 0, 4, 2, 2, 7, 5]}, {"weight": 0.2, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.1, "heads": [2, 0, 4, 2, 2, 7, 2]}]},
    {"score": 2.3, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.2667], [5, 4, 0.5667], [5, 7, 0.1667], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.5667, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.1667, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.1333, "heads": [2, 0, 4, 2, 2, 7, 2]}, {"weight": 0.1333, "heads": [2, 0, 4, 2, 2, 7, 5]}]},
    {"score": 2.4, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.2333], [5, 4, 0.6333], [5, 7, 0.1333], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.6333, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.1667, "heads": [2, 0, 4, 2, 2, 7, 2]}, {"weight": 0.1333, "heads": [2, 0, 4, 2, 7, 7, 2]}, {"weight": 0.0667, "heads": [2, 0, 4, 2, 2, 7, 5]}]},
    {"score": 2.5, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.2], [5, 4, 0.7], [5, 7, 0.1], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.2, "heads": [2, 0, 4, 2, 2, 7, 2]}, {"weight": 0.1, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 2.6, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.1667], [5, 4, 0.7667], [5, 7, 0.0667], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.1667, "heads": [2, 0, 4, 2, 2, 7, 2]}, {"weight": 0.0667, "heads": [2, 0, 4, 2, 4, 7, 2]}, {"weight": 0.0667, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 2.7, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.1333], [5, 4, 0.8333], [5, 7, 0.0333], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.1333, "heads": [2, 0, 4, 2, 2, 7, 2]}, {"weight": 0.1333, "heads": [2, 0, 4, 2, 4, 7, 2]}, {"weight": 0.0333, "heads": [2, 0, 4, 2, 7, 7, 2]}]},
    {"score": 2.8, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.1], [5, 4, 0.9], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.2, "heads": [2, 0, 4, 2, 4, 7, 2]}, {"weight": 0.1, "heads": [2, 0, 4, 2, 2, 7, 2]}]},
    {"score": 2.9, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 2, 0.05], [5, 4, 0.95], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.25, "heads": [2, 0, 4, 2, 4, 7, 2]}, {"weight": 0.05, "heads": [2, 0, 4, 2, 2, 7, 2]}]},
    {"score": 3.0, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.1, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.2, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.3, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.4, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.5, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.6, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.7, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.8, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 3.9, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
    {"score": 4.0, "arcs": [[1, 2, 1.0], [2, 0, 1.0], [3, 4, 1.0], [4, 2, 1.0], [5, 4, 1.0], [6, 7, 1.0], [7, 2, 0.3], [7, 5, 0.7]], "trees": [{"weight": 0.7, "heads": [2, 0, 4, 2, 4, 7, 5]}, {"weight": 0.3, "heads": [2, 0, 4, 2, 4, 7, 2]}]},
  ],
};
return { FRAMES };
})();

const module_trees = (() => {
/** Third panel, second half: dependency trees, as frames that the library wrote. */

const { byId, calm, html, set, shown, slider, svg } = module_dom;
const { FRAMES } = module_frames;

const GAP = 72;
const RISE = 30;
const SPEED = 90;

/** Build the panel and keep it up to date. */
function trees() {
  const { words, moved, frames } = FRAMES;
  const [modifier, head] = moved;
  const middle = (/** @type {number} */ word) => (word - 0.5) * GAP;
  const drawing = byId("tree");
  const width = words.length * GAP;
  const spans = frames.flatMap((frame) => frame.arcs.map(([to, from]) => (from ? Math.abs(to - from) : 0)));
  const floor = RISE * Math.max(...spans) + 52;
  const arcs = svg("g");
  const picture = svg("svg", { viewBox: `-12 0 ${width + 24} ${floor + 30}`, role: "img" }, arcs);
  words.forEach((word, i) => {
    const text = svg("text", { x: middle(i + 1), y: floor + 20, class: "leaf" });
    text.textContent = word;
    picture.append(text);
  });
  drawing.append(picture);
  const knob = {
    id: "frame",
    label: `Score of the arc ${words[head - 1]} → ${words[modifier - 1]}`,
    meaning: "How well “with” goes with “man”. All other scores stay as they are.",
    min: 0,
    max: frames.length - 1,
    step: 1,
    value: 18,
  };
  const control = slider(knob, show);
  byId("tree-knobs").append(control);
  const input = /** @type {HTMLInputElement} */ (control.querySelector("input"));
  const output = /** @type {HTMLOutputElement} */ (control.querySelector("output"));
  const play = byId("play");
  /** @type {number | undefined} */
  let timer;
  const stop = () => {
    clearInterval(timer);
    timer = undefined;
    play.textContent = "Play";
  };
  /** @param {number} number */
  const jump = (number) => {
    input.value = String(number);
    show(number);
  };
  play.addEventListener("click", () => {
    if (timer !== undefined) return stop();
    if (calm()) return jump((Number(input.value) + 5) % frames.length);
    play.textContent = "Stop";
    let at = Number(input.value) === frames.length - 1 ? 0 : Number(input.value);
    timer = setInterval(() => {
      jump(at);
      if (++at >= frames.length) stop();
    }, SPEED);
  });
  input.addEventListener("pointerdown", stop);
  show(Number(input.value));

  /** @param {number} number */
  function show(number) {
    const frame = frames[number];
    output.textContent = shown(frame.score, 1);
    set(input, { "aria-valuetext": shown(frame.score, 1) });
    arcs.replaceChildren(...frame.arcs.map(([to, from, weight]) => arc(to, from, weight)));
    set(picture, { "aria-label": `Arcs over the sentence; ${frame.trees.length} trees are mixed` });
    byId("trees").replaceChildren(
      ...frame.trees.map((tree, i) => {
        const bar = html("span", { class: "bar", style: `width: ${100 * tree.weight}%` });
        const track = html("div", { class: "track still" }, bar);
        const number = html("span", { class: "number" }, shown(tree.weight));
        return html("div", { class: "mixed" }, html("span", {}, `Tree ${i + 1}: ${reading(tree, frame)}`), track, number);
      }),
    );
    byId("tree-kept").textContent = `${frame.arcs.length} of ${words.length * words.length}`;
  }

  /** What a tree decides and the others of its frame do not: the heads of words that have several.
   * @param {import("./frames.js").Tree} tree @param {import("./frames.js").Frame} frame
   */
  function reading(tree, frame) {
    const open = words.map((_, i) => i).filter((i) => frame.trees.some((other) => other.heads[i] !== tree.heads[i]));
    const parts = open.map((i) => `${words[i]} ← ${words[tree.heads[i] - 1] ?? "root"}`);
    return parts.length ? parts.join(", ") : `${words[modifier - 1]} ← ${words[tree.heads[modifier - 1] - 1]}, for certain`;
  }

  /** One arc, as dark and wide as its marginal; the root's comes from above.
   * @param {number} to @param {number} from @param {number} weight
   */
  function arc(to, from, weight) {
    const sure = weight > 0.9995;
    const group = svg("g", { class: sure ? "arc" : "arc open", style: `--weight: ${weight}` });
    const x = middle(to);
    if (from === 0) {
      group.append(svg("path", { d: `M${x} 6V${floor - 4}` }));
    } else {
      const away = to > from ? 9 : -9;
      const [left, far] = [middle(from) + away, Math.abs(to - from)];
      const rise = RISE * far + (to < from ? 20 : 0); // two arcs between the same words, one each way, stay apart
      const top = floor - (rise + 8) / 0.75; // a curve rises to three quarters of its handles
      group.append(svg("path", { d: `M${left} ${floor - 2}C${left} ${top},${x} ${top},${x} ${floor - 4}` }));
      if (!sure) {
        const label = svg("text", { x: (left + x) / 2, y: floor - rise - 13 });
        label.textContent = shown(weight);
        group.append(label);
      }
    }
    group.append(svg("path", { class: "tip-of-arc", d: `M${x - 4} ${floor - 8}h8l-4 8z` }));
    return group;
  }
}
return { trees };
})();

const module_main = (() => {
/** The page: three panels, and the time that their handlers took, for whoever measures it. */

const { alignments } = module_alignments;
const { choices } = module_choices;
const { timings } = module_dom;
const { memories } = module_memories;
const { trees } = module_trees;

choices();
memories();
alignments();
trees();
Object.assign(globalThis, { explorerTimings: timings });
document.documentElement.dataset.ready = "true";
return {  };
})();
})();

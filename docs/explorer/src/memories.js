/** Second panel: queries fall into memories in the plane, the energy beneath, basins coloured. */

import { byId, calm, clamp, html, keySteps, onDrag, set, shown, slider, slices, svg, timed } from "./dom.js";
import { fused, gini, hard, kSubsets, norm, oscar, shannon, tsallis } from "./maps.js";
import { Memory, NEAR } from "./memory.js";

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
export function memories() {
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

/** First panel: the same scores through every map. */

import { byId, clamp, html, keySteps, onDrag, set, shown, slider, stepped, term, timed } from "./dom.js";
import {
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
} from "./maps.js";

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
export function choices() {
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

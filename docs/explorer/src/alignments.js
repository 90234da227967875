/** Third panel, first half: the alignment of a sentence pair moves as scores are dragged. */

import { align, SMOOTHERS } from "./alignment.js";
import { byId, clamp, html, keySteps, onDrag, set, shown, slider, stepped, timed } from "./dom.js";

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
export function alignments() {
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

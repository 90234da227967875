/** Third panel, second half: dependency trees, as frames that the library wrote. */

import { byId, calm, html, set, shown, slider, svg } from "./dom.js";
import { FRAMES } from "./frames.js";

const GAP = 72;
const RISE = 30;
const SPEED = 90;

/** Build the panel and keep it up to date. */
export function trees() {
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

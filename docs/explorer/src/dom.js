/** Elements, sliders, dragging, and the time that handlers take. */

/** @typedef {Record<string, string | number | boolean>} Attributes */

/** @param {Element} element @param {Attributes} attributes */
export function set(element, attributes) {
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
export function html(tag, attributes = {}, ...children) {
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
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** The element of the page with an id.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element #${id}`);
  return element;
}

/** A word with an explanation that shows on hover, focus and touch.
 * @param {string} word @param {string} meaning
 */
export function term(word, meaning) {
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
export function shown(value, digits = 2) {
  if (value === Infinity) return "∞";
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** Milliseconds of script of every call, by handler; the browser's test reads them.
 * @type {Record<string, number[]>}
 */
export const timings = {};

/** A handler that keeps account of its time.
 * @template {unknown[]} A
 * @param {string} name @param {(...args: A) => void} handler
 * @returns {(...args: A) => void}
 */
export function timed(name, handler) {
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
export function onDrag(element, name, move, end) {
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
export function keySteps(event, whole) {
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
export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** The nearest multiple of a step, as one would write it: 28 steps of 0.05 are 1.4, not 1.4000000000000001.
 * @param {number} value @param {number} step
 */
export function stepped(value, step) {
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
export function slider(knob, change) {
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
export function slices(name, budget = 4) {
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
export function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** The explorer's mathematics against numbers that the library wrote: `node --test docs/explorer/tests`. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { align, SMOOTHERS } from "../src/alignment.js";
import * as maps from "../src/maps.js";
import { Memory } from "../src/memory.js";

const numbers = JSON.parse(readFileSync(new URL("numbers.json", import.meta.url), "utf8"));

/** The Ω that a call such as "tsallis(1.5)" builds. */
function built(name) {
  const [, call, argument] = /^(\w+)(?:\((.*)\))?$/.exec(name);
  return argument === undefined ? maps[call]() : maps[call](Number(argument));
}

function close(ours, theirs, tolerance, what) {
  const bound = tolerance * Math.max(1, Math.abs(theirs));
  assert.ok(Math.abs(ours - theirs) <= bound, `${what}: ${ours}, the library has ${theirs}`);
}

const number = (value) => (value === null ? null : Number(value === "inf" ? Infinity : value === "-inf" ? -Infinity : value));

for (const name of new Set(numbers.maps.map((row) => row.omega))) {
  test(`${name} gives the library's weights, maximum, loss and margin`, () => {
    const omega = built(name);
    for (const row of numbers.maps.filter((each) => each.omega === name)) {
      const what = `${name} of ${row.scores} at temperature ${row.gamma}`;
      const choice = maps.choose(omega, row.scores, row.gamma);
      row.p.forEach((p, i) => close(choice.p[i], p, 1e-9, `${what}, weight ${i}`));
      row.p.forEach((p, i) => {
        if (p === 0 || p > 1e-9) assert.equal(choice.p[i] > 0, p > 0, `${what}: support at ${i}`);
      });
      close(choice.max, row.max, 1e-9, `${what}, maximum`);
      const target = maps.evenTarget(omega, row.scores.map(() => true));
      close(maps.loss(omega, row.scores, target, row.gamma), row.loss, 1e-8, `${what}, loss`);
      assert.equal(omega.margin, number(row.margin), `${what}, margin`);
    }
  });
}

test("the gradient of a loss is the choice minus the target", () => {
  const scores = [1.2, 0.8, 0.1, -0.5, 0.35];
  const step = 1e-6;
  for (const name of new Set(numbers.maps.map((row) => row.omega))) {
    const omega = built(name);
    const target = maps.evenTarget(omega, scores.map(() => true));
    const { p } = maps.choose(omega, scores, 0.7);
    scores.forEach((_, i) => {
      const moved = (by) => maps.loss(omega, scores.map((s, j) => (i === j ? s + by : s)), target, 0.7);
      close((moved(step) - moved(-step)) / (2 * step), p[i] - target[i], 1e-5, `${name}, entry ${i}`);
    });
  }
});

test("a target that an Ω does not allow is refused", () => {
  const two = [true, true, false, false];
  assert.equal(maps.evenTarget(maps.kSubsets(3), two), null);
  assert.deepEqual([...maps.evenTarget(maps.kSubsets(2), two)], [1, 1, 0, 0]);
  assert.equal(maps.evenTarget(maps.cappedGini(0.4), two), null);
  assert.equal(maps.evenTarget(maps.gini(), [false, false]), null);
});

for (const { patterns, queries, cases } of numbers.memories) {
  for (const row of cases) {
    test(`a memory with ${row.omega} at β = ${row.beta} has the library's energies, updates, ends and radii`, () => {
      const memory = new Memory(patterns, built(row.omega), row.beta);
      queries.forEach(([x, y], q) => {
        close(memory.energy(x, y), row.energy[q], 1e-9, `energy ${q}`);
        memory.step(x, y).forEach((at, axis) => close(at, row.step[q][axis], 1e-9, `step ${q}`));
        const found = memory.retrieve([x, y], 2000);
        assert.ok(found.converged);
        // Both stop once an update moves the state by little, which leaves them apart by more if updates contract slowly.
        found.path.at(-1).forEach((at, axis) => close(at, row.state[q][axis], 1e-5, `end ${q}`));
        row.weights[q].forEach((weight, i) => close(found.weights[i], weight, 1e-5, `weight ${i} of ${q}`));
      });
      const radii = memory.radii();
      if (row.radii === null) assert.equal(radii, null);
      else row.radii.map(number).forEach((radius, i) => (radius === -Infinity ? assert.equal(radii[i], radius) : close(radii[i], radius, 1e-9, `radius ${i}`)));
    });
  }
}

test("drawing names the end of a query as the retrieval does", () => {
  const { patterns } = numbers.memories[0];
  for (const name of ["gini", "tsallis(1.5)", "norm(2)", "hard"]) {
    const memory = new Memory(patterns, built(name), 4);
    for (let k = 0; k < 200; k++) {
      const query = [Math.cos(k) * (k % 13) * 0.1, Math.sin(k) * (k % 13) * 0.1];
      const { weights, whole } = memory.retrieve(query);
      const bits = whole ? weights.reduce((sum, weight, i) => sum + (weight > 0.5 ? 1 << i : 0), 0) : 0;
      assert.equal(memory.ends(...query), bits, `${name} from ${query}`);
    }
  }
});

for (const row of numbers.alignments) {
  test(`alignments smoothed by ${row.gamma} × ${row.omega} are the library's`, () => {
    const { value, marginals } = align(row.scores, SMOOTHERS[row.omega], row.gamma);
    close(value, row.value, 1e-10, "value");
    row.marginals.forEach((line, i) => line.forEach((p, j) => close(marginals[i][j], p, 1e-9, `marginal ${i}, ${j}`)));
  });
}

/** The page: three panels, and the time that their handlers took, for whoever measures it. */

import { alignments } from "./alignments.js";
import { choices } from "./choices.js";
import { timings } from "./dom.js";
import { memories } from "./memories.js";
import { trees } from "./trees.js";

choices();
memories();
alignments();
trees();
Object.assign(globalThis, { explorerTimings: timings });
document.documentElement.dataset.ready = "true";

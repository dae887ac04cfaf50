// Where the time of an attempt or of a step went. Asked for after the rest is there: it needs the whole recording.

import { ask, duration, el, link, part, percent } from "./dom.js";
import { stack } from "./compare.js";

const PARTS = {
  model: "a replica generated for it",
  queue: "a request of it waited for a replica to be chosen, in the replica's queue, or for its prompt to be computed; some engines do not tell the latter apart from the model",
  "held up": "an answer had been interrupted by new weights or a reclaim and waited to go on",
  start: "until its first request: the sandbox and the agent start",
  agent: "between an answer and the next request: tools, sandbox, and the agent's own work",
  end: "after its last answer: what the agent still did, and the grading of its work",
};
const COLOURS = { model: "c-generate", queue: "c-prefill-again", "held up": "c-switch", start: "c-other", agent: "c-wait-data", end: "c-validation" };

// A place on the page that fills itself, and looks again now and then: the whole recording is read less often than the
// rest. It stays from one drawing to the next.
const AGAIN_S = 5;
let kept = { name: "", box: null };
export function times(run, query, draw) {
  const name = run + JSON.stringify(query);
  if (kept.name !== name) kept = { name, box: el("div", { class: "times" }, el("p", { class: "soft" }, "reading where its time went …")) };
  const { box } = kept;
  clearTimeout(kept.timer);
  fill(kept, () => ask("run/" + part(run) + "/times?" + new URLSearchParams(query)), (told) => draw(told, run));
  return box;
}

async function fill(place, load, draw) {
  const told = await load().catch((error) => ({ failed: error.message }));
  const text = JSON.stringify(told);
  if (text !== place.last) place.box.replaceChildren(...(told.failed ? [el("p", { class: "soft" }, told.failed)] : draw(told).flat().filter(Boolean)));
  place.last = text;
  clearTimeout(place.timer);
  place.timer = setTimeout(() => { if (place.box.isConnected) fill(place, load, draw); }, 1000 * (document.hidden ? 10 : AGAIN_S));
}

export function ofAttempt(told) {
  if (told.why) return [el("p", { class: "soft" }, "Where its time went: " + told.why)];
  const idle = Object.entries(told.idle).filter(([, seconds]) => seconds > 0.05);
  return [
    el("div", { class: "strip-time", title: "from its beginning to its end" }, told.spans.map(([what, from, to]) =>
      el("i", { class: COLOURS[what], style: `left:${100 * from}%;width:${100 * Math.max(to - from, 0.002)}%`, title: what + " " + duration((to - from) * told.seconds) }))),
    el("p", { class: "legend" }, told.parts.map(([what, seconds]) => el("span", { title: PARTS[what] }, el("i", { class: "key " + COLOURS[what] }),
      what + " " + duration(seconds) + " (" + percent(told.seconds ? seconds / told.seconds : 0) + ")"))),
    el("p", { class: "soft", title: "Each moment in which a device had nothing to do is shared equally by the attempts under way then. All shares add up to the idle time." },
      "GPUs that waited for it: " + (idle.length ? idle.map(([pool, seconds]) => duration(seconds) + " of " + pool).join(", ") + " (device-seconds, its share)" : "none")),
  ];
}

export function ofStep(told, run) {
  if (told.why) return [el("p", { class: "soft" }, "Where the time of its devices went: " + told.why)];
  return [el("section", {}, el("h2", {}, "Where the time of its devices went"),
    Object.entries(told.pools).map(([pool, parts]) => stack(pool, parts)),
    told.idle > 0 ? el("p", { title: "Each moment in which a device had nothing to do is shared equally by the attempts under way then." },
      "Idle device time: " + duration(told.idle) + ", of which " + duration(told.alone) + " while no attempt was under way. ",
      told.blamed.length ? "The largest shares fall on: " : "",
      told.blamed.map(([key, seconds], at) => [at ? ", " : "", link("/run/" + part(run) + "/attempt/" + part(key), "attempt " + key.slice(0, 8)), " (" + duration(seconds) + ")"])) : "")];
}

// All runs of a folder.

import { ask, duration, el, link, number, part, when } from "./dom.js";

export const again_s = 2;
export const load = () => ask("runs");

const HEADS = [["run", "its folder, below the one that is watched"], ["state", "how it stands, or how it ended"], ["steps", "the last step that ended, of those planned"],
  ["reward", "mean reward of the rollouts that the last step trained"], ["last step", "how long it took, from its beginning to its end"],
  ["last change", "when a file of it was last written"], ["", undefined]];

export function draw(main, data) {
  const rows = [...data.runs].sort((a, b) => (b.changed ?? 0) - (a.changed ?? 0)).map((run) => el("tr", {},
    el("td", {}, link("/run/" + part(run.id), run.name)),
    el("td", {}, el("span", { class: "badge " + run.style }, run.state)),
    el("td", {}, run.step === null ? "–" : run.step + " of " + run.total_steps),
    el("td", {}, number(run.reward)),
    el("td", {}, duration(run.step_s)),
    el("td", {}, when(run.changed)),
    el("td", {}, [["steps", "#/run/" + part(run.id) + "/steps"], ["search", "#/run/" + part(run.id) + "/search"], ["compare", "#/compare/" + part(run.id)]]
      .map(([name, href]) => [el("a", { href }, name), " "]))));
  main.replaceChildren(el("h1", {}, "Runs"), rows.length
    ? el("section", {}, el("table", {}, el("thead", {}, el("tr", {}, HEADS.map(([name, title]) => el("th", { title }, name)))), el("tbody", {}, rows)))
    : el("p", { class: "absent" }, "There is no run in this folder yet. A run appears here when it has begun."));
}

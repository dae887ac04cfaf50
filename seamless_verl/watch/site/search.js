// Where a text occurs in a run: in names and errors, in conversations, in the text of trained rows.

import { ask, bar, el, link, number, part } from "./dom.js";

export const again_s = 3600; // an answer stays as it is until it is asked for again
// A look takes the server half a second; while there is nothing to show, the next one follows.
const LOOKS = 12;
export async function load({ run, text, start }) {
  if (!text) return { run: (await ask("runs")).runs.find((one) => one.id === run) };
  let told = { named: [], onward: start ?? 0 };
  for (let look = 0; look < LOOKS && told.onward !== null && !(told.named.length || told.found?.length); look += 1) {
    told = await ask("run/" + part(run) + "/search?" + new URLSearchParams({ text, start: told.onward }));
  }
  return told;
}

export function draw(main, data, { run, text, start }) {
  const to = (query) => "#/run/" + part(run) + "/search?" + new URLSearchParams(query);
  const box = el("input", { type: "search", "data-focus": "search", value: text ?? "", placeholder: "prompt, answer, task, tool, error, id", "aria-label": "search",
    onchange: (event) => { if (event.target.value) location.hash = to({ text: event.target.value }); } });
  main.replaceChildren(el("h1", {}, "Search"), el("div", { class: "controls" }, box,
    el("span", { class: "soft" }, "in names, tasks, errors and drift reasons, in conversations that are kept, and in the text of trained rows; letters in either case")));
  if (!text) return void box.focus();
  const found = [...data.named.map((attempt) => line(attempt, run)), ...data.found.map((find) => line(find.attempt, run, find))];
  main.append(...[
    found.length ? el("section", {}, found) : el("p", { class: "absent" }, data.onward === null ? "Nothing of this run has that in it." : "Nothing so far."),
    data.all_named ? "" : el("p", { class: "soft" }, "More names than are shown have it, or there was no time for all of them."),
    data.onward === null ? "" : el("p", {}, el("a", { href: to({ text, start: data.onward }), "data-item": true }, "look further"),
      " ", el("span", { class: "soft" }, data.onward + " of " + data.of + " conversations and files were looked through, the latest first")),
    data.why_no_text ? el("p", { class: "problems" }, data.why_no_text + " Conversations are searched as numbers.") : ""].filter(Boolean));
}

function line(attempt, run, find) {
  const turn = find?.turn === undefined ? "" : "?turn=" + find.turn;
  return el("div", { class: "find" }, bar(attempt.reward, 0, 1, "reward " + number(attempt.reward)),
    el("div", {}, link("/run/" + part(run) + "/attempt/" + part(attempt.key) + turn,
      (attempt.step === null || attempt.step === undefined ? "not trained" : "step " + attempt.step) + " · " + (attempt.task ?? attempt.group) + " · attempt " + (attempt.index ?? "?") +
      (find?.turn === undefined ? "" : " · turn " + find.turn)),
    find ? el("p", { class: "soft" }, find.where + ": ", find.before, el("mark", {}, find.found), find.after)
      : el("p", { class: "soft" }, [attempt.status, attempt.detail, attempt.session].filter(Boolean).join(" · "))));
}

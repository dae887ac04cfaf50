// The steps of a run, and the groups of one step with their attempts side by side.

import { ask, bar, brief, duration, el, link, marks, number, part, range } from "./dom.js";
import { ofStep, times } from "./times.js";

function notes(data) {
  const told = data.problems.map((one) => "not read: " + one);
  if (data.is_behind) told.push("This run is still being read: more comes by itself.");
  return told.length ? el("ul", { class: "problems" }, told.map((one) => el("li", {}, one))) : "";
}

const HEADS = [["step", "training step; attempts that none is known to have trained stand at the end"], ["groups", "prompts, each with its attempts"], ["attempts", "of agents, in these groups; as reward and marks, of the latest where not all are counted"],
  ["reward", "mean over the rollouts of the step"], ["time", "of the step, from its beginning to its end"], ["trained tokens/s", "tokens that carried a gradient, over the time of the step"],
  ["staleness ≤", "most versions between the weights of a row's first token and those that the step changed"], ["groups that are", "how many groups have an attempt like that; a click shows them"]];

export const all = {
  again_s: 2,
  load: ({ run }) => ask("run/" + part(run) + "/steps"),
  draw(main, data, { run }) {
    const rows = data.steps.map((step) => el("tr", {},
      el("td", {}, link("/run/" + part(run) + "/step/" + part(step.step), step.step === "none" ? "not trained, or not said by which step" : step.step)),
      el("td", {}, (step.counted < step.groups ? "the latest " + number(step.counted) + " of " : "") + number(step.groups)), el("td", {}, number(step.attempts)), el("td", {}, number(step.reward)), el("td", {}, duration(step.step_s)),
      el("td", {}, number(step.tokens_per_s, 0)), el("td", {}, number(step.staleness_max)),
      el("td", {}, Object.entries(step.flags).map(([flag, count]) =>
        el("a", { href: "#/run/" + part(run) + "/step/" + part(step.step) + "?flag=" + part(flag), class: "mark", title: data.flags[flag] }, count + " × " + flag)))));
    main.replaceChildren(el("h1", {}, "Steps"), notes(data), rows.length
      ? el("section", {}, el("table", {}, el("thead", {}, el("tr", {}, HEADS.map(([name, title]) => el("th", { title }, name)))), el("tbody", {}, rows)))
      : el("p", { class: "absent" }, "No attempt of an agent is recorded here yet. verl's own agent loops leave none; rows are kept where trainer.rollout_data_dir names a folder."));
  },
};

export const one = {
  again_s: 2,
  load: ({ run, step, sort, flag, text, start }) => ask("run/" + part(run) + "/groups?" + new URLSearchParams({ step, sort: sort ?? "as begun", flag: flag ?? "", text: text ?? "", start: start ?? 0 })),
  draw(main, data, params) {
    const go = (change) => {
      const { run, step, ...asked } = { ...params, start: "", ...change };
      const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value));
      location.replace("#/run/" + part(run) + "/step/" + part(step) + (query.size ? "?" + query : ""));
    };
    const choice = (name, label, options, value) => el("label", {}, label + " ", el("select", { "data-focus": name, onchange: (event) => go({ [name]: event.target.value }) },
      options.map(([key, text, title]) => el("option", { value: key, selected: key === value, title }, text))));
    const controls = el("div", { class: "controls" },
      choice("sort", "order", data.sorts.map((sort) => [sort, sort]), params.sort ?? "as begun"),
      choice("flag", "only", [["", "all groups"], ...Object.entries(data.flags).map(([flag, title]) => [flag, flag, title])], params.flag ?? ""),
      el("label", {}, "with ", el("input", { type: "search", "data-focus": "search", value: params.text ?? "", placeholder: "task, id, status or drift reason  ( / )",
        onchange: (event) => go({ text: event.target.value }) })),
      el("span", { class: "soft" }, data.matching + " of " + (data.of < data.in_all ? "the latest " + data.of + " of " + number(data.in_all) : data.of) + " groups"));
    const more = (start, label) => el("button", { onclick: () => go({ start }) }, label);
    main.replaceChildren(el("h1", {}, data.step === "none" ? "Attempts that no step has trained" : "Step " + data.step), notes(data),
      data.step === "none" ? "" : times(params.run, { step: data.step }, ofStep), controls,
      ...data.groups.map((group) => groupBox(group, params.run, data.flags)),
      el("p", {}, Number(params.start ?? 0) ? more("", "the first groups") : "", " ", data.onward === null ? "" : more(data.onward, "more groups")),
      data.groups.length ? "" : el("p", { class: "absent" }, "No group of this step is like that."));
  },
};

// Asked for by a click, kept as long as the page is.
const parted = new Map();
function partings(group, run) {
  const name = run + "/" + group.group, place = el("div", { class: "partings" });
  if (group.attempts.length < 2) return "";
  const shows = () => place.replaceChildren(...[
    el("button", { title: "the turn and the token at which each attempt leaves the first one", onclick: reads }, "where do they part?"),
    ...(parted.has(name) ? parting(parted.get(name), group, run) : [])].filter(Boolean));
  const reads = async () => {
    parted.set(name, await ask("run/" + part(run) + "/partings?group=" + part(group.group)).catch((error) => ({ why: error.message })));
    shows();
  };
  shows();
  return place;
}

function parting(told, group, run) {
  const numbers = new Map(group.attempts.map((one) => [one.key, one.index ?? one.key.slice(0, 8)]));
  const to = (key, turn) => "/run/" + part(run) + "/attempt/" + part(key) + (turn === null ? "" : "?turn=" + turn);
  if (told.why) return [el("p", { class: "soft" }, told.why)];
  if (told.first === null) return [el("p", { class: "soft" }, "Neither tokens nor text of these attempts are left to compare.")];
  return [el("table", {}, el("thead", {}, el("tr", {}, [["attempt", "of the group"], ["parts from attempt " + numbers.get(told.first), "the first of the group of which something is left"], ["both", "the last text that both share"],
    ["attempt " + numbers.get(told.first), "how that one goes on"], ["this one", "how this one goes on"]].map(([name, title]) => el("th", { title }, name)))),
    el("tbody", {}, told.parted.map((one) => el("tr", {}, el("td", {}, link(to(one.key, one.turn), "attempt " + numbers.get(one.key))), el("td", {}, placed(one, told.unit)),
      [one.before, one.first, one.this].map((text) => el("td", { class: "said" }, brief(text, 400))))))),
  told.missing.length ? el("p", { class: "soft" }, "Nothing is left of attempt " + told.missing.map((key) => numbers.get(key)).join(", ") + ".") : null];
}

function placed(one, unit) {
  const after = (count) => "after " + count.toLocaleString("en") + " " + unit + (count === 1 ? "" : "s");
  if (one.place === "same") return "nowhere: the same " + one.at.toLocaleString("en") + " " + unit + "s";
  if (one.turn === null) return after(one.at) + " of the text";
  if (one.place === "end") return "one ends where the other goes on, " + after(one.at);
  return (one.place === "answer" ? "in its answer of turn " : "in what it was given for turn ") + one.turn + ", " + after(one.into);
}

export function groupBox(group, run, explained, here) {
  const [low, high] = range(group.attempts);
  return el("section", { class: "group" }, el("h3", {}, brief(group.attempts.find((one) => one.task)?.task ?? (group.group || "(no group)")), " ", marks(group.flags, explained)),
    el("p", { class: "soft" }, "reward " + number(group.reward) + (group.seconds === null ? "" : " · slowest " + duration(group.seconds)) +
      (group.tokens === null ? "" : " · " + number(group.tokens) + " generated tokens")),
    el("div", { class: "strip" }, group.attempts.map((attempt) => el("a", {
      href: "#/run/" + part(run) + "/attempt/" + part(attempt.key), "data-item": true,
      class: attempt.key === here ? "here" : "", title: about(attempt) },
      bar(attempt.reward, low, high, ""), el("small", {}, number(attempt.reward, 2)), attempt.flags.length ? el("b", {}, "•") : null))), partings(group, run));
}

function about(attempt) {
  return ["attempt " + (attempt.index ?? "?") + ", reward " + number(attempt.reward),
    attempt.turns ? attempt.turns + " turns" : "", attempt.tokens ? attempt.tokens + " tokens" : "",
    attempt.seconds ? duration(attempt.seconds) : "", attempt.status ?? attempt.state ?? "",
    ...attempt.flags].filter(Boolean).join(" · ");
}

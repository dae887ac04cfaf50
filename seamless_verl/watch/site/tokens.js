// A row as it is trained, token by token: mask, log-prob, advantage and ratio as heat, weight version as colour, seams of
// interruptions.

import { askUnlessSeen, copies, el, number, part } from "./dom.js";

export const again_s = 5;
export const load = ({ run, key, row }) => askUnlessSeen("run/" + part(run) + "/tokens?key=" + part(key) + "&row=" + part(row));
const PER_PAGE = 4000;
const SIGNALS = ["advantage", "ratio"];

export function draw(main, data, params) {
  const by = params.by ?? (data.seams.length || new Set(data.versions.filter((version) => version >= 0)).size > 1 ? "version" : "log-prob"), from = Math.max(0, Number(params.from ?? 0) || 0);
  const to = Math.min(data.token_ids.length, from + PER_PAGE);
  const at = (change) => "#/run/" + part(params.run) + "/tokens/" + part(params.key) + "/" + part(change.row ?? params.row) + "?" +
    new URLSearchParams({ by, from, ...change });
  const trained = data.mask.reduce((sum, one) => sum + one, 0);
  const page = (start, label) => (start >= 0 && start < data.token_ids.length ? el("a", { href: at({ from: start }) }, label) : null);
  main.replaceChildren(
    el("h1", {}, "Row " + data.row, el("small", { class: "soft" }, " of " + data.num_rows)),
    el("p", {}, data.token_ids.length + " tokens, " + trained + " of them trained; " + (data.seams.length
      ? "new weights took over at token " + data.seams.join(", ") : "no answer was taken over by new weights") +
      ". " + signalled(data)),
    data.why_no_text ? el("p", { class: "problems" }, data.why_no_text) : "",
    el("div", { class: "controls" }, "colour: ", ["log-prob", "mask", "version", ...SIGNALS.filter((name) => data.signals?.[name])].map((name) =>
      el("a", { href: at({ by: name }), class: name === by ? "mark here" : "mark", "data-item": true }, name)),
    Array.from({ length: data.num_rows }, (_, row) => el("a", { href: at({ row, from: 0 }), class: row === data.row ? "mark here" : "mark" }, "row " + row)),
    copies("copy row as JSON", () => JSON.stringify(plain(data))),
    data.turns.map((turn, index) => copies("copy answer " + index + " as curl", () => curl(data, turn)))),
    legend(data, by),
    el("p", {}, page(from - PER_PAGE, "← earlier tokens"), " ", page(from + PER_PAGE, "later tokens →")),
    el("section", { class: "tokens", dir: "ltr" }, Array.from({ length: to - from }, (_, index) => token(data, from + index, by))));
}

function token(data, at, by) {
  const text = data.texts[at], generated = data.versions[at] >= 0;
  const told = ["token " + at, "id " + data.token_ids[at], data.mask[at] ? "trained" : generated ? "generated, not trained in this row" : "given"];
  if (data.mask[at]) told.push("log-prob " + number(data.log_probs[at], 4), "probability " + number(Math.exp(data.log_probs[at]), 4));
  if (generated) told.push("weights of version " + data.versions[at]);
  const signals = data.signals;
  if (signals && data.mask[at]) {
    told.push(...[...SIGNALS, "weight"].filter((name) => signals[name]).map((name) => MEANS[name] + " " + number(signals[name][at], 4)));
    if (!signals.counted[at]) told.push("left out of the loss by the trainer");
  }
  const style = SIGNALS.includes(by) && signals?.[by] && data.mask[at] ? `background:${heat(by === "ratio" ? Math.log(signals.ratio[at]) * 4 : signals.advantage[at])}`
    : by === "log-prob" && data.mask[at] ? `background:hsl(${Math.round(120 * Math.exp(data.log_probs[at]))} 60% 50% / 0.45)`
    : by === "version" && generated ? `background:${colour(data.versions[at])}` : "";
  return [data.seams.includes(at) ? el("span", { class: "seam", title: "from here on with newer weights" }, "⇥") : null,
    el("span", { class: data.mask[at] ? "trained" : generated ? "generated" : "given", title: told.join(" · "), style },
      text === "" ? "∅" : text.replaceAll("\n", "⏎\n"))];
}

const MEANS = { advantage: "advantage", ratio: "ratio (the trainer's probability before the update over the rollout's)", weight: "weight of the off-policy correction" };

function signalled({ signals }) {
  if (!signals) return "Advantage and ratio are not here: the row is not trained yet, or the run kept none (trainer.rollout_data_dir=null).";
  const known = signals.advantage.filter((value) => value !== null);
  const [low, high] = [Math.min, Math.max].map((of) => number(known.reduce((a, b) => of(a, b)), 3));
  return "Advantage " + (low === high ? low : low + " to " + high) + (signals.ratio ? "" : "; no ratio (the trainer took the rollout's log-probs for its own)") +
    ". What PPO clips is decided within the update and not kept.";
}

// 0 is clear, 1 and more in full.
const heat = (value) => `hsl(${value > 0 ? 130 : 0} 60% 45% / ${(0.6 * Math.min(1, Math.abs(value))).toFixed(2)})`;

const colour = (version) => `hsl(${(version * 67) % 360} 60% 50% / 0.4)`;

function legend(data, by) {
  if (by === "version") {
    return el("p", { class: "legend" }, [...new Set(data.versions)].filter((version) => version >= 0).sort((a, b) => a - b)
      .map((version) => el("span", {}, el("i", { class: "key", style: `background:${colour(version)}` }), "version " + version)));
  }
  if (SIGNALS.includes(by)) {
    return el("p", { class: "legend" }, by === "advantage" ? "green: made likelier by the update; red: made less likely; clear: nothing. Underlined: trained."
      : "green: the trainer's weights find the token likelier than those that made it did; red: less likely; clear: as likely. Underlined: trained.");
  }
  return el("p", { class: "legend" }, by === "log-prob" ? "green: the model was sure of this token; red: it was unlikely. Underlined: trained."
    : "underlined: trained in this row; grey: given. Generated tokens that another row trains are not underlined.");
}

const plain = (data) => ({ token_ids: data.token_ids, mask: data.mask, log_probs: data.log_probs, versions: data.versions, texts: data.texts, prompt_len: data.prompt_len, turns: data.turns, signals: data.signals });

// The prompt as the engine got it; what the trainer decided about sampling is on the attempt's page.
function curl(data, [start, stop]) {
  const body = { model: "MODEL", prompt: data.token_ids.slice(0, start), max_tokens: stop - start, temperature: 1.0, return_tokens_as_token_ids: true, logprobs: 1 };
  return "curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '" + JSON.stringify(body) + "'";
}

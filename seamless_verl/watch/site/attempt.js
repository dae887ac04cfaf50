// One attempt: its conversation turn by turn, with branches, and where a history left what was recorded.

import { ask, askUnlessSeen, begins, brief, duration, el, folded, length, link, long as cut, number, part, when } from "./dom.js";
import { groupBox } from "./steps.js";
import { ofAttempt, times } from "./times.js";

export const again_s = 1;
export const load = ({ run, key }) => askUnlessSeen("run/" + part(run) + "/attempt?key=" + part(key));

let scrolled = "", whole = null;
const long = (text, className) => cut(text, className, whole);

export function draw(main, data, { run, key, turn }) {
  const attempt = data.attempt;
  whole = async (at) => (await ask("run/" + part(run) + "/text?key=" + part(key) + "&at=" + part(at))).text;
  main.replaceChildren(
    el("h1", {}, "Attempt " + (attempt.index ?? "") + " ", el("span", { class: "badge " + (attempt.state === "open" ? "open" : "good") }, attempt.state === "open" ? "under way" : attempt.status ?? attempt.state ?? "recorded")),
    el("div", { class: "columns" }, facts(attempt), rewards(attempt)),
    attempt.session ? times(run, { key: attempt.session }, ofAttempt) : "",
    groupBox(data.group, run, {}, key),
    attempt.damage ? el("p", { class: "problems" }, attempt.damage) : "",
    data.why_no_text ? el("p", { class: "problems" }, data.why_no_text) : "",
    data.rows.length ? el("p", {}, "Rows, token by token: ", data.rows.map((row, index) =>
      [link("/run/" + part(run) + "/tokens/" + part(key) + "/" + index, "row " + index + " (" + row.tokens + " tokens, " + row.trained + " trained)"), " "])) : "",
    ...data.turns.map((one) => turnBox(one, depth(one, data.turns), "/run/" + part(run) + "/attempt/" + part(key))),
    data.why_no_turns ? el("p", { class: "absent" }, data.why_no_turns) : "",
    ...(data.turns.length ? [] : data.texts.map(textBox)));
  const wanted = main.querySelector(`[data-turn="${Number(turn)}"]`);
  wanted?.classList.add("here");
  if (wanted && scrolled !== location.hash) wanted.scrollIntoView();
  scrolled = location.hash;
}

function facts(attempt) {
  const known = attempt.oldest !== null && attempt.oldest !== undefined;
  const told = [["reward", number(attempt.reward), "what the agent's runner gave it"], ["trained in step", attempt.step ?? "none known", "whose rows it is part of, as verl wrote them down"],
    ["task", attempt.task ?? "not recorded", "its name in the data"], ["group", attempt.group, "attempts at the same prompt; advantages compare them"], ["session", attempt.session ?? "not recorded", "its name at the proxy"],
    ...(attempt.detail ? [["what went wrong", attempt.detail, "in the runner's words"]] : []),
    ["turns", number(attempt.turns), "requests that were answered"], ["generated tokens", number(attempt.tokens), "of all answers"], ["time", duration(attempt.seconds), "from its beginning to its end, tools included"],
    ["weight versions", !known ? "–" : attempt.oldest === attempt.newest ? attempt.oldest : attempt.oldest + " to " + attempt.newest, "that generated its tokens, the oldest and the newest"],
    ["answers cut off", number(attempt.cut), "that ended at their limit of tokens"], ["taken over by new weights", number(attempt.seams), "places within answers from which newer weights went on"],
    ["drift", Object.entries(attempt.drift).map(([reason, count]) => count + " × " + reason.replaceAll("_", " ")).join(", ") || "none", "why requests did not continue what was recorded; the turn says what each means"],
    ["began", when(attempt.began), "in this browser's time"]];
  return el("dl", {}, told.map(([name, value, title]) => [el("dt", { title }, name), el("dd", { title }, brief(value, 2000))]));
}

function rewards(attempt) {
  const told = [...Object.entries(attempt.rewards ?? {}).map(([name, value]) => [name, number(value), "a part of the reward"]),
    ...Object.entries(attempt.sampling ?? {}).map(([name, value]) => ["sampling: " + name, JSON.stringify(value), "decided by the trainer for every request"]),
    ...Object.entries(attempt.metadata ?? {}).map(([name, value]) => ["metadata: " + name, JSON.stringify(value), "given when the session was opened"])];
  return told.length ? el("dl", {}, told.map(([name, value, title]) => [el("dt", { title }, name), el("dd", { title }, brief(value, 2000))])) : null;
}

// How many branches lie between a turn and the beginning: a turn that its parent's first child follows stays level.
function depth(turn, turns) {
  const by = new Map(turns.map((one) => [one.ordinal, one]));
  let found = 0;
  for (let at = turn; at; at = by.get(at.parent)) if (at.kind === "fork" && at.ordinal) found += 1;
  return Math.min(found, 6);
}

function turnBox(turn, level, path) {
  const key = turn.generation_id, said = turn.answer;
  const told = [turn.parent === null ? "begins a conversation" : "continues turn " + turn.parent,
    turn.prompt_tokens + " prompt tokens", turn.generated_tokens + " generated", "ended by " + turn.finish_reason,
    "weights " + turn.versions.map(([version, tokens]) => turn.versions.length > 1 ? version + " (" + tokens + " tokens)" : version).join(" → ")];
  return el("section", { class: "turn", "data-turn": turn.ordinal, style: `margin-left:${24 * level}px` },
    el("h3", {}, link(path + "?turn=" + turn.ordinal, "turn " + turn.ordinal), " · " + told.join(" · "), " ", turn.kind === "clean" ? "" : el("span", { class: "mark" }, turn.kind),
      turn.reasons.map((reason) => el("span", { class: "mark", title: reason.explained }, reason.name))),
    turn.respelled ? respelledBox(turn) : turn.detail ? el("p", { class: "soft" }, "in the renderer's words: " + begins(turn.detail)) : "",
    turn.parting ? partingBox(turn) : "",
    folded(key + "given", "what the model was given" + (turn.num_cut ? " (after " + turn.num_cut + " tokens of the answer before were left out)" : ""), long(turn.given, "given"), length(turn.given) < 1500),
    said?.reasoning ? folded(key + "reasoning", "reasoning", long(said.reasoning, "answer")) : "",
    said && !said.content && (said.tool_calls.length || said.reasoning) ? "" : long(said ? said.content : turn.text, "answer"),
    (said?.tool_calls ?? []).map((call, index) => folded(key + "call" + index, "calls " + brief(begins(call.name)), long(call.arguments, "answer"))),
    said && (length(turn.text) !== length(said.content) || begins(turn.text) !== begins(said.content)) ? folded(key + "text", "as it was generated, special tokens included", long(turn.text, "answer")) : "",
    said?.overrides.length ? el("p", { class: "soft" }, "decided by the trainer: " + said.overrides.join(", ")) : "");
}

function partingBox(turn) {
  const { parting } = turn, reasons = turn.reasons.map((reason) => reason.explained).join("; ");
  return folded(turn.generation_id + "parting", "where this request left what was recorded, after " + parting.at + " tokens", el("div", {},
    el("p", {}, reasons),
    el("p", { class: "soft" }, "the last text that both share:"), el("p", { class: "soft" }, "…"), long(parting.before, "given"),
    el("div", { class: "columns" },
      el("div", {}, el("h3", {}, "recorded (" + parting.recorded_tokens + " tokens more)"), long(parting.recorded, "recorded")),
      el("div", {}, el("h3", {}, "what the request said (" + parting.sent_tokens + " tokens more)"), long(parting.sent, "sent")))), true);
}

function respelledBox(turn) {
  return folded(turn.generation_id + "respelled", "what this request spelled otherwise; the recorded tokens stay", el("div", { class: "columns" },
    el("div", {}, el("h3", {}, "recorded"), long(turn.respelled.recorded || "not kept beside the prompt: see what the model was given", "recorded")),
    el("div", {}, el("h3", {}, "what the request said"), long(turn.respelled.sent, "sent"))), true);
}

function textBox(text) {
  return el("section", { class: "turn" }, el("h3", {}, "row " + text.row + " of step " + text.step + ", score " + number(text.score)),
    long(text.input, "given"), long(text.output, "answer"), text.gts ? [el("p", { class: "soft" }, "ground truth:"), long(text.gts)] : "");
}

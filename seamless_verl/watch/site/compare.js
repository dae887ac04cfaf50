// Two runs over each other: curves by step, where the time of their devices went, figures of the whole.

import { ask, copies, el, link, part, percent } from "./dom.js";

export const again_s = 5;
const STYLES = ["one", "other"];

export async function load({ run, other }) {
  const { runs } = await ask("runs");
  const sides = await Promise.all([run, other].filter(Boolean).map((id) =>
    ask("run/" + part(id) + "/figures").catch((error) => ({ run: runs.find((one) => one.id === id), why: error.message }))));
  return { runs: runs.map((one) => [one.id, one.name]), sides, run: sides[0].run };
}

export function draw(main, data, { run, other }) {
  const { sides } = data, path = (a, b) => "#/compare/" + part(a) + (b ? "/" + part(b) : "");
  const choice = (id, go) => el("select", { onchange: (event) => { location.hash = go(event.target.value); } },
    id ? "" : el("option", { value: "" }, "choose a run …"), data.runs.map(([key, name]) => el("option", { value: key, selected: key === id }, name)));
  main.replaceChildren(el("h1", {}, "Compare"),
    el("div", { class: "controls" }, el("i", { class: "key one" }), choice(run, (id) => path(id, other)), " with ", el("i", { class: "key other" }), choice(other, (id) => path(run, id))),
    ...sides.filter((side) => side.why).map((side) => el("p", { class: "problems" }, (side.run?.name ?? "a run") + ": " + side.why)),
    other ? "" : whatIf(data.run),
    el("section", {}, el("h2", {}, "Figures"), table(sides)),
    el("section", {}, el("h2", {}, "Where device time went"), el("p", { class: "lead" }, "Share of each pool's device-seconds in steps."), ledgers(sides)),
    el("section", {}, el("h2", {}, "By step"), el("div", { class: "curves" }, names(sides, "curves").map((name) => curve(name, sides)))));
}

// The simulator writes a run like any other; the server itself starts nothing.
function whatIf(run) {
  const command = "seamless-verl simulate --from " + (run?.path ?? "RUN") + " --set scheduler.policy=predictive --out runs/what-if";
  return el("p", {}, "To lay it over itself under another policy, let the simulator replay it and choose the run that this writes: ",
    el("code", {}, command), " ", copies("copy", () => command));
}

const names = (sides, what) => [...new Set(sides.flatMap((side) => (side[what] ?? []).map((one) => one.name ?? one[0])))];

function table(sides) {
  const value = (side, name) => (side.facts ?? []).find((fact) => fact[0] === name);
  return el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, ""), sides.map((side, at) => el("th", {}, el("i", { class: "key " + STYLES[at] }), side.run?.name ?? "")))),
    el("tbody", {}, names(sides, "facts").map((name) => el("tr", { title: sides.map((side) => value(side, name)?.[2]).find(Boolean) },
      el("td", {}, name), sides.map((side) => el("td", {}, value(side, name)?.[1] ?? "–"))))));
}

function ledgers(sides) {
  return el("div", {}, sides.map((side, at) => [el("h3", {}, el("i", { class: "key " + STYLES[at] }), side.run?.name ?? ""),
    Object.entries(side.pools ?? {}).map(([pool, parts]) => stack(pool, parts))]));
}

// One pool's device-seconds as a bar, and in words beneath.
export function stack(pool, parts) {
  const total = parts.reduce((sum, one) => sum + one[2], 0);
  return el("div", {}, el("small", {}, pool),
    el("div", { class: "share" }, parts.map(([name, style, value]) => el("i", { class: style, style: `flex-grow:${value / total}`, title: name + " " + percent(value / total) }))),
    el("p", { class: "legend" }, parts.map(([name, style, value]) => el("span", {}, el("i", { class: "key " + style }), name + " " + percent(value / total)))));
}

const W = 360, H = 130, LEFT = 52, FOOT = 18;
const drawn = (tag, given, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  if (text !== undefined) made.append(document.createTextNode(text));
  return made;
};

function curve(name, sides) {
  const lines = sides.map((side) => (side.curves ?? []).find((one) => one.name === name));
  const points = lines.flatMap((line) => line?.points ?? []);
  const [first, last] = [Math.min(...points.map((one) => one[0])), Math.max(...points.map((one) => one[0]))];
  const [low, high] = [Math.min(0, ...points.map((one) => one[1])), Math.max(...points.map((one) => one[1]))];
  const x = (step) => LEFT + (W - LEFT - 6) * (last > first ? (step - first) / (last - first) : 0.5);
  const y = (value) => 6 + (H - FOOT - 6) * (high > low ? 1 - (value - low) / (high - low) : 0.5);
  const svg = drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": name });
  for (const value of [low, high]) {
    svg.append(drawn("line", { class: "rule", x1: LEFT, x2: W - 6, y1: y(value), y2: y(value) }), drawn("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(drawn("text", { x: LEFT, y: H - 3 }, "step " + first), drawn("text", { x: W - 6, y: H - 3, "text-anchor": "end" }, "step " + last));
  lines.forEach((line, at) => {
    if (!line) return;
    svg.append(drawn("polyline", { class: "line " + STYLES[at], points: line.points.map(([step, value]) => x(step).toFixed(1) + "," + y(value).toFixed(1)).join(" ") }));
    for (const [step, value] of line.points.length <= 200 ? line.points : []) {
      const dot = drawn("circle", { class: "dot " + STYLES[at], cx: x(step), cy: y(value), r: 3 });
      dot.append(drawn("title", {}, (sides[at].run?.name ?? "") + ", step " + step + ": " + short(value)));
      svg.append(dot);
    }
  });
  return el("figure", {}, el("figcaption", { title: lines.find(Boolean)?.about }, name), svg);
}

const short = (value) => (Math.abs(value) >= 1000 ? (value / 1000).toFixed(1) + "k" : Math.abs(value) >= 10 || Number.isInteger(value) ? value.toFixed(0)
  : Math.abs(value) >= 0.01 ? value.toFixed(3) : value.toPrecision(2));

// Which view is shown, kept up to date: an address after the # names it, so that it can be sent to a colleague.

import { el, link, part, Refused } from "./dom.js";
import * as attempt from "./attempt.js";
import * as compare from "./compare.js";
import * as run from "./run.js";
import * as runs from "./runs.js";
import * as search from "./search.js";
import * as steps from "./steps.js";
import * as tokens from "./tokens.js";

// `load` asks the server, `draw` makes the view of what it said; `again_s` is when to ask again.
const VIEWS = [
  [/^\/$/, runs, []],
  [/^\/run\/([^/]+)$/, run, ["run"]],
  [/^\/run\/([^/]+)\/steps$/, steps.all, ["run"]],
  [/^\/run\/([^/]+)\/search$/, search, ["run"]],
  [/^\/compare\/([^/]+)$/, compare, ["run"]],
  [/^\/compare\/([^/]+)\/([^/]+)$/, compare, ["run", "other"]],
  [/^\/run\/([^/]+)\/step\/([^/]+)$/, steps.one, ["run", "step"]],
  [/^\/run\/([^/]+)\/attempt\/([^/]+)$/, attempt, ["run", "key"]],
  [/^\/run\/([^/]+)\/tokens\/([^/]+)\/(\d+)$/, tokens, ["run", "key", "row"]],
];
const main = document.getElementById("view"), where = document.getElementById("where");
const trouble = document.getElementById("trouble");
let round = 0, last = "", timer = 0, leave = () => {};

function address() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  for (const [pattern, view, names] of VIEWS) {
    const found = pattern.exec(path);
    if (!found) continue;
    const params = Object.fromEntries(new URLSearchParams(query ?? ""));
    names.forEach((name, index) => { params[name] = decodeURIComponent(found[index + 1]); });
    return { view, params };
  }
  return { view: runs, params: {} };
}

async function show() {
  clearTimeout(timer);
  leave();
  leave = () => {};
  last = "";
  main.replaceChildren(el("p", { class: "absent" }, "reading …"));
  await refresh(++round, true);
}

async function refresh(mine, first) {
  const { view, params } = address();
  let behind = false;
  try {
    const data = await view.load(params);
    behind = data.is_behind; // a large run is read as long as somebody looks
    if (mine !== round) return;
    // How the run stands is in every answer and changes all the time; only the list of runs shows it.
    const text = data?.mark ?? JSON.stringify(data, (key, value) => (key === "run" ? value?.name : value)) ?? "";
    const waits = !first && text !== last && busy();
    if (first || (text !== last && !waits)) draw(view, data, params);
    if (!waits) last = text;
    trouble.hidden = !waits;
    trouble.textContent = waits ? "There is something new. It is shown when no text is selected, and what you type is sent." : "";
  } catch (error) {
    if (mine !== round) return;
    trouble.hidden = false;
    trouble.textContent = error instanceof Refused ? error.message
      : "The server does not answer; what you see is the last that it said. (" + error.message + ")";
    if (first) main.replaceChildren();
    if (!(error instanceof Refused || error instanceof TypeError)) console.error(error);
  }
  const again_s = document.hidden ? 10 : behind ? 0.3 : view.again_s;
  clearTimeout(timer); // a look may have begun beside it: back in this tab
  timer = setTimeout(() => refresh(mine, false), 1000 * again_s);
}

// Drawing anew would take it away: text that is being typed, or is selected.
function busy() {
  const typed = document.activeElement, chosen = getSelection();
  return (typed.tagName === "INPUT" && typed.value !== typed.defaultValue) || (!chosen.isCollapsed && main.contains(chosen.anchorNode));
}

const SCROLLED = ".text, .scroll, #lane-scroll";
const keyOf = (one) => one.dataset.key ?? one.querySelector("summary")?.textContent;

function draw(view, data, params) {
  const open = new Map([...main.querySelectorAll("details")].map((one) => [keyOf(one), one.open]));
  const places = [...main.querySelectorAll(SCROLLED)].map((one) => [one.scrollTop, one.scrollLeft]);
  const active = document.activeElement, caret = active?.selectionStart, href = main.contains(active) && active.getAttribute("href");
  const held = active?.dataset?.focus ? `[data-focus="${active.dataset.focus}"]` : href ? `a[href="${CSS.escape(href)}"]` : "";
  where.replaceChildren(...crumbs(params, data));
  leave = view.draw(main, data, params) ?? (() => {});
  for (const one of main.querySelectorAll("details")) {
    if (open.has(keyOf(one))) one.open = open.get(keyOf(one));
  }
  [...main.querySelectorAll(SCROLLED)].forEach((one, at) => { if (places[at]) [one.scrollTop, one.scrollLeft] = places[at]; });
  const again = held && main.querySelector(held);
  if (again) {
    again.focus();
    if (caret !== undefined && caret !== null) again.setSelectionRange?.(caret, caret);
  }
}

function crumbs(params, data) {
  const found = [el("a", { href: "#/", title: "all runs (r)" }, "runs")];
  if (!params.run) return found;
  const base = "/run/" + part(params.run), name = data?.run?.name ?? params.run;
  found.push(el("a", { href: "#" + base, title: "the whole run (w)" }, name));
  found.push(el("a", { href: "#" + base + "/steps", title: "its steps and groups (s)" }, "steps"));
  const aside = el("span", { class: "keys" }, el("a", { href: "#" + base + "/search", title: "search this run (/)" }, "search"), " · ", el("a", { href: "#/compare/" + part(params.run), title: "lay it over another run (c)" }, "compare"),
    " · ", el("span", { title: "r: runs, w: the run, s: steps, c: compare, u: one level up, j and k: next and previous, Enter: open, /: search" }, "keys"));
  const step = params.step ?? data?.attempt?.step ?? (data?.attempt ? "none" : undefined);
  if (step !== undefined && step !== null) {
    found.push(el("a", { href: "#" + base + "/step/" + part(step) }, step === "none" ? "not trained" : "step " + step));
  }
  if (params.key) found.push(el("a", { href: "#" + base + "/attempt/" + part(params.key) }, "attempt " + params.key.slice(0, 8)));
  if (params.row) found.push(el("a", { href: location.hash }, "tokens"));
  document.title = found.slice(1).map((one) => one.textContent).join(" · ") || "seamless-verl watch";
  return found.flatMap((one, index) => (index ? [" › ", one] : [one]))
    .concat(aside);
}

function move(by) {
  const items = [...main.querySelectorAll("[data-item]")];
  const at = items.indexOf(document.activeElement);
  items[Math.min(items.length - 1, Math.max(0, at + by))]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA|CANVAS)$/.test(event.target.tagName)) return;
  const { params } = address(), base = "#/run/" + part(params.run ?? "");
  const links = [...where.querySelectorAll(":scope > a")];
  const acts = {
    r: () => { location.hash = "#/"; },
    w: () => { if (params.run) location.hash = base; },
    s: () => { if (params.run) location.hash = base + "/steps"; },
    u: () => { if (links.length > 1) location.hash = links[links.length - 2].getAttribute("href"); },
    j: () => move(1),
    k: () => move(-1),
    c: () => { if (params.run) location.hash = "#/compare/" + part(params.run); },
    "/": () => {
      const box = main.querySelector("[data-focus=search]");
      if (box) box.focus();
      else if (params.run) location.hash = base + "/search";
    },
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
});
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(round, false); });
show();

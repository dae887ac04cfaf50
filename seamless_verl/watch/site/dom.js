// Elements and words. What agents wrote reaches the page through `el` and `shown` only: always as text nodes.

export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value === true ? "" : shown(String(value)));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(shown(String(child))))));
  return made;
}

// Characters that move the cursor, turn the direction of text or cannot be seen are named instead; not the one that
// chooses how the emoji before it is drawn.
const UNSEEN = /(?!(?<=\p{Emoji})[\ufe0e\ufe0f])[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\p{Default_Ignorable_Code_Point}]/gu;
export const shown = (text) =>
  text.replace(UNSEEN, (one) => "⟨U+" + one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");

// The server sends the beginning of a long text, how long it is, and where `whole` finds all of it.
const PIECE = 100000;
export const begins = (text) => (typeof text === "string" ? text : text?.part ?? "");
export const length = (text) => (typeof text === "string" ? text.length : text?.of ?? 0);
export function long(text, className = "", whole = null) {
  const box = el("pre", { class: "text " + className, dir: "auto" }, begins(text));
  if (!text?.of) return box;
  const rest = el("button", { onclick: async () => {
    rest.disabled = true;
    const all = await whole(text.at).catch((error) => { rest.textContent = error.message; });
    if (all === undefined) return;
    // In pieces, so that those out of sight are not laid out: one line may have ten million characters.
    box.replaceChildren(...Array.from({ length: Math.ceil(all.length / PIECE) }, (_, at) =>
      el("span", { class: "piece" }, all.slice(at * PIECE, (at + 1) * PIECE))));
    rest.remove();
  } }, "show all " + text.of.toLocaleString("en") + " characters");
  return el("div", {}, box, rest);
}

export const brief = (text, most = 300) => (String(text).length > most ? String(text).slice(0, most) + " …" : text);

export function folded(key, title, body, open = false) {
  return el("details", { "data-key": key, open }, el("summary", {}, title), body);
}

export const link = (path, ...children) => el("a", { href: "#" + path, "data-item": true }, ...children);
export const part = (value) => encodeURIComponent(value);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  if (!minutes) return whole + " s";
  return minutes < 60 ? minutes + " min " + String(whole % 60).padStart(2, "0") + " s"
    : Math.floor(minutes / 60) + " h " + String(minutes % 60).padStart(2, "0") + " min";
}
export const number = (value, digits = 3) => (value === null || value === undefined ? "–"
  : Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits));
export const percent = (value) => (value > 0 && value < 0.005 ? "<1%" : Math.round(100 * value) + "%");
export const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "–");

// A reward as a bar from red to green; where it lies between the lowest and highest of what it stands beside.
export function bar(reward, low, high, title) {
  if (reward === null || reward === undefined) return el("i", { class: "reward none", title });
  const at = high > low ? (reward - low) / (high - low) : 0.5;
  return el("i", { class: "reward", title, style: `height:${Math.round(6 + 16 * at)}px;background:hsl(${Math.round(120 * at)} 55% 45%)` });
}
export const range = (attempts) => {
  const known = attempts.map((attempt) => attempt.reward).filter((reward) => reward !== null && reward !== undefined);
  return [Math.min(0, ...known), Math.max(1, ...known)];
};

export function marks(flags, explained) {
  return flags.map((flag) => el("span", { class: "mark", title: explained?.[flag] ?? "" }, flag));
}

// Over plain http from another machine browsers give no clipboard, but copy what is selected.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.body.appendChild(el("textarea"));
  box.value = text;
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  if (!done) throw new Error("the browser refused it");
}

export function copies(label, text) {
  const button = el("button", { onclick: async () => {
    button.textContent = await toClipboard(text()).then(() => "copied", (error) => "not copied: " + error.message);
    setTimeout(() => { button.textContent = label; }, 1500);
  } }, label);
  return button;
}

export class Refused extends Error {}

// What a view got last: the server answers 204 as long as it would say that again.
let kept = { path: "", data: null };
export async function askUnlessSeen(path) {
  const data = await ask(path + "&seen=" + (kept.path === path ? kept.data.mark : ""));
  if (data !== null) kept = { path, data };
  return kept.data;
}

export async function ask(path) {
  const answer = await fetch("api/" + path, { cache: "no-store" });
  if (answer.status === 204) return null;
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(body.error ?? "the server answered " + answer.status);
  return body;
}

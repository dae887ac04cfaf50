// The run as a whole: the parts of the report's page, exchanged when the recording has grown.

import { el, link, part, Refused } from "./dom.js";

export const again_s = 2;
let page = { run: "", name: "", mark: "", text: "" };

export async function load({ run }) {
  if (page.run !== run) page = { run, name: "", mark: "", text: "" };
  const answer = await fetch("api/run/" + part(run) + "/page?seen=" + page.mark, { cache: "no-store" });
  if (answer.status === 200) {
    const name = decodeURIComponent(answer.headers.get("x-run"));
    page = { run, name, mark: answer.headers.get("x-page"), text: await answer.text() };
  }
  else if (answer.status === 404) return { missing: (await answer.json()).error };
  else if (answer.status !== 204) throw new Refused((await answer.json().catch(() => ({}))).error ?? "the server answered " + answer.status);
  return { mark: page.mark, run: { name: page.name } };
}

let lanes = null;

export function draw(main, data, { run }) {
  const onward = el("p", {}, link("/run/" + part(run) + "/steps", "steps, groups and attempts of this run"));
  if (data.missing) return void main.replaceChildren(el("h1", {}, "Nothing of the run as a whole"), el("p", { class: "absent" }, data.missing), onward);
  // The page's own style is here already, as a file: the one inside of it would be refused, with a word in the console.
  const made = new DOMParser().parseFromString(page.text.replace(/<style>[^]*?<\/style>/, ""), "text/html");
  const view = lanes?.run === run ? lanes.drawn?.view() : undefined;
  lanes?.drawn?.stop();
  const parts = [made.querySelector("header"), ...made.querySelectorAll("section"), made.getElementById("lane-data")];
  main.replaceChildren(...parts.filter(Boolean).map((one) => document.adoptNode(one)),
    onward);
  for (const one of main.querySelectorAll("a[href^='#']")) {
    const anchor = one.getAttribute("href").slice(1);
    if (anchor.startsWith("/")) continue;
    one.addEventListener("click", (event) => {
      event.preventDefault();
      document.getElementById(anchor)?.scrollIntoView({ behavior: "smooth" });
    });
  }
  lanes = { run, drawn: window.drawLanes(view) };
  return () => { lanes?.drawn?.stop(); lanes = null; };
}

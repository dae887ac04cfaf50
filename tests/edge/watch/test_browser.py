"""The pages in a real Chromium: every view draws, what agents wrote is text there, and ten questions are answered
within four clicks each.

Needs a Chromium on the PATH and playwright; skipped without them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seamless_verl.observe import flight
from seamless_verl.observe.recording import FLIGHT, write_recording
from seamless_verl.observe.token_signals import FOLDER, TokenSignals, write
from tests.edge.watch.browser import browsing, in_browser
from tests.edge.watch.recorded import (
    begin,
    get,
    only_run,
    save_tokenizer,
    training,
    user,
    watching,
    write_flight,
    write_texts,
)
from tests.kernel.observe.made_up import HEADER, made_up_run, write_made_up_run

ATTACK = (
    "<script>document.body.dataset.taken = 'script'</script>"
    "<img src=x onerror=\"document.body.dataset.taken = 'image'\">"
    "<a href=\"javascript:document.body.dataset.taken = 'link'\">click</a>"
    "\x1b[31mred\u202egnp.exe\u202c </pre></details></section>"
    "\U000e0069\U000e0067 so\u00adft \u034f\u115f\u17b4\u180b\u3164\uffa0\ufe01 \u2764\ufe0f"
)
UNSEEN = "⟨U+E0069⟩⟨U+E0067⟩ so⟨U+00AD⟩ft ⟨U+034F⟩⟨U+115F⟩⟨U+17B4⟩⟨U+180B⟩⟨U+3164⟩⟨U+FFA0⟩⟨U+FE01⟩ \u2764\ufe0f"


TOOL = "<img src=x onerror=alert(3)>\u202e"


@in_browser
@pytest.mark.timeout(240)
async def test_every_view_draws_and_hostile_text_stays_text(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "<img src=x onerror=alert(1)>"
    async with training(run, lambda prompt: "<blink>answer</blink>\u202e") as proxy:
        agent = await begin(proxy, "<script>group</script>", task="<script>task</script>")
        said = [user(ATTACK)]
        said = [*said, await agent.ask(said), user("more")]
        await agent.ask(said)
        await agent.ask([user(ATTACK), {"role": "assistant", "content": "compacted"}, user("go on")])
        (row, *_) = await agent.end(0.5)
    ones = np.ones(len(row.token_ids) - row.prompt_len)
    # Of two rows the trainer gets the longest last.
    write(run / FOLDER, "2.0", {"<script>group</script>_0_1": TokenSignals(mask=ones, advantage=ones, log_ratio=ones)})
    write_texts(run, 2, [("<script>group</script>_0_0", 0.5, ATTACK), ("old_0_0", 0.5, f"{ATTACK}\ud800")])
    write_made_up_run(run)

    async with watching(tmp_path / "runs", save_tokenizer(tmp_path / "model")) as http, browsing() as page:
        at = await only_run(http)
        views = {
            "runs": ("/", "table"),
            "run": (f"/{at}", "#lane-legend span"),
            "step": (f"/{at}/step/2", ".times h2"),
            "attempt": (f"/{at}/attempt/{agent.session.id}?turn=2", ".turn.here"),
            "old": (f"/{at}/attempt/old~0", ".turn"),  # half a character, and the text of verl's dump
            "tokens": (f"/{at}/tokens/{agent.session.id}/0?by=version", ".tokens .trained"),
            "advantage": (f"/{at}/tokens/{agent.session.id}/0?by=advantage", ".tokens .trained[title*='advantage 1 ']"),
            "ratio": (f"/{at}/tokens/{agent.session.id}/0?by=ratio", '.tokens .trained[title*="rollout\'s) 2.7"]'),
            "search": (f"/{at}/search?text=dataset.taken", ".find"),
            "compare": ("/compare/" + "/".join([at.removeprefix("run/")] * 2), ".curves svg"),
        }
        doms = {}
        for name, (path, drawn) in views.items():
            await page.goto(f"{http.base_url}#{path}")
            await page.wait_for_selector(drawn)
            assert not await page.is_visible("#trouble"), name
            doms[name] = await page.inner_text("body")
            assert await page.evaluate("document.body.dataset.taken") is None, name
            # Ours have attributes; an agent's would have been made of its text.
            assert await page.evaluate("document.querySelectorAll('img, blink, #view script:not([type])').length") == 0
    for name in ("runs", "compare"):
        assert "<img src=x onerror=alert(1)>" in doms[name]
    assert "<script>task</script>" in doms["step"]
    for name in ("attempt", "old"):
        assert "<script>document.body.dataset.taken = 'script'</script>" in doms[name]
        assert "⟨U+001B⟩[31mred⟨U+202E⟩gnp.exe" in doms[name]
        assert UNSEEN in doms[name]
    assert "what the request said" in doms["attempt"]
    assert "<|im_start|>" in doms["tokens"]
    assert "Advantage 1." in doms["advantage"]
    assert "dataset.taken = 'script'" in doms["search"]


@in_browser
@pytest.mark.timeout(240)
async def test_hostile_tools_errors_and_broken_bytes_stay_text(tmp_path: Path) -> None:
    """Names, arguments and output of tools, what a runner says of an error, and bytes that are no UTF-8."""
    call = json.dumps({"name": TOOL, "arguments": {"command": ATTACK}})
    async with training(tmp_path, lambda prompt: f"look<tool_call>\n{call}\n</tool_call>") as proxy:
        agent = await begin(proxy, "group")
        tools = [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("run", TOOL)
        ]
        messages: list[Any] = [user("hi")]
        for _ in range(2):
            answer = await proxy.http.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": messages, "tools": tools},
                headers={"Authorization": f"Bearer {agent.session.api_key}"},
            )
            said = answer.json()["choices"][0]["message"]
            messages = [
                *messages,
                said,
                {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": f"OUTPUT {ATTACK}"},
            ]
        await agent.end(0.5)
    ended = flight.SessionEnded(
        at=2.0, session=agent.session.id, group="group", index=0, seconds=1.0, turns=2, rows=1, reward=0.5,
        status="<b>failed</b>", detail=f"{ATTACK}broken-byte",
    )  # fmt: skip
    recording = write_flight(tmp_path, ended)
    recording.write_bytes(recording.read_bytes().replace(b"broken-byte", b"broken-\xff-byte"))
    async with watching(tmp_path, save_tokenizer(tmp_path / "model")) as http, browsing() as page:
        at = await only_run(http)
        doms = {}
        for path in (f"/{at}/attempt/{agent.session.id}", f"/{at}/search?text=broken", f"/{at}/step/none"):
            await page.goto(f"{http.base_url}#{path}")
            await page.wait_for_selector(".strip, .find")
            await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            doms[path] = await page.inner_text("body")
            assert await page.evaluate("document.body.dataset.taken") is None
            assert await page.evaluate("document.querySelectorAll('img, #view script').length") == 0
    attempt, search, _ = doms.values()
    called = "calls <img src=x onerror=alert(3)>⟨U+202E⟩"
    for place in (called, "OUTPUT <script>", "<b>failed</b>", "⟨U+001B⟩[31mred⟨U+202E⟩gnp.exe"):
        assert place in attempt, place
    assert attempt.count("<script>document.body.dataset.taken = 'script'</script>") >= 4
    for dom in (attempt, search):
        assert "broken-\ufffd-byte" in dom


@in_browser
@pytest.mark.timeout(240)
async def test_a_line_of_ten_megabytes_leaves_the_page_usable(tmp_path: Path) -> None:
    write_flight(tmp_path)
    write_texts(tmp_path, 1, [("old_0_0", 0.5, "x" * 10_000_000 + "the end"), ("old_1_0", 0.0, "y")])
    sizes: list[int] = []
    async with watching(tmp_path) as http, browsing() as page:
        page.on("response", lambda answer: sizes.append(answer.status) if "/attempt?" in answer.url else None)
        await page.goto(f"{http.base_url}#/{await only_run(http)}/attempt/old~0")
        await page.wait_for_selector(".turn")
        while len(sizes) < 4:  # as often as it asks
            await page.wait_for_timeout(200)
        assert len(await page.inner_text(".text.answer")) == 20_000
        assert sizes.count(200) == 1
        began = time.monotonic()
        await page.click("text=show all 10,000,007 characters")
        await page.wait_for_selector(".piece >> nth=100", state="attached")
        end = "document.querySelector('.text.answer').textContent.endsWith('the end')"
        assert await page.evaluate(end)
        await page.keyboard.press("s")
        await page.get_by_role("heading", name="Steps").wait_for()
        assert time.monotonic() - began < 15.0  # 4 s on two busy cores


@asynccontextmanager
async def two_runs(runs: Path) -> AsyncIterator[str]:
    """``good``, whose second step trained a group of two attempts and one of an agent that drifted, and ``other``."""
    run = runs / "good"
    async with training(run, lambda prompt: "an answer") as proxy:
        whole, failed = await begin(proxy, "even", 0, task="sort_list"), await begin(proxy, "even", 1, task="sort_list")
        said = [user("please sort")]
        for more in ("with tests", "thank you"):
            said = [*said, await whole.ask(said), user(more)]
        await whole.ask(said)
        await failed.ask([user("please sort")])
        drifted = await begin(proxy, "uneven", 0)
        said = [user("hello"), await drifted.ask([user("hello")]), user("the story")]
        await drifted.ask(said)
        await drifted.ask([user("hello"), {"role": "assistant", "content": "compacted"}, user("go on")])
        for agent in (whole, failed, drifted):
            await agent.end(0.0)
    write_texts(run, 2, [("even_0_0", 0.0, "a"), ("even_1_0", 0.0, "b"), ("uneven_0_0", 0.0, "c")])
    events = made_up_run(steps=3)
    second = next(e.at for e in events if isinstance(e, flight.StepBegan) and e.step == 2)
    for number, (agent, status, detail) in enumerate(
        [(whole, "finished", ""), (failed, "failed", "ValueError: no such file"), (drifted, "finished", "")]
    ):
        events.append(
            flight.SessionEnded(
                at=second + 20 + number, session=agent.session.id, group="uneven" if agent is drifted else "even",
                seconds=15.0, turns=3, rows=1, reward=0.0, status=status, detail=detail,
            )
        )  # fmt: skip
    write_recording(run / FLIGHT / "made-up.jsonl", HEADER, sorted(events, key=lambda event: event.at))
    write_made_up_run(runs / "other", seed=7)
    yield whole.session.id


STEPS = 'tr:has-text("good") a:text-is("steps")'
SECOND = 'a:text-is("2")'
QUESTIONS: dict[str, tuple[list[str], str]] = {
    "what runs, and how does it stand?": ([], "finished"),
    "why was step 2 slow?": ([STEPS, SECOND], "waiting for"),
    "which attempt did the GPUs wait for?": ([STEPS, SECOND, ".times a >> nth=0"], "GPUs that waited for it"),
    "which groups of the step teach nothing?": (
        [STEPS, 'tr:has(a:text-is("2")) a:has-text("zero variance")'],
        "1 of 2 groups",
    ),
    "which rollouts of this prompt failed, and why?": (
        [STEPS, 'tr:has(a:text-is("2")) a:has-text("not finished")', '.strip a[title*="failed"]'],
        "ValueError: no such file",
    ),
    "where do the attempts of this prompt part?": (
        [STEPS, SECOND, '.group:has-text("sort_list") >> button:has-text("where do they part")'],
        "one ends where the other goes on",
    ),
    "what did the agent see and say in its third turn?": ([STEPS, SECOND, ".strip a >> nth=0"], "thank you"),
    "which tokens came from old weights?": (
        [STEPS, 'tr:has(a:text-is("2")) a:has-text("interrupted")', ".strip a >> nth=0", 'a:has-text("row 0")'],
        "new weights took over at token",
    ),
    "what drifted, and what did the client send?": (
        [STEPS, 'tr:has(a:text-is("2")) a:has-text("drifted")', '.strip a[title*="drifted"]'],
        "what the request said",
    ),
    "did lending the slices pay?": (['a:text-is("good")'], "predicted"),
    "is this run better than that one?": (
        ['tr:has-text("good") a:text-is("compare")', 'select >> nth=1 >> "other"'],
        "device-seconds in steps",
    ),
    "where was this said, or this error met?": (
        ['tr:has-text("good") a:text-is("search")', 'input[type=search] >> "no such file"', ".find a"],
        "ValueError: no such file",
    ),
}


@in_browser
@pytest.mark.timeout(240)
async def test_ten_questions_are_answered_within_four_clicks_each(tmp_path: Path) -> None:
    """A click is a link, a choice in a list, or a text typed and sent."""
    async with (
        two_runs(tmp_path / "runs"),
        watching(tmp_path / "runs", save_tokenizer(tmp_path / "model")) as http,
        browsing() as page,
    ):
        for run in (await get(http, "runs"))["runs"]:
            await http.get(f"api/run/{run['id']}/page")  # the first look at a run takes its time
        for question, (clicks, answer) in QUESTIONS.items():
            await page.goto(f"{http.base_url}#/")
            for click in clicks:
                await _act(page, click)
            assert len(clicks) <= 4
            await page.get_by_text(re.compile(re.escape(answer))).first.wait_for(), question
    assert len(QUESTIONS) >= 10


async def _act(page: Any, click: str) -> None:
    where, typed, text = click.partition(' >> "')
    if not typed:
        await page.click(where)
    elif where.startswith("select"):
        await page.select_option(where, label=text.removesuffix('"'))
    else:
        await page.fill(where, text.removesuffix('"'))
        await page.press(where, "Enter")


@in_browser
@pytest.mark.timeout(240)
async def test_every_head_and_fact_says_what_it_is_on_hover(tmp_path: Path) -> None:
    async with two_runs(tmp_path / "runs") as key, watching(tmp_path / "runs") as http, browsing() as page:
        runs = {run["name"]: run["id"] for run in (await get(http, "runs"))["runs"]}
        at = f"run/{runs['good']}"
        untold = "[...document.querySelectorAll('thead th, dl dt')].filter((one) => one.textContent && !one.title)"
        for path, drawn in (("/", "table"), (f"/{at}/steps", "table"), (f"/{at}/attempt/{key}", "dl dt")):
            await page.goto(f"{http.base_url}#{path}")
            await page.wait_for_selector(drawn)
            assert await page.evaluate(f"{untold}.map((one) => one.textContent)") == []
            assert await page.evaluate("document.querySelectorAll('thead th[title], dl dt[title]').length") >= 6


@in_browser
@pytest.mark.timeout(240)
async def test_keys_dark_and_a_turn_that_comes(tmp_path: Path) -> None:
    async with (
        training(tmp_path) as proxy,
        watching(tmp_path, save_tokenizer(tmp_path / "model"), alive=True) as http,
        browsing(dark=True) as page,
    ):
        write_made_up_run(tmp_path)
        agent = await begin(proxy, "task")
        said = [user("hi")]
        said = [*said, await agent.ask(said), user("the second question")]
        await page.goto(f"{http.base_url}#/{await only_run(http)}/attempt/{agent.session.id}")
        await page.wait_for_selector('[data-turn="0"]')
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        await agent.ask(said)
        await page.wait_for_selector('[data-turn="1"]', timeout=2000)  # the bar: two seconds
        for key, view in (("s", "Steps"), ("/", "Search"), ("Escape", "Search")):
            await page.keyboard.press(key)
            await page.get_by_role("heading", name=view).wait_for()
        await page.evaluate("document.activeElement.blur()")
        await page.keyboard.press("c")
        await page.get_by_role("heading", name="Compare").wait_for()


# How many looks wait for their time, and how many were ever set.
TIMERS = """
  window.waiting = new Set(); window.set = 0;
  const later = window.setTimeout, cancel = window.clearTimeout;
  window.setTimeout = (act, ms) => {
    const timer = later(() => { waiting.delete(timer); act(); }, ms);
    waiting.add(timer); set += 1;
    return timer;
  };
  window.clearTimeout = (timer) => { waiting.delete(timer); cancel(timer); };
"""


@in_browser
async def test_coming_back_to_the_tab_adds_no_loop(tmp_path: Path) -> None:
    write_flight(tmp_path)
    async with watching(tmp_path) as http, browsing() as page:
        await page.add_init_script(TIMERS)
        await page.goto(f"{http.base_url}#/")
        await page.wait_for_selector("h1")
        await page.evaluate("for (let i = 0; i < 9; i++) document.dispatchEvent(new Event('visibilitychange'))")
        while await page.evaluate("set") < 10:
            await page.wait_for_timeout(50)
        assert await page.evaluate("waiting.size") <= 1


@in_browser
@pytest.mark.timeout(240)
async def test_what_the_reader_does_outlives_what_comes(tmp_path: Path) -> None:
    """A filter half typed, a link in focus, a place in a text, and a selection, in a run that goes on."""
    async with (
        training(tmp_path) as proxy,
        watching(tmp_path, save_tokenizer(tmp_path / "model"), alive=True) as http,
        browsing() as page,
    ):
        agent = await begin(proxy, "first")
        said = [user("line\n" * 2000)]
        said = [*said, await agent.ask(said), user("more")]
        at = f"{http.base_url}#/{await only_run(http)}"
        await page.goto(f"{at}/step/none")
        await page.wait_for_selector(".group")
        await page.locator("input[type=search]").press_sequentially("fir")
        await begin(proxy, "second")
        await page.wait_for_selector("#trouble:not([hidden])")
        assert await page.evaluate("[document.activeElement.value, document.querySelectorAll('.group').length]") == [
            "fir",
            1,
        ]
        await page.fill("input[type=search]", "")
        await page.wait_for_selector(".group >> nth=1")
        await page.locator(".strip a").first.focus()
        focused = await page.evaluate("document.activeElement.href")
        await begin(proxy, "third")
        await page.wait_for_selector(".group >> nth=2")
        assert await page.evaluate("document.activeElement.href") == focused

        await page.goto(f"{at}/attempt/{agent.session.id}")
        await page.wait_for_selector('[data-turn="0"]')
        await page.evaluate(
            "document.querySelector('details').open = true; document.querySelector('.text').scrollTop = 500"
        )
        await agent.ask(said)
        await page.wait_for_selector('[data-turn="1"]')
        assert await page.evaluate("document.querySelector('.text').scrollTop") == 500
        await page.evaluate("getSelection().selectAllChildren(document.querySelector('h3'))")
        await begin(proxy, "first", 1)
        await page.wait_for_selector("#trouble:not([hidden])")
        assert await page.evaluate("document.querySelectorAll('.strip a').length") == 1
        await page.evaluate("getSelection().removeAllRanges()")
        await page.wait_for_selector(".strip a >> nth=1")


@in_browser
async def test_what_is_copied_over_plain_http_is_copied(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path / "a run")
    async with watching(tmp_path) as http, browsing() as page:
        await page.add_init_script(
            "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
            "document.addEventListener('copy', () => { window.copied = document.activeElement.value; });"
        )
        await page.goto(f"{http.base_url}#/compare/{(await only_run(http)).removeprefix('run/')}")
        await page.click("text=copy >> nth=-1")
        await page.wait_for_selector("button:has-text('copied')")
        assert f"--from '{run}' --set" in await page.evaluate("window.copied")


@in_browser
async def test_the_axis_of_many_lanes_is_as_wide_as_they_are(tmp_path: Path) -> None:
    """The lanes scroll, and their scrollbar takes its width from them alone."""
    write_made_up_run(tmp_path, trainers=40, rollouts=20, requests=2)
    async with watching(tmp_path) as http, browsing() as page:
        await page.goto(f"{http.base_url}#/{await only_run(http)}")
        await page.wait_for_selector("#lane-legend span")
        scrolls = "(one) => one.scrollHeight > one.clientHeight"
        assert await page.eval_on_selector("#lane-scroll", scrolls)
        wide = "(one) => one.getBoundingClientRect().width"
        assert await page.eval_on_selector("#lane-axis", wide) == await page.eval_on_selector("#lane-canvas", wide)

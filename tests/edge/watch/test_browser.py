"""The pages in a real Chromium: every view draws, and what agents wrote is text there, whatever it looks like.

Needs a Chromium on the PATH, as the report's tests do; skipped without one.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from html import unescape
from pathlib import Path

import pytest

from tests.edge.test_report_page import BROWSER, in_browser
from tests.edge.watch.recorded import begin, get, only_run, save_tokenizer, training, user, watching, write_texts
from tests.kernel.observe.made_up import write_made_up_run

ATTACK = (
    "<script>document.body.dataset.taken = 'script'</script>"
    "<img src=x onerror=\"document.body.dataset.taken = 'image'\">"
    "<a href=\"javascript:document.body.dataset.taken = 'link'\">click</a>"
    "\x1b[31mred\u202egnp.exe\u202c </pre></details></section>"
)


async def _dom(url: str, folder: Path) -> str:
    """The page's DOM once its scripts have drawn it."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=4000", "--enable-logging=stderr", "--dump-dom", url,
    ]  # fmt: skip
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said  # an error of ours, or something that the policy refused
    return done.stdout


@in_browser
@pytest.mark.timeout(240)
async def test_every_view_draws_and_hostile_text_stays_text(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "<img src=x onerror=alert(1)>"
    async with training(run, lambda prompt: "<blink>answer</blink>\u202e") as proxy:
        agent = await begin(proxy, "<script>task</script>")
        said = [user(ATTACK)]
        said = [*said, await agent.ask(said), user("more")]
        await agent.ask(said)
        await agent.ask([user(ATTACK), {"role": "assistant", "content": "compacted"}, user("go on")])
        await agent.end(0.5)
    write_texts(run, 2, [("<script>task</script>_0_0", 0.5, ATTACK), ("old_0_0", 0.5, f"{ATTACK}\ud800")])
    write_made_up_run(run)

    async with watching(tmp_path / "runs", save_tokenizer(tmp_path / "model")) as http:
        at = await only_run(http)
        await get(http, f"{at}/attempt", key=agent.session.id)  # the first look at a run takes its time
        pages = {
            "runs": "/",
            "run": f"/{at}",
            "step": f"/{at}/step/2",
            "attempt": f"/{at}/attempt/{agent.session.id}",
            "old": f"/{at}/attempt/old~0",  # half a character, and the text of verl's dump
            "tokens": f"/{at}/tokens/{agent.session.id}/0?by=version",
        }
        doms = {name: await _dom(f"{http.base_url}#{path}", tmp_path) for name, path in pages.items()}

    for name, dom in doms.items():
        assert not re.search(r"<body[^>]*data-taken", dom), name
        assert not re.search(r"<(img|script>|blink)", dom), name  # ours have attributes
        assert 'id="trouble" role="status" hidden' in dom, name
    assert "&lt;img src=x onerror=alert(1)&gt;" in doms["runs"]
    assert 'id="lane-legend" class="legend"><span' in doms["run"]  # the lanes' script has drawn
    assert "step 2" in doms["step"].lower()
    assert "&lt;script&gt;task&lt;/script&gt;" in doms["step"]
    for name in ("attempt", "old"):
        seen = unescape(doms[name])
        assert "<script>document.body.dataset.taken = 'script'</script>" in seen
        assert "⟨U+001B⟩[31mred⟨U+202E⟩gnp.exe" in seen
    assert "what the request said" in doms["attempt"]
    assert "⟨U+202E⟩" in doms["attempt"]
    assert "&lt;|im_start|&gt;" in doms["tokens"]
    assert 'class="trained"' in doms["tokens"]

"""Who may read the pages, and what a browser may do with them; the command that serves them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from seamless_verl.cli import main
from seamless_verl.watch.watch_app import _json
from tests.edge.watch.recorded import TOKEN, watching, write_flight

ROUTES = ["", "static/main.js", "static/page.css", "api/runs", "api/run/x/page", "api/run/x/steps", "api/run/x/groups",
          "api/run/x/attempt", "api/run/x/text", "api/run/x/partings", "api/run/x/tokens", "api/run/x/figures",
          "api/run/x/times", "api/run/x/search", "openapi.json", "docs", "nothing"]  # fmt: skip


async def test_without_the_token_every_route_is_refused_and_says_nothing(tmp_path: Path) -> None:
    write_flight(tmp_path / "secret-run")
    async with watching(tmp_path) as http:
        host = str(http.base_url).removesuffix(f"{TOKEN}/")
        for route in ROUTES:
            for wrong in ("", "wrong/", f"{TOKEN[:-1]}/", f"{TOKEN}x/", f"%00{TOKEN}/", "töken/"):
                answer = await http.get(f"{host}{wrong}{route}")
                assert answer.status_code == 403, (wrong, route)
                assert "token" in answer.text
                assert "secret" not in answer.text


async def test_an_address_without_its_last_slash_leads_to_the_page(tmp_path: Path) -> None:
    async with watching(tmp_path) as http:
        answer = await http.get(str(http.base_url).rstrip("/"), follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, f"/{TOKEN}/")
    assert "static/main.js" in answer.text


async def test_a_page_of_before_this_server_began_can_tell_why_it_gets_nothing(tmp_path: Path) -> None:
    async with watching(tmp_path) as http:
        answer = await http.get(str(http.base_url).replace(TOKEN, "old") + "api/runs")
    assert answer.status_code == 403
    assert "Open the address that seamless-verl watch printed" in answer.json()["error"]


async def test_a_name_that_points_here_another_origin_and_changes_are_refused(tmp_path: Path) -> None:
    async with watching(tmp_path) as http:
        own = f"{http.base_url.host}:{http.base_url.port}"
        for route in ROUTES:
            assert (await http.get(route, headers={"host": "evil.example"})).status_code == 421
            assert (await http.get(route, headers={"origin": "http://evil.example"})).status_code == 403
            assert (await http.get(route, headers={"origin": "null"})).status_code == 403
            assert (await http.post(route)).status_code == 405
        answer = await http.get("api/runs", headers={"origin": f"http://{own}"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_every_answer_forbids_foreign_scripts_frames_and_keeping(tmp_path: Path) -> None:
    async with watching(tmp_path) as http:
        for route in ("", "static/main.js", "api/runs", "nothing", "../wrong/"):
            headers = (await http.get(route)).headers
            policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == "'self'"
            assert policy["frame-ancestors"] == "'none'"
            assert headers["referrer-policy"] == "no-referrer"  # the token is in the address
            assert headers["cache-control"] == "no-store"


async def test_scripts_and_styles_of_the_site_and_of_the_report_are_served_and_no_other_file(tmp_path: Path) -> None:
    watch = Path(main.__code__.co_filename).parent / "watch"
    async with watching(tmp_path) as http:
        for name in (*(file.name for file in (watch / "site").glob("*s")), "page.css", "lanes.js"):
            assert (await http.get(f"static/{name}")).status_code == 200, name
        for name in ("shell.html", "watch_app.py", "..%2Fwatch_app.py", "%2Fetc%2Fpasswd", "page.html.jinja", "."):
            assert (await http.get(f"static/{name}")).status_code in (403, 404), name


def test_what_json_cannot_hold_becomes_a_mark_or_null() -> None:
    """Half a character, as an agent may send it; a figure that is no number."""
    answer = _json({"said \ud83d": ["whole", "half \ud83d"], "loss": float("nan")})
    assert json.loads(answer.body) == {"said ?": ["whole", "half ?"], "loss": None}


def test_the_pages_are_of_ours_alone() -> None:
    """No address outside the machine, nothing that makes HTML of text, no script inside of HTML."""
    site = Path(main.__code__.co_filename).parent / "watch" / "site"
    sources = {file.name: file.read_text(encoding="utf-8") for file in site.iterdir()}
    assert len(sources) == 12
    for name, text in sources.items():
        outside = set(re.findall(r"https?://[^\s\"'`/]*", text)) - {
            "http://127.0.0.1:8000",
            "http://www.w3.org",
        }  # an example, a name
        assert not outside, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
    assert not re.search(r"<script(?![^>]*\bsrc=)", sources["shell.html"])


def test_wrong_inputs_are_answered_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for arguments, told in (
            ([str(tmp_path / "nowhere")], ("nowhere: does not exist", "name a run folder")),
            ([str(tmp_path / "file")], ("is no folder",)),
            ([str(tmp_path), "--host", "0.0.0.0"], ("--host=0.0.0.0", "no TLS", "ssh -L", "--allow")),
            ([str(tmp_path), "--host", "999.1.1.1", "--allow"], ("--host=999.1.1.1",)),
            ([str(tmp_path), "--port", str(taken.getsockname()[1])], ("--port", "cannot listen")),
            ([str(tmp_path), "--port", "99999"], ("--port=99999",)),
            ([str(tmp_path), "--tokenizer", str(tmp_path)], ("--tokenizer", "holds no tokenizer.json")),
        ):
            assert main(["watch", *arguments]) == 2
            error = capsys.readouterr().err
            assert error.startswith("error: ")
            assert all(word in error for word in told), error


def test_pages_of_a_run_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """`seamless.watch=true`: also where that was killed, since nothing is said over the pipe."""
    write_flight(tmp_path)
    command = [sys.executable, "-m", "seamless_verl.cli", "watch", str(tmp_path), "--port", "0", "--of-run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline().startswith("watch this run: http://127.0.0.1:")
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_the_command_prints_an_address_that_works_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write_flight(tmp_path / "one")
    command = [sys.executable, "-m", "seamless_verl.cli", "watch", "--port", "0"]
    environment = {**os.environ, "NO_PROXY": "*", "SEAMLESS_RUNS": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.match(
                rf"watching {re.escape(str(tmp_path))} \(1 run\): (http://127\.0\.0\.1:\d+/\S{{32}}/)$", line
            )
            assert url, line
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(url[1]) as answer:
                assert b"static/main.js" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()

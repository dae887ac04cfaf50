"""The page in a real browser: it draws what the recording says, and answers to the mouse and the keyboard.

Needs a Chromium (or Chrome) on the PATH; skipped without one. Where CI installs ``chromium`` it runs there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from seamless_verl.cli import main
from seamless_verl.machine import identity
from seamless_verl.observe.recording import write_recording
from seamless_verl.observe.run_folder import write_report
from tests.kernel.observe.made_up import HEADER, write_made_up_run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on the PATH to look at the page with")

# Runs after the page's own script; what it finds is read from the DOM that the browser prints.
PROBE = """
<script>
window.addEventListener("load", () => {
  const canvas = document.getElementById("lane-canvas"), range = document.getElementById("lane-range");
  const tip = document.getElementById("lane-tip"), found = { errors: window.problems };
  const box = canvas.getBoundingClientRect();
  canvas.setPointerCapture = () => {};
  const fire = (type, x, y, more) => canvas.dispatchEvent(new PointerEvent(type,
    { clientX: box.left + x, clientY: box.top + y, pointerId: 1, button: 0, bubbles: true, ...more }));
  const look = () => {
    const pen = canvas.getContext("2d"), scale = devicePixelRatio || 1;
    const at = (x, y) => [...pen.getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1).data].slice(0, 3);
    return { at };
  };
  found.canvas = [box.width, box.height];
  found.range = range.textContent;
  const { at } = look();
  found.row = Array.from({ length: 100 }, (_, i) => at(133 + (box.width - 142) * (i + 0.5) / 100, 50).join());
  fire("pointermove", box.width * 0.4, 50);
  found.tip = tip.textContent; found.tipShown = !tip.hidden;
  fire("pointerdown", 300, 50); fire("pointermove", 500, 50); fire("pointerup", 500, 50);
  found.zoomed = range.textContent;
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  found.moved = range.textContent;
  canvas.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  found.reset = range.textContent;
  document.getElementById("lane-in").click();
  found.button = range.textContent;
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: 100, ctrlKey: true, clientX: box.left + 400, bubbles: true,
    cancelable: true }));
  found.wheel = range.textContent;
  canvas.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  const entry = [...document.querySelectorAll("#lane-legend span")].find((e) => e.textContent === "training");
  const spot = 133 + (box.width - 142) * (found.row.lastIndexOf("37,99,184") + 0.5) / 100;
  const before = look().at(spot, 50).join();
  entry.click();
  found.faded = [before, look().at(spot, 50).join()];
  found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
</script>
"""
CATCH = "<script>window.problems = []; window.onerror = (text) => { window.problems.push(String(text)); };</script>"


def run_browser(folder: Path, page: Path, *options: str) -> str:
    answer = subprocess.run(
        [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return answer.stdout


def probe(folder: Path, page: Path, width: int) -> dict:
    text = page.read_text(encoding="utf-8")
    probed = folder / "probed.html"
    probed.write_text(text.replace("<body>", "<body>" + CATCH).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    dom = run_browser(folder, probed, f"--window-size={width},900", "--dump-dom")
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the probe did not run to its end"
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write_report(write_made_up_run(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory) -> dict:
    return probe(tmp_path_factory.mktemp("browser"), page, 1366)


TRAIN = "37,99,184"


@in_browser
def test_the_script_runs_without_an_error(seen):
    assert seen["errors"] == []


@in_browser
def test_the_lanes_are_painted_in_the_colours_of_what_the_slices_did(seen):
    """A trainer's lane: half of its time is training, and it was switched, synchronised and lent."""
    trained = sum(colour == TRAIN for colour in seen["row"])
    assert 40 <= trained <= 60, trained
    assert len(set(seen["row"])) >= 4


@in_browser
def test_the_mouse_tells_what_a_slice_was_doing(seen):
    assert seen["tipShown"]
    assert seen["tip"].startswith("trainers/0 · ")
    assert re.search(r"(training|generating|switching|weight sync|waiting)[\w ]* for [\d.:]+ (s|ms|min)", seen["tip"])
    assert "step " in seen["tip"]


@in_browser
def test_dragging_keys_buttons_and_the_wheel_change_the_stretch_of_time(seen):
    assert seen["range"].startswith("everything")
    assert seen["reset"] == seen["range"]
    stretches = [seen[name] for name in ("zoomed", "moved", "button", "wheel")]
    assert len({seen["range"], *stretches}) == 5


@in_browser
def test_a_click_on_the_legend_fades_its_category(seen):
    before, after = seen["faded"]
    assert before == TRAIN
    assert after != before


@in_browser
def test_nothing_sticks_out_sideways(page, tmp_path, seen):
    assert seen["wide"] <= 0
    assert probe(tmp_path, page, 1000)["wide"] <= 0


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_the_page_shows_every_category_that_the_run_had(page, tmp_path, scheme):
    """The colours are those of the style sheet for this scheme; a blank page has none of them."""
    image = pytest.importorskip("PIL.Image")
    shot = tmp_path / "shot.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    run_browser(tmp_path, page, "--window-size=1366,3000", f"--screenshot={shot}", *dark)
    with image.open(shot) as picture:
        colours = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24)}
    style = page.read_text(encoding="utf-8").split("prefers-color-scheme: dark")[scheme == "dark"]
    for name in ("train", "generate", "prefill-again", "sync", "switch", "wait-data", "wait-straggler"):
        value = re.search(rf"--{name}: #(\w{{6}})", style)[1]
        wanted = tuple(int(value[index : index + 2], 16) for index in (0, 2, 4))
        assert colours.get(wanted, 0) > 200, (name, scheme)


def test_the_command_writes_the_page_and_the_trace_and_names_them(tmp_path, capsys):
    run = write_made_up_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    trace = tmp_path / "trace.json"
    assert main(["report", str(run), "--perfetto", str(trace)]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "ui.perfetto.dev" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--perfetto", "trace.json"]])
def test_a_folder_that_is_none_of_a_run_is_refused_in_one_line(tmp_path, capsys, options):
    assert main(["report", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "no run folder: it has neither flight/" in error


def started(run: Path) -> Path:
    """As the main job leaves it before anything is recorded."""
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    return run


def test_without_a_folder_the_newest_run_is_taken_also_a_point_of_a_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SEAMLESS_RUNS", str(tmp_path))
    assert main(["report"]) == 2
    assert "there is no run under" in capsys.readouterr().err
    for age, name in ((30, "swe-1"), (10, "sweep/0"), (20, "sweep/1")):
        run = write_made_up_run(started(tmp_path / name))
        moment = run.stat().st_mtime - age
        os.utime(run / "config.yaml", (moment, moment))
    (tmp_path / "a file").touch()
    assert main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "sweep" / "0" / "report.html")
    assert main(["report", str(tmp_path / "sweep")]) == 2
    assert f"is a sweep; choose one of its points: {tmp_path / 'sweep' / '0'}" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--perfetto", "trace.json"]])
def test_a_run_that_has_recorded_nothing_is_told_from_a_folder_of_something_else(tmp_path, capsys, options):
    run = started(tmp_path / "run")
    write_recording(run / "flight" / "trainer.jsonl", HEADER, [])
    if options:
        shutil.rmtree(run / "flight")
    assert main(["report", str(run), *options]) == 2
    assert f"the run ended before its first step; {run / 'logs'} has the reason" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "no"), *options]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(run / "config.yaml"), *options]) == 2
    assert "config.yaml is a file; name a run folder\n" in capsys.readouterr().err


def test_whether_a_recording_without_an_end_goes_on_is_seen_from_its_process(tmp_path, capsys):
    run = started(tmp_path / "run")
    owner = subprocess.Popen(["sleep", "60"])
    (run / "pid").write_text(identity(owner.pid))
    assert main(["report", str(run)]) == 2
    assert "its first step has not begun" in capsys.readouterr().err
    write_made_up_run(run)
    file = run / "flight" / "made-up.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[: len(lines) // 2]) + "\n" + lines[len(lines) // 2][:30])
    main(["report", str(run)])
    text = (run / "report.html").read_text()
    assert ">running<" in text
    owner.kill()
    owner.wait()
    main(["report", str(run)])
    text = (run / "report.html").read_text()
    assert ">no end recorded<" in text
    assert "the run was killed" in text
    assert "last line cut short in" in text


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    run = write_made_up_run(tmp_path / "run")
    (run / "report.html").mkdir()
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "report.html" in error


def test_a_broken_recording_is_named_with_its_line(tmp_path, capsys):
    run = write_made_up_run(tmp_path / "run")
    file = run / "flight" / "made-up.jsonl"
    lines = file.read_text().splitlines()
    lines[3] = lines[3][:20]
    file.write_text("\n".join(lines) + "\n")
    assert main(["report", str(run)]) == 2
    assert "made-up.jsonl, line 4" in capsys.readouterr().err

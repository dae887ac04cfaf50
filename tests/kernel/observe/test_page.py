"""The page, taken apart again: it is whole, needs nothing else, lies about nothing, and survives hostile names."""

import json
import re
from html.parser import HTMLParser

import pytest

from seamless_verl.observe import flight
from seamless_verl.observe.digest import digest
from seamless_verl.observe.flight import SliceState
from seamless_verl.observe.intervals import within
from seamless_verl.observe.page import charts
from seamless_verl.observe.page.html import render
from seamless_verl.observe.recording import Recording
from tests.kernel.observe.made_up import made_up_run

SECTIONS = ["next", "lanes", "memory", "ledger", "steps", "decisions", "learning", "data", "about"]


class Page(HTMLParser):
    """Elements, ids, links and texts; raises when an element is closed that was not opened."""

    VOID = {"meta", "input", "br", "img"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "action", "data"):
                self.addresses.append(value)
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.remove(tag) if tag not in self.VOID else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)


def step(number: int, **changes) -> dict:
    record = dict(
        step=number, total_steps=4, step_s=2.0, reward=0.1 * number, pass_rate=0.2, tokens_per_s=1500.0,
        staleness_mean=0.5, staleness_max=1, rows=10, rollouts=8, rows_audited=10, audit_violations=0,
        max_logprob_diff=None, idle_share={"trainer": 0.5, "rollout": None},
    )  # fmt: skip
    return {**record, **changes}


def validation(at: int, mean: float, name: str = "held_out") -> dict:
    return dict(step=at, name=name, metric="passed", mean=mean, low=mean - 0.1, high=mean + 0.1, tasks=5, rollouts=9)


def page_of(events, steps=(), validations=()) -> tuple[Page, str]:
    text = render(digest(Recording(events=tuple(events), origin_s=1.7e9), steps, validations))
    return Page(text), text


@pytest.fixture(scope="module")
def made_up():
    return page_of(made_up_run(), [step(1), step(2), step(3)], [validation(0, 0.2), validation(3, 0.4)])


def test_every_section_is_there_once_and_every_link_leads_somewhere(made_up):
    page, _ = made_up
    assert len(page.ids) == len(set(page.ids))
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert page.addresses
    assert all(address.startswith("#") and address[1:] in page.ids for address in page.addresses)


def test_the_page_needs_nothing_from_outside(made_up):
    _, text = made_up
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"https?://|@import|url\(", text)


def test_every_column_of_the_ledger_adds_up_to_a_hundred_percent(made_up):
    _, text = made_up
    table = text[text.index('<table class="ledger">') : text.index("</table>")]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    cells = [re.findall(r"<td>([^<]*)</td>", row) for row in rows]
    body, foot = cells[1:-1], cells[-1]
    for pool in (0, 1):
        shares = [float(row[-3 + 2 * pool].rstrip("%")) for row in body if row[-3 + 2 * pool] != "–"]
        assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares))
        assert foot[-3 + 2 * pool] == "100.0%"


def test_the_lanes_hold_every_slice_and_stay_within_the_recording(made_up):
    page, _ = made_up
    data = json.loads(page.scripts[0])
    names = [lane["name"] for pool in data["pools"] for lane in pool["lanes"]]
    assert names == [*(f"trainers/{i}" for i in range(4)), "rollouts/0", "rollouts/1"]
    for pool in data["pools"]:
        for lane in pool["lanes"]:
            assert lane["start"][0] == 0
            assert lane["stop"][-1] == data["span"]
            assert lane["start"][1:] == lane["stop"][:-1]
    assert [number for number, _, _ in data["steps"]] == [1, 2, 3, 4]
    assert len(data["decisions"]) == 8


def test_what_a_reader_wants_to_know_is_said(made_up):
    page, _ = made_up
    text = " ".join(page.text)
    for part in (
        "made up", "finished", "4 of 4 steps", "48 devices in 6 slices", "policy predictive", "device time at work",
        "4 × lend, 4 × reclaim", "benefit", "arguments respelled", "0.200 at step 0, 0.400 at step 3",
    ):  # fmt: skip
        assert part in text, part


def test_what_rows_share_has_a_card_and_a_section_where_it_was_computed_once(made_up):
    """The second step is of a run that was begun without it."""
    shared = step(3, row_tokens=9000, computed_tokens=3000, sharing_saved_s=7.0)
    page, _ = page_of(made_up_run(), [step(1), step(2, row_tokens=9000, computed_tokens=None), shared])
    text = " ".join(page.text)
    assert "33%" in text
    assert "of 9.0k tokens in rows, the others shared · 7.0 s saved per step, estimated" in text
    assert "seconds saved per step, estimated" in text
    assert "What rows share" not in " ".join(made_up[0].text)


def test_what_a_trained_token_cost_and_how_many_rows_a_rollout_became_have_cards():
    events = [
        flight.RunStarted(at=0.0, name="x", policy="p", eta=1, bound=1, total_steps=1),
        flight.SliceAdded(
            at=0.0, slice="t", pool="trainer", devices=4, capabilities=("train",), state=SliceState.TRAINING
        ),
        flight.StepBegan(at=0.0, step=1),
        flight.RowsTrained(
            at=9.0, step=1, rollouts=2, staleness=(0,) * 3, prompt_tokens=(1,) * 3, response_tokens=(1,) * 3
        ),
        flight.StepEnded(at=10.0, step=1),
    ]
    text = " ".join(page_of(events, [step(1, step_s=10.0, tokens_per_s=800.0)])[0].text)
    assert "GPU-seconds per 1,000 trained tokens 5 s" in " ".join(text.split())  # 40 device-seconds, 8,000 tokens
    assert "0.005 s for each" in text
    assert "in step 1; median 1.50, most 1.50" in text


def test_the_speed_of_a_run_counts_long_steps_for_what_they_took():
    events = [flight.RunStarted(at=0.0, name="x", policy="p", eta=1, bound=1, total_steps=2)]
    steps = [step(1, step_s=2.0, tokens_per_s=5000.0), step(2, step_s=18.0, tokens_per_s=10_000 / 18)]
    assert "1.0k trained tokens/s" in " ".join(page_of(events, steps)[0].text)


@pytest.mark.parametrize(("bound", "told"), [(None, "staleness not bounded"), (2, "staleness bound 2")])
def test_the_bound_is_that_which_is_kept(bound: int | None, told: str):
    events = [flight.RunStarted(at=0.0, name="x", policy="p", eta=1, bound=bound, total_steps=1)]
    text = " ".join(page_of(events, [step(1)])[0].text)
    assert told in text
    assert ("staleness ≤ 1 (bound 2)" in text) is (bound == 2)
    assert "bound 1" not in text


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&amp;\'"'


def test_hostile_names_stay_text():
    events = [
        flight.RunStarted(at=0.0, name=HOSTILE, policy=HOSTILE, eta=1, bound=1, total_steps=1),
        flight.SliceAdded(
            at=0.0, slice=HOSTILE, pool=HOSTILE, devices=1, capabilities=("train",), state=SliceState.TRAINING
        ),
        flight.StepBegan(at=0.0, step=1),
        flight.DecisionMade(at=0.5, decision="1", policy="p", action=HOSTILE, reason=HOSTILE, slices=(HOSTILE,)),
        flight.SessionEnded(
            at=0.6, session="s", group="g", seconds=1.0, turns=1, rows=1, reward=0.0, status=HOSTILE, drift={HOSTILE: 1}
        ),
        flight.StepEnded(at=1.0, step=1),
        flight.RunEnded(at=1.0, outcome=HOSTILE),
    ]
    page, text = page_of(events, [step(1)], [validation(1, 0.5, name=HOSTILE)])
    assert text.count("<script") == 2
    assert page.handlers == []
    assert "<img" not in text
    data = json.loads(page.scripts[0])
    assert data["pools"][0]["lanes"][0]["name"] == HOSTILE
    assert any(HOSTILE in part for part in page.text)


@pytest.mark.parametrize("steps", [[], [step(1)]], ids=["nothing", "steps only"])
def test_a_run_without_a_recording_has_a_page_that_says_so(steps):
    page, _ = page_of([], steps)
    text = " ".join(page.text)
    assert "no recording" in text
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS


def test_a_run_that_goes_on_has_a_page():
    events = [event for event in made_up_run() if event.at < 70]
    page, _ = page_of(events)
    assert "no end recorded" in " ".join(page.text)


def test_a_large_recording_stays_small_enough_for_a_laptop():
    events = made_up_run(trainers=24, rollouts=8, steps=60, requests=25)
    assert len(events) > 100_000
    page, text = page_of(events)
    assert len(text) < 4_000_000
    assert json.loads(page.scripts[0])["grain_s"] > 0
    assert "joined" in text


def test_charts_of_a_very_long_run_have_about_as_many_marks_as_pixels():
    values = [float(step % 7) for step in range(10_000)]
    line = charts.lines(
        [charts.Series(label="reward", points=list(enumerate(values)), style="s-train")], x_label="step", y_format=str
    )
    columns = charts.columns(
        [(str(step), {"training": 1.0 + step % 2}) for step in range(1, 6001)],
        styles={"training": "c-train"}, x_label="step", y_unit="s",
    )  # fmt: skip
    assert 300 <= line.count("<circle") <= 600
    assert "reward: 0.0" in line
    assert "reward: 6.0" in line
    assert columns.count("<rect") == 600
    assert "step 1 to 10, on average: training 1.5 s" in columns


def test_within_is_between_a_beginning_and_its_end():
    intervals = [(1.0, 2.0), (2.0, 3.0), (5.0, 5.0)]
    found = [at for at in (0.9, 1.0, 2.0, 2.5, 3.0, 3.1, 4.9, 5.0, 5.1) if within(intervals, at)]
    assert found == [1.0, 2.0, 2.5, 3.0, 5.0]
    assert not within([], 1.0)

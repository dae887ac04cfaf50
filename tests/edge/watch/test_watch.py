"""Runs watched over real HTTP: under way, over, killed, half written; from the list of runs down to a token."""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from seamless_verl.observe.flight import SURPLUS, SessionEnded, SessionGivenUp
from seamless_verl.observe.recording import FlightRecorder
from seamless_verl.observe.reporter import STEPS, VALIDATION
from seamless_verl.observe.token_signals import FOLDER, TokenSignals, write
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.session.handover import FolderSink
from seamless_verl.watch import index, index_file, watched, watched_groups
from seamless_verl.watch.index import INDEX
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
from tests.fakes import serving
from tests.kernel.observe.made_up import write_made_up_run

CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'


async def test_from_the_run_to_a_group_an_attempt_and_its_tokens(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with training(run) as proxy:
        good, bad = await begin(proxy, "task", 0), await begin(proxy, "task", 1)
        said = [user("hi")]
        said = [*said, await good.ask(said), user("more")]
        await good.ask(said)
        await bad.ask([user("hi")])
        rows = await good.end(1.0)
        await bad.end(0.0)
    step_no = rows[0].version_spans[0].version + 3  # trains on weights two versions older than those it changes
    write_texts(run, step_no, [("task_0_0", 1.0, "a"), ("task_1_0", 0.0, "b")])
    write_flight(run, _ended(good.session.id, 0, 1.0, 2.5, "finished"), _ended(bad.session.id, 1, 0.0, 9.0, "timeout"))
    length = len(rows[0].token_ids) - rows[0].prompt_len
    trained = TokenSignals(mask=np.ones(length), advantage=np.full(length, 0.5), log_ratio=np.linspace(0, 1, length))
    longer = TokenSignals(mask=np.ones(length + 1), advantage=np.ones(length + 1))
    write(run / FOLDER, f"{step_no}.0", {"task_0_0": trained, "task_1_0": longer})

    async with watching(run, save_tokenizer(tmp_path / "model")) as http:
        at = await only_run(http)
        (step,) = (await get(http, f"{at}/steps"))["steps"]
        (group,) = (await get(http, f"{at}/groups", step=step_no))["groups"]
        one = await get(http, f"{at}/attempt", key=good.session.id)
        tokens = await get(http, f"{at}/tokens", key=good.session.id, row=0)
        of_another = await get(http, f"{at}/tokens", key=bad.session.id, row=0)
        page = await http.get(f"api/{at}/page")

    assert (step["step"], step["groups"], step["attempts"], step["reward"]) == (step_no, 1, 2, 0.5)
    assert (group["flags"], group["seconds"]) == (["interrupted", "stale", "not finished"], 9.0)
    assert [(a["index"], a["reward"], a["status"]) for a in group["attempts"]] == [
        (0, 1.0, "finished"),
        (1, 0.0, "timeout"),
    ]
    first, second = one["turns"]
    assert [turn["parent"] for turn in one["turns"]] == [None, 0]
    assert "hi" in first["given"]
    assert "more" in second["given"]
    assert first["given"].startswith("<|im_start|>user")
    assert second["answer"]["content"] == "ok"
    assert one["attempt"]["rewards"] == {"passed": 1.0}
    (row,) = rows
    assert tokens["token_ids"] == list(row.token_ids)
    assert tokens["mask"] == list(row.mask)
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(tokens["log_probs"], row.log_probs, strict=True))
    spans = [(span.version, span.stop - span.start) for span in row.version_spans]
    assert [v for v in tokens["versions"] if v >= 0] == [version for version, length in spans for _ in range(length)]
    assert len(tokens["seams"]) == len(row.version_spans) - len(row.turns)
    told = tokens["signals"]
    assert told["advantage"] == [None] * row.prompt_len + [0.5] * length
    assert told["ratio"][row.prompt_len :: length - 1] == pytest.approx([1.0, math.e], rel=1e-3)
    assert (told["weight"], sum(told["counted"])) == (None, length)
    assert of_another["signals"] is None, "a row of another length is not this one"
    assert page.status_code == 200
    assert "watched" in page.text


async def test_each_row_of_a_session_shows_what_the_trainer_made_of_it(tmp_path: Path) -> None:
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task")
        said = [user("hi")]
        await agent.ask([*said, await agent.ask(said), user("more")])
        await agent.ask([user("something of its own")])
        rows = await agent.end(1.0)
    step_no = rows[0].version_spans[0].version + 1
    write_texts(tmp_path, step_no, [("task_0_0", 1.0, "b"), ("task_0_1", 1.0, "a")])
    lengths = [len(row.token_ids) - row.prompt_len for row in rows]
    trained = {
        key: TokenSignals(mask=np.ones(length), advantage=np.full(length, at))
        for key, length, at in (("task_0_0", lengths[1], 0.25), ("task_0_1", lengths[0], 0.5))
    }
    write(tmp_path / FOLDER, f"{step_no}.0", trained)
    async with watching(tmp_path) as http:
        at = await only_run(http)
        told = [(await get(http, f"{at}/tokens", key=agent.session.id, row=row))["signals"] for row in (0, 1)]
    assert lengths[0] > lengths[1]
    assert [signals and signals["advantage"][-1] for signals in told] == [0.5, 0.25]


def _ended(session: str, index: int, reward: float, seconds: float, status: str, detail: str = "") -> SessionEnded:
    return SessionEnded(
        at=1.0 + index, session=session, group="task", index=index, seconds=seconds, turns=2, rows=1, reward=reward,
        status=status, detail=detail,
    )  # fmt: skip


async def test_a_turn_is_there_with_the_next_look_and_stays_when_the_session_is_over(tmp_path: Path) -> None:
    async with training(tmp_path) as proxy, watching(tmp_path, alive=True) as http:
        agent = await begin(proxy, "task")
        said = [user("hi")]
        said = [*said, await agent.ask(said), user("more")]
        at = await only_run(http)
        before = await _attempt_when(http, at, agent.session.id, turns=1)
        await agent.ask(said)
        during = await _attempt_when(http, at, agent.session.id, turns=2)
        await agent.end(1.0)
        after = await _attempt_when(http, at, agent.session.id, turns=2, state="closed")
    assert before["attempt"]["state"] == "open"
    assert during["attempt"]["state"] == "open"
    assert during["turns"][:1] == [{**before["turns"][0], "is_leaf": False}]
    assert after["turns"] == during["turns"]
    assert after["attempt"]["reward"] == 1.0


async def _attempt_when(http, at: str, key: str, *, turns: int, state: str = "open") -> dict:
    """What the page shows, asked as often as it asks, until it says so; at most ten times."""
    for _ in range(10):
        answer = await http.get(f"api/{at}/attempt", params={"key": key})
        told = answer.json()
        if answer.status_code == 200 and len(told["turns"]) == turns and told["attempt"]["state"] == state:
            return told
        await asyncio.sleep(0.2)
    raise AssertionError(told)


async def test_an_attempt_that_the_trainer_gave_up_is_not_under_way(tmp_path: Path) -> None:
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task")
        await agent.ask([user("hi")])
        await proxy.admin.delete_session(agent.session.id)
    which: dict = {"session": agent.session.id, "group": "task", "index": 0, "seconds": 1.0}
    write_flight(tmp_path, SessionGivenUp(at=2.0, **which, status="failed", detail="OSError: disk full"))
    async with watching(tmp_path) as http:
        told = await get(http, f"{await only_run(http)}/attempt", key=agent.session.id)
    assert (told["group"]["flags"], len(told["turns"])) == (["interrupted", "given up", "not finished"], 1)
    attempt = told["attempt"]
    assert (attempt["state"], attempt["status"], attempt["detail"], attempt["reward"]) == (
        "given up", "failed", "OSError: disk full", None,
    )  # fmt: skip


async def test_an_attempt_that_was_not_needed_is_marked_and_found_by_its_mark(tmp_path: Path) -> None:
    async with training(tmp_path) as proxy:
        kept, surplus = await begin(proxy, "task", 0), await begin(proxy, "task", 1)
        for agent in (kept, surplus):
            await agent.ask([user("hi")])
        await kept.end(1.0)
        await proxy.admin.delete_session(surplus.session.id)
    write_texts(tmp_path, 1, [("task_0_0", 1.0, "a")])
    which: dict = {"session": surplus.session.id, "group": "task", "index": 1, "seconds": 1.0}
    write_flight(tmp_path, SessionGivenUp(at=2.0, **which, status=SURPLUS))
    async with watching(tmp_path) as http:
        at = await only_run(http)
        (step,) = (await get(http, f"{at}/steps"))["steps"]
        marked = await get(http, f"{at}/groups", step=1, flag="cut off by redundancy")
        told = await get(http, f"{at}/attempt", key=surplus.session.id)
    assert step["flags"]["cut off by redundancy"] == 1
    assert (marked["matching"], "group_redundancy" in marked["flags"]["cut off by redundancy"]) == (1, True)
    assert told["group"]["attempts"][1]["flags"][-1] == "cut off by redundancy"
    assert len(told["turns"]) == 1


async def test_attempts_that_hang_are_an_alarm_on_the_page_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_flight(tmp_path)
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task")
        await agent.ask([user("hi")])
        for alive, silent_s in ((True, 300.0), (False, -10.0), (True, -10.0)):
            monkeypatch.setattr(watched_groups, "SILENT_S", silent_s)
            async with watching(tmp_path, alive=alive) as http:
                at = await only_run(http)
                page = (await http.get(f"api/{at}/page")).text
                (group,) = (await get(http, f"{at}/groups", step="none"))["groups"]
            hangs = alive and silent_s < 0
            assert ("got no answer for five minutes: 1" in page) is hangs
            assert ("silent" in group["flags"]) is hangs


async def test_where_a_history_parts_both_sides_stand_beside_each_other(tmp_path: Path) -> None:
    async with training(tmp_path, lambda prompt: "one" if "compacted" not in prompt else "two") as proxy:
        agent = await begin(proxy, "task")
        await agent.ask([user("of a sub-agent")])  # shares less with the fork
        said = [user("hello"), await agent.ask([user("hello")]), user("the whole story")]
        await agent.ask(said)
        await agent.ask([user("hello"), {"role": "assistant", "content": "compacted"}, user("go on")])
        await agent.end(0.0)
    async with watching(tmp_path, save_tokenizer(tmp_path / "model")) as http:
        told = await get(http, f"{await only_run(http)}/attempt", key=agent.session.id)
        rows = told["rows"]
    fork = told["turns"][-1]
    assert fork["kind"] == "fork"
    assert fork["reasons"][0]["name"] == "history rewritten"
    assert "compact" in fork["reasons"][0]["explained"]
    parting = fork["parting"]
    assert "hello" in parting["before"]
    assert parting["recorded"].startswith("one<|im_end|>")
    assert parting["sent"].startswith("compacted<|im_end|>")
    assert len(rows) == 3
    assert told["attempt"]["drift"]["history_rewritten"] == 1
    assert "drifted" in told["group"]["flags"]


async def test_of_a_request_that_is_only_respelled_both_spellings_stand_beside_each_other(tmp_path: Path) -> None:
    async with training(tmp_path, lambda prompt: "one \n" if "more" not in prompt else "two") as proxy:
        agent = await begin(proxy, "task")
        await agent.ask([user("hello")])
        said = [user("hello"), {"role": "assistant", "content": "one"}, user("more")]
        said = [*said, await agent.ask(said)]
        await agent.ask([user("hello "), *said[1:], user("and on")])
        await agent.end(0.0)
    async with watching(tmp_path, save_tokenizer(tmp_path / "model")) as http:
        told = await get(http, f"{await only_run(http)}/attempt", key=agent.session.id)
    first, answer, question = (turn["respelled"] for turn in told["turns"])
    assert first is None
    recorded = 'answer of turn 0: {"content": "one \\n"}'
    assert answer == {"sent": 'answer of turn 0: {"content": "one"}', "recorded": recorded}
    assert question == {
        "sent": 'before the answer of turn 0: {"content": "hello "}\n' + answer["sent"],
        "recorded": recorded,
    }
    assert [turn["parting"] for turn in told["turns"]] == [None] * 3


async def test_where_the_attempts_of_a_group_part_is_told_from_tokens_and_from_texts(tmp_path: Path) -> None:
    async with training(tmp_path, lambda prompt: "well" if "again" in prompt else "ok") as proxy:
        agents = [await begin(proxy, "task", index) for index in range(3)]
        for agent, more in zip(agents, ("more", "more", "again"), strict=True):
            said = [user("hi")]
            said = [*said, await agent.ask(said), user(more)]
            await agent.ask(said)
        for agent in agents:
            await agent.end(1.0)
    write_texts(tmp_path, 1, [("old_0_0", 1.0, "the same, then this"), ("old_1_0", 0.0, "the same, then that")])
    async with watching(tmp_path, save_tokenizer(tmp_path / "model")) as http:
        at = await only_run(http)
        told = await get(http, f"{at}/partings", group="task")
        texts = await get(http, f"{at}/partings", group="old")
        nobody = await http.get(f"api/{at}/partings", params={"group": "nobody"})
    same, other = told["parted"]
    assert (told["first"], told["unit"], told["missing"]) == (agents[0].session.id, "token", [])
    assert (same["key"], same["place"]) == (agents[1].session.id, "same")
    assert (other["key"], other["place"], other["turn"]) == (agents[2].session.id, "given", 1)
    assert (other["first"].startswith("more"), other["this"].startswith("again")) == (True, True)
    (parted,) = texts["parted"]
    assert (texts["unit"], parted["at"], parted["first"], parted["this"]) == ("character", 17, "is", "at")
    assert nobody.status_code == 404


async def test_a_recording_of_the_proxy_alone_is_shown_from_its_rows(tmp_path: Path) -> None:
    record = tmp_path / "recorded"
    record.mkdir()
    journal = SqliteJournal(record / "journal.sqlite")
    async with serving(lambda prompt: "fine", journal=journal, sink=FolderSink(record)) as proxy:
        agent = await begin(proxy, "task-7", 2)
        said = [user("hi")]
        await agent.ask([*said, await agent.ask(said), user("more")])
        rows = (await proxy.admin.close_session(agent.session.id, 1.0, {})).rows
    await journal.close()
    async with watching(record, save_tokenizer(tmp_path / "model")) as http:
        at = await only_run(http)
        (group,) = (await get(http, f"{at}/groups", step="none"))["groups"]
        told = await get(http, f"{at}/attempt", key=agent.session.id)
        tokens = await get(http, f"{at}/tokens", key=agent.session.id)
        page = await http.get(f"api/{at}/page")
    assert (group["group"], group["reward"], group["attempts"][0]["index"]) == ("task-7", 1.0, 2)
    assert [turn["text"] for turn in told["turns"]] == ["fine<|im_end|>", "fine<|im_end|>"]
    assert tokens["token_ids"] == list(rows[0].token_ids)
    assert page.status_code == 404
    assert "neither flight/ nor steps.jsonl" in page.json()["error"]


async def test_a_text_is_found_in_names_errors_conversations_and_rows(tmp_path: Path) -> None:
    async with training(tmp_path, lambda prompt: "the Answer") as proxy:
        agent = await begin(proxy, "group-1", 0, task="sort_list")
        said = [user("please SORT it")]
        await agent.ask([*said, await agent.ask(said), user("more")])
        await agent.end(1.0)
    write_texts(tmp_path, 4, [("old_0_0", 0.5, "an older text")])
    write_flight(tmp_path, _ended("s9", 3, 0.0, 1.0, "failed", detail="ValueError: no such file"))
    async with watching(tmp_path, save_tokenizer(tmp_path / "model")) as http:
        at = await only_run(http)

        async def found(text: str) -> tuple[list[str], list[tuple]]:
            first = told = await get(http, f"{at}/search", text=text)
            assert first["all_named"]
            finds = [*told["found"]]
            while told["onward"] is not None:  # a look ends after some time, however little it saw
                told = await get(http, f"{at}/search", text=text, start=told["onward"])
                finds += told["found"]
            keys = [(find["attempt"]["key"], find.get("turn"), find["found"]) for find in finds]
            return [attempt["key"] for attempt in first["named"]], keys

        assert await found("Sort List") == ([agent.session.id], [])
        assert await found("no such FILE") == (["s9"], [])
        assert await found("please sort") == ([], [(agent.session.id, 0, "please SORT")])
        assert await found("the answer") == ([], [(agent.session.id, 0, "the Answer")])
        assert await found("older") == ([], [("old~0", None, "older")])
        assert await found("nowhere at all") == ([], [])
        told = await get(http, f"{at}/attempt", key="s9")
    assert told["attempt"]["detail"] == "ValueError: no such file"


async def test_times_of_an_attempt_and_of_a_step_and_what_two_runs_compare(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "made-up")
    async with watching(tmp_path) as http:
        at = await only_run(http)
        figures = await get(http, f"{at}/figures")
        step = await get(http, f"{at}/times", step=2)
        (key, seconds), *_ = step["blamed"]
        attempt = await get(http, f"{at}/times", key=key)
        nobody = await get(http, f"{at}/times", key="nobody")
    assert figures["run"]["name"] == "made-up"
    assert {"idle", "mean step"} <= {fact[0] for fact in figures["facts"]}
    assert 0 < seconds <= step["idle"]
    assert sum(attempt["idle"].values()) >= seconds
    assert sum(seconds for _, seconds in attempt["parts"]) == pytest.approx(attempt["seconds"])
    assert "does not know it" in nobody["why"]


async def test_a_recording_too_long_for_this_server_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_made_up_run(tmp_path)
    monkeypatch.setattr(watched, "_MOST_RECORDING", 1000)
    async with watching(tmp_path) as http:
        at = await only_run(http)
        page = await http.get(f"api/{at}/page")
        times = await get(http, f"{at}/times", step=1)
        steps = (await get(http, f"{at}/steps"))["steps"]
    assert page.status_code == 404
    assert "seamless-verl report" in page.json()["error"]
    assert "seamless-verl report" in times["why"]
    assert len(steps) == 1


async def test_tool_calls_are_told_apart_from_text(tmp_path: Path) -> None:
    async with training(tmp_path, lambda prompt: f"look{CALL}") as proxy:
        agent = await begin(proxy, "task")
        tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
        answer = await proxy.http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [user("hi")], "tools": tools},
            headers={"Authorization": f"Bearer {agent.session.api_key}"},
        )
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        await agent.end(0.0)
    async with watching(tmp_path) as http:
        told = await get(http, f"{await only_run(http)}/attempt", key=agent.session.id)
    (turn,) = told["turns"]
    assert turn["answer"]["content"] == "look"
    assert turn["answer"]["tool_calls"] == [{"name": "run", "arguments": '{"command": "ls"}'}]
    assert "--tokenizer" in told["why_no_text"]  # the run does not say which model it is of
    assert turn["text"].split()[0].isdecimal()


async def test_a_run_without_sessions_shows_the_text_of_its_rows_and_says_what_is_missing(tmp_path: Path) -> None:
    write_texts(tmp_path, 1, [("task_0_0", 0.5, "first answer")])
    write_flight(tmp_path)
    async with watching(tmp_path) as http:
        at = await only_run(http)
        (group,) = (await get(http, f"{at}/groups", step=1))["groups"]
        (attempt,) = group["attempts"]
        told = await get(http, f"{at}/attempt", key=attempt["key"])
        tokens = await http.get(f"api/{at}/tokens", params={"key": attempt["key"]})
    assert (attempt["key"], attempt["reward"]) == ("task~0", 0.5)
    assert told["texts"][0]["output"] == "first answer"
    assert "keep_mib" in told["why_no_turns"]
    assert (tokens.status_code, "keep_mib" in tokens.json()["error"]) == (404, True)


async def test_a_killed_run_with_half_a_journal_says_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task")
        await agent.ask([user("hi")])  # never closed
    recording = write_flight(tmp_path)
    with recording.open("a") as file:
        file.write('{"event":"StepBegan","at":2.0,"st')
    async with watching(tmp_path) as http:
        (listed,) = (await get(http, "runs"))["runs"]
        at = f"run/{listed['id']}"
        told = await get(http, f"{at}/attempt", key=agent.session.id)
        page = await http.get(f"api/{at}/page")
    assert (listed["state"], listed["style"]) == ("no end recorded", "bad")
    assert len(told["turns"]) == 1
    assert "was killed" in page.text

    journal = tmp_path / "proxy" / "agent_loop_worker_0" / "journal.sqlite"
    journal.write_bytes(journal.read_bytes()[:5000])
    for left in journal.parent.glob("*.sqlite-*"):
        left.unlink()
    (tmp_path / INDEX).unlink()
    async with watching(tmp_path) as http:
        steps = await get(http, f"{at}/steps")
    assert any("journal.sqlite: DatabaseError" in problem for problem in steps["problems"])


async def test_an_empty_folder_a_folder_of_a_hundred_runs_and_one_that_comes(tmp_path: Path) -> None:
    async with watching(tmp_path) as http:
        assert (await get(http, "runs"))["runs"] == []
        for number in range(100):
            write_flight(tmp_path / f"run-{number:02}")
        (tmp_path / "no run").mkdir()
        listed = (await get(http, "runs"))["runs"]
        nothing = await get(http, f"run/{listed[7]['id']}/steps")
    assert [run["name"] for run in listed] == [f"run-{number:02}" for number in range(100)]
    assert nothing["steps"] == []


async def test_looking_changes_no_file_of_a_killed_run(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    async with training(tmp_path / "run") as proxy:
        over, open_still = await begin(proxy, "task", 0), await begin(proxy, "task", 1)
        await over.ask([user("hi")])
        await over.end(1.0)
        await open_still.ask([user("hi")])
        shutil.copytree(tmp_path / "run", killed)  # what a kill leaves: write-ahead logs that nobody will fold in
    write_made_up_run(killed)
    before = _contents(killed)
    assert any(file.name == "journal.sqlite-wal" for file in before)
    async with watching(killed) as http:
        at = await only_run(http)
        for agent in (over, open_still):
            assert len((await get(http, f"{at}/attempt", key=agent.session.id))["turns"]) == 1
        await http.get(f"api/{at}/page")
    after = _contents(killed)
    assert {file.name for file in after.keys() - before.keys()} == {INDEX}
    assert {file.name for file, data in before.items() if after.get(file) != data} == set()


def _contents(folder: Path) -> dict[Path, bytes]:
    """But for SQLite's shared memory, in which its readers, too, note what they look at."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.name.endswith("-shm"))
    return {file: file.read_bytes() for file in files}


async def test_a_line_cut_short_is_read_when_it_is_whole(tmp_path: Path) -> None:
    recording = write_flight(tmp_path, _ended("s1", 0, 1.0, 2.0, "finished"))
    whole = recording.read_bytes()
    recording.write_bytes(whole[:-30])
    async with watching(tmp_path) as http:
        at = await only_run(http)
        assert (await get(http, f"{at}/steps"))["steps"] == []
    recording.write_bytes(whole)
    async with watching(tmp_path) as http:
        (step,) = (await get(http, f"{at}/steps"))["steps"]
    assert step["attempts"] == 1


async def test_the_steps_are_read_around_a_broken_record_and_carry_no_validations(tmp_path: Path) -> None:
    write_flight(tmp_path)
    (tmp_path / STEPS).write_text('{"step": 1, "reward": 0.5}\n{"ste{"step": 2}\n17\n{"step": 3, "reward": 1.0}\n{"st')
    (tmp_path / VALIDATION).write_text('{"step": 0, "name": "held_out", "task_means": {"of-a-task": 1.0}}\n')
    async with watching(tmp_path) as http:
        told = await get(http, f"{await only_run(http)}/steps")
    assert [(step["step"], step["reward"]) for step in told["steps"]] == [(3, 1.0), (1, 0.5)]
    assert "of-a-task" not in str(told), "of a long run they are megabytes, with every look"


async def test_broken_bytes_are_shown_as_such_and_lines_that_are_no_records_are_counted(tmp_path: Path) -> None:
    write_texts(tmp_path, 1, [("task_0_0", 0.5, "x"), ("task_1_0", 1.0, "second")])
    dump = tmp_path / "rows" / "1.jsonl"
    broken = dump.read_bytes().replace(b'"x"', b'"caf\xe9 \xff\xfe au lait"')
    deep = b'{"uid":"deep_0_0","step":' + b"[" * 200_000 + b"\n"
    dump.write_bytes(b"no record\n" + deep + broken + b'{"uid":"task_2_0","step":"many"}\n')
    recording = write_flight(tmp_path, _ended("s1", 0, 1.0, 2.0, "finished"))
    with recording.open("ab") as file:
        file.write(recording.read_bytes().splitlines()[-1].replace(b'"s1"', b'"s2\xff"') + b"\n")
        file.write(b'{"event":"SessionEnded","at":3.0}\n')
    async with watching(tmp_path) as http:
        at = await only_run(http)
        steps = await get(http, f"{at}/steps")
        told = await get(http, f"{at}/attempt", key="s1")
        search = await get(http, f"{at}/search", text="au lait")
        ended = await get(http, f"{at}/attempt", key="s2\ufffd")
    problems = sorted(steps["problems"])
    assert problems[0].startswith("flight/trainer.jsonl: 1 line is no record")
    assert problems[1].startswith("rows/1.jsonl: 3 lines are no record")
    assert told["texts"][0]["output"] == "caf\ufffd \ufffd\ufffd au lait"
    assert [find["found"] for find in search["found"]] == ["au lait"]
    assert ended["attempt"]["status"] == "finished"


async def test_half_a_surrogate_pair_in_an_error_hides_no_attempt(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, "rollout")
    recorder.record(_ended("s1", 0, 0.0, 2.0, "failed", "ValueError: \ud83d"))
    recorder.record(_ended("s2", 1, 1.0, 2.0, "finished"))
    recorder.close()
    async with watching(tmp_path) as http:
        at = await only_run(http)
        told = [(await get(http, f"{at}/attempt", key=key))["attempt"]["detail"] for key in ("s1", "s2")]
    assert told == ["ValueError: ?", None]


async def test_of_a_long_text_the_beginning_is_sent_and_what_was_seen_is_not_sent_again(tmp_path: Path) -> None:
    line = "x" * 10_000_000
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task")
        await agent.ask([user("y" * 30_000)])
        await agent.end(1.0)
    write_texts(tmp_path, 1, [("old_0_0", 0.5, line)])
    async with watching(tmp_path, save_tokenizer(tmp_path / "model")) as http:
        at = await only_run(http)
        while (answer := await http.get(f"api/{at}/attempt", params={"key": "old~0"})).json()["is_behind"]:
            pass  # on a busy machine it has read a part, and will have news
        told = answer.json()
        again = await http.get(f"api/{at}/attempt", params={"key": "old~0", "seen": told["mark"]})
        whole = await get(http, f"{at}/text", key="old~0", at=told["texts"][0]["output"]["at"])
        kept = await get(http, f"{at}/attempt", key=agent.session.id)
        given = await get(http, f"{at}/text", key=agent.session.id, at=kept["turns"][0]["given"]["at"])
        nothing = await http.get(f"api/{at}/text", params={"key": "old~0", "at": "texts.7.output"})
        row = await get(http, f"{at}/tokens", key=agent.session.id)
        row_again = await http.get(f"api/{at}/tokens", params={"key": agent.session.id, "seen": row["mark"]})
        write_texts(tmp_path, 1, [("old_0_0", 0.5, "short")])
        seen = {"key": "old~0", "seen": told["mark"]}
        while (changed := await http.get(f"api/{at}/attempt", params=seen)).status_code == 204:  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.05)
        while changed.json()["is_behind"]:
            changed = await http.get(f"api/{at}/attempt", params=seen)
    assert len(answer.content) < 100_000
    assert told["texts"][0]["output"] == {"part": line[:20_000], "of": len(line), "at": "texts.0.output"}
    assert whole["text"] == line
    assert (again.status_code, again.content, row_again.status_code) == (204, b"", 204)
    assert "y" * 30_000 in given["text"]
    assert nothing.status_code == 404
    assert changed.json()["texts"][0]["output"] == "short"


async def test_a_journal_with_broken_text_shows_its_sessions(tmp_path: Path) -> None:
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task", task="sort")
        await agent.ask([user("hi")])
        await agent.end(1.0)
    with sqlite3.connect(tmp_path / "proxy" / "agent_loop_worker_0" / "kept.sqlite") as db:
        db.execute("UPDATE sessions SET spec = CAST(replace(CAST(spec AS BLOB), 'sort', X'736FFF74') AS TEXT)")
    db.close()
    async with watching(tmp_path) as http:
        told = await get(http, f"{await only_run(http)}/attempt", key=agent.session.id)
    assert (told["attempt"]["task"], len(told["turns"]), told["problems"]) == ("so\ufffdt", 1, [])


async def test_where_the_folder_cannot_be_written_the_index_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()  # stands for a disk that is read-only; root may write everywhere
    write_texts(tmp_path, 1, [("task_0_0", 0.5, "text")])
    write_flight(tmp_path)
    async with watching(tmp_path) as http:
        (step,) = (await get(http, f"{await only_run(http)}/steps"))["steps"]
    assert step["attempts"] == 1
    assert list((tmp_path / INDEX).iterdir()) == []


async def test_two_servers_of_one_run_do_not_disturb_each_other(tmp_path: Path) -> None:
    write_texts(tmp_path, 1, [("task_0_0", 0.5, "text")])
    write_flight(tmp_path)
    async with watching(tmp_path) as one, watching(tmp_path) as other:
        for http in (one, other, one):
            (step,) = (await get(http, f"{await only_run(http)}/steps"))["steps"]
            assert step["attempts"] == 1
        write_texts(tmp_path, 2, [("later_0_0", 0.5, "text")])
        await asyncio.sleep(0.6)  # as long as an answer may be old
        for http in (one, other):
            assert len((await get(http, f"{await only_run(http)}/steps"))["steps"]) == 2


async def test_a_large_run_is_counted_and_shown_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_flight(tmp_path)
    for step in (1, 2):
        write_texts(tmp_path, step, [(f"{group}-{step}_0_0", 0.5, "text") for group in ("a", "b", "c")])
    monkeypatch.setattr(watched, "_COUNT_S", -1.0)
    monkeypatch.setattr(watched, "_PAGE", 2)
    async with watching(tmp_path) as http:
        at = await only_run(http)
        told = await get(http, f"{at}/steps")
        assert ([step["groups"] for step in told["steps"]], told["is_behind"]) == ([None, None], True)
        monkeypatch.setattr(watched, "_COUNT_S", 10.0)
        assert [step["groups"] for step in (await get(http, f"{at}/steps"))["steps"]] == [3, 3]
        first = await get(http, f"{at}/groups", step=1)
        second = await get(http, f"{at}/groups", step=1, start=first["onward"])
    monkeypatch.setattr(watched, "_COUNT_S", -1.0)
    async with watching(tmp_path) as http:  # another server of the same index need not count again
        told = await get(http, f"{at}/steps")
    assert ([step["groups"] for step in told["steps"]], told["is_behind"]) == ([3, 3], False)
    assert [len(part["groups"]) for part in (first, second)] == [2, 1]
    assert (first["matching"], first["onward"], second["onward"]) == (3, 2, None)


async def test_a_large_run_is_read_in_parts_each_click_some_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [
        SessionEnded(
            at=1.0, session=name, group=name, index=0, seconds=1.0, turns=1, rows=1, reward=0.5, status="finished"
        )
        for name in ("a-1", "b-1", "c-1", "a-2", "b-2", "c-2")
    ]
    write_flight(tmp_path, *ended)
    for step in (1, 2):
        write_texts(tmp_path, step, [(f"{group}-{step}_0_0", 0.5, "text") for group in ("a", "b", "c")])
    monkeypatch.setattr(index, "_UPDATE_S", -1.0)
    monkeypatch.setattr(index, "_MOST_BYTES", 1)  # a line at least
    monkeypatch.setattr(index_file, "_SHARE", 1e9)  # counted anew at once
    counts = []
    async with watching(tmp_path) as http:
        at = await only_run(http)
        while (told := await get(http, f"{at}/steps"))["is_behind"]:
            counts.append(sum(step["attempts"] or 0 for step in told["steps"] if step["step"] != "none"))
        assert [(step["step"], step["attempts"]) for step in told["steps"]] == [(2, 3), (1, 3)]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3


async def test_a_step_that_a_restarted_run_repeats_shows_its_new_attempts(tmp_path: Path) -> None:
    write_flight(tmp_path)
    write_texts(tmp_path, 1, [("old_0_0", 0.5, "text")])
    async with watching(tmp_path) as http:
        at = await only_run(http)
        assert [step["attempts"] for step in (await get(http, f"{at}/steps"))["steps"]] == [1]
        write_texts(tmp_path, 1, [("new_0_0", 0.5, "a longer text"), ("new_1_0", 1.0, "the other")])
        await asyncio.sleep(0.6)  # as long as an answer may be old
        (step,) = (await get(http, f"{at}/steps"))["steps"]
        (group,) = (await get(http, f"{at}/groups", step=1))["groups"]
        told = await get(http, f"{at}/attempt", key="new~1")
    assert (step["attempts"], step["reward"]) == (2, 0.75)
    assert group["group"] == "new"
    assert told["texts"][0]["output"] == "the other"


async def test_a_session_that_left_unseen_is_not_under_way(tmp_path: Path) -> None:
    """Of a worker that keeps none, or that has died."""
    folder = tmp_path / "proxy" / "agent_loop_worker_0"
    folder.mkdir(parents=True)
    journal = SqliteJournal(folder / "journal.sqlite")
    async with serving(journal=journal) as proxy, watching(tmp_path) as http:
        agent = await begin(proxy, "task")
        await agent.ask([user("hi")])
        at = await only_run(http)
        (step,) = (await get(http, f"{at}/steps"))["steps"]
        assert "under way" in step["flags"]
        await proxy.admin.delete_session(agent.session.id)
        await asyncio.sleep(0.6)
        (step,) = (await get(http, f"{at}/steps"))["steps"]
        assert "under way" not in step["flags"]
        assert (await get(http, f"{at}/attempt", key=agent.session.id))["turns"] == []
    await journal.close()


async def test_a_run_that_began_anew_in_its_folder_is_indexed_anew(tmp_path: Path) -> None:
    write_flight(tmp_path, _ended("s1", 0, 1.0, 2.0, "finished"), _ended("s2", 1, 1.0, 2.0, "finished"))
    async with watching(tmp_path) as http:
        at = await only_run(http)
        assert [step["attempts"] for step in (await get(http, f"{at}/steps"))["steps"]] == [2]
    write_flight(tmp_path, _ended("s3", 0, 1.0, 2.0, "finished"))
    async with watching(tmp_path) as http:
        (group,) = (await get(http, f"{at}/groups", step="none"))["groups"]
    assert [attempt["key"] for attempt in group["attempts"]] == ["s3"]


@pytest.mark.parametrize(
    ("path", "query", "told"),
    [
        ("run/nowhere/steps", {}, "not there"),
        ("{at}/groups", {"step": "x"}, "x is no step"),
        ("{at}/groups", {"step": "1", "sort": "by luck"}, "no order 'by luck'"),
        ("{at}/attempt", {"key": "nobody"}, "knows no attempt nobody"),
        ("{at}/tokens", {"key": "nobody"}, "knows no attempt nobody"),
    ],
)
async def test_what_is_not_there_is_said(tmp_path: Path, path: str, query: dict, told: str) -> None:
    write_flight(tmp_path)
    async with watching(tmp_path) as http:
        answer = await http.get(f"api/{path.format(at=await only_run(http))}", params=query)
    assert answer.status_code == 404
    assert told in answer.json()["error"]

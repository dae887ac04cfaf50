"""What happens in the instants in which an answer is recorded: clients leave, sessions are closed, processes die.

No sockets, threads or sleeps: the test acts between two steps of the event loop, or while the journal is held.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.engine import GenerationRequest
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.handover import FolderSink
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.generation import Generation
from seamless_verl.trajectory.rows import AuditReport, Row
from tests.fakes import ScriptedEngine, small_tokenizer
from tests.instants import House, SteppingJournal, rows_after_restart, steps

NO_GRACE = Limits(orphan_grace_s=0.0)
N = 3


def _house(journal: SteppingJournal | None = None, **options: Any) -> House:
    numbers = count()
    return House(journal, lambda prompt: f"answer {next(numbers)}", **{"limits": NO_GRACE, **options})


def _names(result: Any) -> set[str]:
    """The answers that a session's rows train."""
    assert result["audit"]["violations"] == []
    return {turn[0] for row in result["rows"] for turn in row["turns"] if turn[3]}


def _kept(result: Any) -> list[Any]:
    """What of a result outlives the process; the audit also counts what was discarded."""
    return [result[name] for name in ("rows", "kinds", "drift", "reward", "metadata")]


async def _last_step(n: int, journal: SteppingJournal | None) -> int:
    """How many steps of the loop a request takes from its beginning to its end."""
    house = _house(journal)
    _, key = await house.open()
    caller = house.ask(key, "hi", n=n)
    for number in count():
        if caller.task.done():
            return number
        await steps(1)
    raise AssertionError


@pytest.mark.parametrize("act", ["leave", "close"])
@pytest.mark.parametrize("is_written", [False, True])
async def test_samples_are_recorded_all_or_none_whenever_somebody_ends_them(
    tmp_path: Path, act: str, is_written: bool
) -> None:
    """At each step of a request in turn the client leaves or the session is closed."""
    journal = SteppingJournal(tmp_path / "j.sqlite", before=1, after=1) if is_written else None
    seen = set()
    for at in range(await _last_step(N, journal) + 1):
        house = _house(journal)
        session, key = await house.open()
        caller = house.ask(key, "hi", n=N)
        await steps(at)
        if act == "leave":
            caller.leave()
            await caller.task
            await steps(3)  # the grace period is over
        result = await house.close(session)
        answer = await caller.answered()
        names = _names(result)
        assert len(names) in (0, N), f"step {at}"
        if caller.status == 200:
            assert len(names) == len(answer["choices"]) == N, f"step {at}"
        if journal is not None:
            journal.copy_to(tmp_path / "later.sqlite")
            assert _kept(await rows_after_restart(tmp_path / "later.sqlite", session)) == _kept(result), f"step {at}"
        seen.add(len(names))
    assert seen == {0, N}
    if journal is not None:
        await journal.close()


async def test_a_process_that_dies_while_it_records_leaves_all_samples_or_none(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    seen = []
    journal = SteppingJournal(path)
    last = await _last_step(N, journal)
    for at in range(last + 1):
        house = _house(journal)
        session, key = await house.open()
        caller = house.ask(key, "hi", n=N)
        await steps(at)
        journal.copy_to(tmp_path / f"{at}.sqlite")
        seen.append(len(_names(await rows_after_restart(tmp_path / f"{at}.sqlite", session))))
        await caller.task
    assert set(seen) == {0, N}
    assert seen == sorted(seen)
    await journal.close()


async def test_samples_that_cannot_all_be_written_are_not_recorded(tmp_path: Path) -> None:
    journal = SteppingJournal(tmp_path / "j.sqlite")
    journal.failing = frozenset({0})
    house = _house(journal)
    session, key = await house.open()
    refused = house.ask(key, "hi", n=N)
    assert (await refused.answered())["error"]["code"] == "journal_failed"
    answered = house.ask(key, "hi", n=N, retry=1)
    await answered.task
    assert answered.status == 200
    result = await house.close(session)
    assert len(_names(result)) == N
    assert _kept(await rows_after_restart(tmp_path / "j.sqlite", session)) == _kept(result)
    await journal.close()


@pytest.mark.parametrize("held", ["before it is on disk", "after"])
@pytest.mark.parametrize("n", [1, N])
async def test_a_turn_in_the_journal_is_in_the_rows_however_often_it_is_ended(
    tmp_path: Path, held: str, n: int
) -> None:
    """Its client leaves, and then the session is closed, while the journal writes."""
    journal = SteppingJournal(tmp_path / "j.sqlite")
    gate, reached = (journal.may_return, journal.written) if held == "after" else (journal.may_write, journal.reached)
    gate.clear()
    house = _house(journal)
    session, key = await house.open()
    caller = house.ask(key, "hi", n=n)
    await reached.wait()
    caller.leave()
    await caller.task
    await steps(10)
    closing = asyncio.create_task(house.close(session))
    await steps(30)
    assert not closing.done()
    gate.set()
    result = await closing
    assert len(_names(result)) == n
    assert _kept(await rows_after_restart(tmp_path / "j.sqlite", session)) == _kept(result)
    await journal.close()


async def test_a_client_that_waits_gets_what_was_being_written_when_its_session_was_closed(tmp_path: Path) -> None:
    journal = SteppingJournal(tmp_path / "j.sqlite")
    journal.may_write.clear()
    house = _house(journal)
    session, key = await house.open()
    caller = house.ask(key, "hi")
    await journal.reached.wait()
    closing = asyncio.create_task(house.close(session))
    await steps(10)
    late = house.ask(key, "something else")
    assert (await late.answered())["error"]["code"] == "session_closed"
    journal.may_write.set()
    answer, result = await caller.answered(), await closing
    assert _names(result) == {answer["id"].removeprefix("chatcmpl-")}
    await journal.close()


class Reluctant(ScriptedEngine):
    """An engine that is told of a cancellation and takes its time; stands at the engine boundary."""

    def __init__(self) -> None:
        super().__init__(small_tokenizer(), lambda prompt: "ok")
        self.told, self.may_end = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        if self.requests:
            return await super().generate(request)
        self.requests.append(request)
        try:
            await asyncio.Event().wait()
        finally:
            self.told.set()
            await self.may_end.wait()
        raise AssertionError


async def test_a_retry_of_what_is_being_given_up_is_generated_anew() -> None:
    engine = Reluctant()
    house = _house(engine=engine)
    session, key = await house.open()
    first = house.ask(key, "hi")
    while not engine.requests:
        await steps(1)
    first.leave()
    await engine.told.wait()
    again = house.ask(key, "hi", retry=1)
    await steps(30)
    engine.may_end.set()
    assert (await again.answered())["choices"][0]["message"]["content"] == "ok"
    result = await house.close(session)
    assert (len(engine.requests), len(_names(result))) == (2, 1)


async def test_a_retry_gets_the_answer_that_was_being_written_when_its_grace_was_over(tmp_path: Path) -> None:
    journal = SteppingJournal(tmp_path / "j.sqlite")
    journal.may_write.clear()
    house = _house(journal)
    session, key = await house.open()
    first = house.ask(key, "hi", n=N)
    await journal.reached.wait()
    first.leave()
    await first.task
    await steps(10)
    again = house.ask(key, "hi", n=N, retry=1)
    await steps(30)
    journal.may_write.set()
    answer = await again.answered()
    assert (again.status, len(answer["choices"])) == (200, N)
    assert len(_names(await house.close(session))) == N
    assert len(house.engine.requests) == N
    await journal.close()


async def test_what_is_generated_while_nobody_waits_is_recorded_for_whoever_asks_again() -> None:
    house = _house(limits=Limits(orphan_grace_s=60.0))
    for comes_back in (True, False):
        session, key = await house.open()
        first = house.ask(key, "hi", n=N)
        await steps(8)  # the engine is at work
        first.leave()
        await first.task
        await steps(40)
        assert house.deps.sessions.by_id(session).tree.num_turns == 0
        if comes_back:
            again = house.ask(key, "hi", n=N)
            assert len((await again.answered())["choices"]) == N
        assert len(_names(await house.close(session))) == (N if comes_back else 0)
    assert len(house.engine.requests) == 2 * N


async def test_samples_of_a_request_are_not_given_to_one_that_wants_fewer() -> None:
    """A request that wants one answer is no retry of one that wants three; those are given up, and it has its own."""
    engine = ScriptedEngine(small_tokenizer(), lambda prompt: "ok", streams=True)
    engine.permits = asyncio.Semaphore(0)
    house = _house(engine=engine)
    session, key = await house.open()
    first = house.ask(key, "hi", n=N, stream=True)
    while len(engine.requests) < N:
        await steps(1)
    again = house.ask(key, "hi", retry=1)
    await steps(10)
    first.leave()
    await first.task
    await steps(10)
    for _ in range(100):
        engine.permits.release()
    answer = await again.answered()
    assert (len(answer["choices"]), len(engine.requests)) == (1, N + 1)
    assert _names(await house.close(session)) == {answer["id"].removeprefix("chatcmpl-")}


class _CopyingSink(FolderSink):
    """Keeps what the journal held when rows were on their way."""

    def __init__(self, journal: SteppingJournal, path: Path) -> None:
        self._journal = journal
        self._path = path

    def write(self, session: Session, rows: tuple[Row, ...], report: AuditReport) -> None:
        self._journal.copy_to(self._path)

    def read(self, session_id: str) -> None:
        return None


async def test_a_process_that_dies_while_rows_are_written_still_has_their_session(tmp_path: Path) -> None:
    journal = SteppingJournal(tmp_path / "j.sqlite")
    house = _house(journal, sink=_CopyingSink(journal, tmp_path / "then.sqlite"))
    session, key = await house.open()
    await house.ask(key, "hi", n=2).task
    result = await house.close(session)
    assert _kept(await rows_after_restart(tmp_path / "then.sqlite", session)) == _kept(result)
    assert journal.sessions() == []  # it is forgotten once they are written, not before
    await journal.close()


@pytest.mark.parametrize("parquet", [False, True])
async def test_each_row_that_is_written_has_its_sessions_reward(tmp_path: Path, parquet: bool) -> None:
    house = _house(sink=FolderSink(tmp_path, parquet=parquet))
    session, key = await house.open(group="g", metadata={"task": 3})
    await house.ask(key, "hi", n=N).task
    await house.app.state.handover.close(session, 0.5, {"passed": 1.0})
    (path,) = (tmp_path / "rows").iterdir()
    if parquet:
        pyarrow = pytest.importorskip("pyarrow.parquet", reason="runs where the extra [parquet] is installed")
        rows = pyarrow.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == N
    for number, row in enumerate(rows):
        known = [row[name] for name in ("session", "group", "row", "reward", "rewards", "metadata", "violations")]
        assert known == [session, "g", number, 0.5, '{"passed":1.0}', '{"task":3}', 0]

"""The index of a run is a cache: whatever becomes of its file, its disk or its run, the pages show what is there."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from seamless_verl.observe.flight import RunStarted, SessionEnded
from seamless_verl.observe.recording import FLIGHT, write_recording
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.watch import index, index_file, readers, watched
from seamless_verl.watch.index import INDEX, RunIndex
from seamless_verl.watch.run_places import Place
from seamless_verl.watch.watched import Watched
from tests.edge.watch.recorded import begin, get, only_run, training, user, watching, write_flight, write_texts
from tests.kernel.observe.made_up import HEADER


def ended(session: str, group: str = "") -> SessionEnded:
    return SessionEnded(
        at=1.0, session=session, group=group or session, index=0, seconds=1.0, turns=1, rows=1, reward=0.5,
        status="finished",
    )  # fmt: skip


def keys(told: Watched) -> set[str]:
    groups = told.groups("none", "as begun", "", "", 0)["groups"]
    return {attempt["key"] for group in groups for attempt in group["attempts"]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watched, "_UPDATE_S", -1.0)  # each look looks
    write_flight(tmp_path / "run", ended("one"))
    return Watched(Place(id="x", name="run", path=tmp_path / "run"), None, lambda run: False)


async def test_a_folder_that_may_not_be_entered_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may enter everywhere, so the system's answer for one folder is what another user would get."""
    for name in ("closed", "open", "later"):
        write_flight(tmp_path / name, ended("one"))
    asks = os.stat

    def stat(path: os.PathLike[str] | str | int, **options: object) -> os.stat_result:
        if f"{closed}/" in f"{path}":
            raise PermissionError(13, "Permission denied", str(path))
        return asks(path, **options)  # type: ignore[arg-type]

    closed = tmp_path / "closed"
    monkeypatch.setattr(os, "stat", stat)
    async with watching(tmp_path) as http:
        assert {run["name"] for run in (await get(http, "runs"))["runs"]} == {"open", "later"}
        closed = tmp_path / "later"  # closed while it is watched
        monkeypatch.setattr("seamless_verl.watch.watch_command.places", lambda folder: known)
        known = [Place(id="a", name="later", path=closed), Place(id="b", name="open", path=tmp_path / "open")]
        later, still = (await get(http, "runs"))["runs"]
    assert later["state"].startswith("cannot be read: [Errno 13]")
    assert still["state"] != later["state"]


def as_another_user(work: Callable[[], None]) -> None:
    """In a process that may do no more than its user, where this one is root."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("version", [index._VERSION, 1])
def test_an_index_that_may_only_be_read_is_left_alone(version: int) -> None:
    """Not in pytest's folder, which no other user may enter."""
    place = Path("/tmp") / f"seamless-index-{os.getpid()}-{version}"
    place.mkdir()
    try:
        write_flight(place, ended("one"))
        RunIndex(place).close()
        with sqlite3.connect(place / INDEX) as db:
            db.execute(f"PRAGMA user_version = {version}")
        db.close()
        for path, mode in ((place / INDEX, 0o444), (place / FLIGHT, 0o555), (place, 0o555)):
            path.chmod(mode)

        def look() -> None:
            found = RunIndex(place)
            found.update()
            assert (found.where.parent, found.num_groups(None)) == (found.scratch, 1)
            found.close()

        as_another_user(look)
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


@pytest.mark.parametrize("beside", [True, False])
def test_a_run_that_was_made_again_in_its_folder_is_not_mixed_with_the_old_one(run: Watched, beside: bool) -> None:
    if not beside:
        (run.place.path / INDEX).mkdir()
    assert keys(run) == {"one"}
    shutil.rmtree(run.place.path)
    start = RunStarted(at=0.0, name="again", policy="", eta=1, total_steps=4)
    write_recording(run.place.path / FLIGHT / "trainer-2.jsonl", HEADER, [start, ended("two")])
    assert keys(run) == {"two"}
    run.close()


def test_a_disk_that_fills_loses_no_attempt(run: Watched) -> None:
    assert keys(run) == {"one"}
    assert run._index is not None
    run._index._db.execute("PRAGMA cache_size = 1")  # so that the disk is written before the end
    pages = run._index._db.execute("PRAGMA page_count").fetchone()[0]
    run._index._db.execute(f"PRAGMA max_page_count = {pages}")
    many = {f"attempt-{number:04}" for number in range(400)}
    write_flight(run.place.path, ended("one"), *(ended(name, "a group") for name in sorted(many)))
    assert keys(run) == {"one", *many}
    assert run._index.where.parent == run._index.scratch
    run.close()


def test_a_damaged_index_is_made_again(run: Watched) -> None:
    assert keys(run) == {"one"}
    run.close()
    file = run.place.path / INDEX
    file.write_bytes(file.read_bytes()[:100] + b"\xff" * (file.stat().st_size - 100))
    assert keys(run) == {"one"}
    assert run._index is not None
    assert run._index.where == file
    run.close()


async def test_what_is_under_way_is_shown_however_many_groups_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_MOST_UNTRAINED", 3)
    monkeypatch.setattr(index_file, "_SHARE", 1e9)  # counted anew at once
    async with training(tmp_path) as proxy, watching(tmp_path) as http:
        await begin(proxy, "under way")
        at = await only_run(http)
        await get(http, f"{at}/steps")
        write_flight(tmp_path, *(ended(f"validation-{number}") for number in range(9)))
        write_texts(tmp_path, 1, [("trained_0_0", 0.5, "text")])
        monkeypatch.setattr(watched, "_UPDATE_S", -1.0)
        told = await get(http, f"{at}/groups", step="none")
        line = (await get(http, f"{at}/steps"))["steps"][-1]
    assert "under way" in {group["group"] for group in told["groups"]}
    assert (told["of"], told["in_all"], line["groups"]) == (4, 10, 10)
    assert (line["counted"], line["attempts"]) == (4, 4), "the line says of how many groups its figures are"


async def test_of_a_session_under_way_no_turn_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []
    unpack = readers.unpack
    monkeypatch.setattr(readers, "unpack", lambda body: unpacked.append(body) or unpack(body))
    async with training(tmp_path) as proxy:
        agent = await begin(proxy, "task")
        said = [user("hi")]
        found = RunIndex(tmp_path)
        for turns in range(1, 6):
            said = [*said, await agent.ask(said), user("more")]
            found.update()
            assert len(unpacked) == turns
            assert found.attempt(agent.session.id)["turns"] == turns
        found.close()


async def test_many_sessions_under_way_are_read_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_UPDATE_S", -1.0)
    monkeypatch.setattr(index, "_MOST_KEPT", 4)
    async with training(tmp_path) as proxy:
        for number in range(10):
            await proxy.admin.open_session(SessionSpec(group=f"group-{number}", index=0))
        found = RunIndex(tmp_path)
        counts = []
        while found.is_behind:
            found.update()
            counts.append(found.num_groups(None))
        found.close()
    assert counts == [4, 8, 10]

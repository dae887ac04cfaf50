"""Where code broke or stands, in the lines of whoever wrote it."""

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest

from seamless_verl import places
from seamless_verl.places import error_in_words, places_of, places_of_coroutine, places_of_stack


def grade(text: str) -> float:
    return float(json.loads(text)["score"])


def raised(text: str) -> BaseException:
    try:
        grade(text)
    except Exception as error:  # noqa: BLE001 - what it is does not matter
        return error
    raise AssertionError


def test_the_users_lines_are_told_and_not_those_of_the_libraries_below_them() -> None:
    found = places_of(raised("{"))
    assert [place.split("/")[-1].split(": ")[0].split(":")[0] for place in found] == ["test_places.py"] * 2
    assert found[-1].endswith('in grade: return float(json.loads(text)["score"])')


def test_without_a_line_of_the_users_the_last_of_all_are_told_unless_only_the_users_are_wanted() -> None:
    with pytest.raises(ValueError, match="property name") as caught:
        json.loads("{")
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the line of this test
    assert places_of(error)[-1].partition(" in ")[0].rpartition(":")[0].endswith("json/decoder.py")
    assert places_of(error, only_own=True) == ()


def test_the_lines_of_another_process_are_found_in_what_ray_quotes() -> None:
    class RayTaskError(Exception):
        cause = KeyError("the_answer")

    quoted = (
        "ray::RewardLoopWorker.compute_score() (pid=7, ip=10.0.0.1)\n"
        f'  File "{places._PACKAGE}/x.py", line 3, in run\n    run()\n'
        '  File "/home/me/reward.py", line 9, in score\n    return answers["the_answer"]\n'
        "           ~~~~~~~^^^^^^^^^^^^^^\nKeyError: 'the_answer'"
    )
    error = RayTaskError(quoted)
    assert places_of(error) == ('/home/me/reward.py:9 in score: return answers["the_answer"]',)
    assert error_in_words(error) == "KeyError: 'the_answer'"
    assert error_in_words(ValueError("first\nsecond")) == "ValueError: first"


@pytest.mark.parametrize(
    "library",
    [
        "/home/me/.local/lib/python3.11/site-packages/vllm/engine.py",
        "/usr/lib/python3/dist-packages/torch/nn.py",
        "/opt/base/lib/python3.11/site-packages/ray/worker.py",
    ],
)
def test_what_is_installed_is_not_the_users_wherever_it_is(library: str) -> None:
    assert not places.is_own(library)
    assert places.is_own(library.replace("-packages", "_packages"))


def test_a_clone_of_verl_that_was_installed_for_editing_is_not_the_users_but_what_lies_beside_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    places._clones.cache_clear()
    try:
        assert not places.is_own(str(package / "trainer" / "main_ppo.py"))
        assert places.is_own(str(tmp_path / "my_task" / "reward.py"))
    finally:
        places._clones.cache_clear()


def test_recipes_count_as_the_users() -> None:
    assert places.is_own(f"{places._PACKAGE}/recipes/arithmetic/reward.py")
    assert not places.is_own(f"{places._PACKAGE}/cli.py")
    assert not places.is_own("<frozen importlib>")


async def test_a_coroutine_waits_where_the_innermost_one_does() -> None:
    async def think() -> None:
        await asyncio.Event().wait()

    async def act() -> None:
        await think()

    task = asyncio.ensure_future(act())
    await asyncio.sleep(0)
    found = places_of_coroutine(task.get_coro())
    assert [place.partition(" in ")[2] for place in found] == [
        "act: await think()",
        "think: await asyncio.Event().wait()",
    ]
    task.cancel()


def test_a_thread_stands_where_its_stack_ends() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(5))
    thread.start()
    try:
        found = places_of_stack(sys._current_frames()[thread.ident or 0])
        assert found[-1].endswith("thread = threading.Thread(target=lambda: stop.wait(5))")
    finally:
        stop.set()
        thread.join()

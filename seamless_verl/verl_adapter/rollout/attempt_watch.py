"""Failures and hangs on their way from the rollout workers to the console.

    attempt ends ─► attempt_log      ┐
    event loop stands ─► LoopWatch   ┴─ worker.attempts() ─► AttemptDesk.look ─► lines      (in the trainer)

``attempts`` answers from a thread of its own, so that it answers also while the worker's event loop is blocked.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError

from seamless_verl.errors import SeamlessError
from seamless_verl.observe.failures import AttemptBook, AttemptLog, AttemptNews
from seamless_verl.places import error_in_words, places_of, places_of_coroutine, places_of_stack

_BLOCKED_S = 10.0  # an event loop that has not turned for so long is told of; imports may take a few
_AGAIN_S = 1.0  # between two looks that nobody asked for
_LAST_ANSWERS_S = 5.0


def _explained(error: BaseException) -> tuple[str, tuple[str, ...]]:
    return error_in_words(error), places_of(error, only_own=isinstance(error, SeamlessError))


attempt_log = AttemptLog(time.monotonic, _explained)
"""The one of this process."""


def task_name(row: dict[str, Any]) -> str:
    """What people find the task of a data row by: ``train/17``, ``/17`` without a split."""
    extra = row.get("extra_info") or {}
    return f"{extra.get('split', '')}/{extra.get('index', row.get('index', ''))}"


def places_of_task(task: asyncio.Task[Any]) -> tuple[str, ...]:
    """Where a task waits."""
    coroutine: Any = task.get_coro()
    return places_of_coroutine(coroutine)


def places_of_threads(actor: Any = None) -> tuple[str, ...]:
    """Where a thread of this process stands in the user's code; called in actors of verl's."""
    frames = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    return next((own for frame in frames if (own := places_of_stack(frame, only_own=True))), ())


async def where_rewards_stand(workers: Sequence[Any]) -> tuple[str, ...]:
    """Where verl's reward workers stand in the user's reward function."""
    calls = [asyncio.wrap_future(worker.__ray_call__.remote(places_of_threads).future()) for worker in workers]
    answered = (await asyncio.wait(calls, timeout=_LAST_ANSWERS_S))[0] if calls else set()
    places = [call.result() for call in answered if call.exception() is None]
    if len(answered) < len(calls):
        return ("a reward worker does not answer, so `async def` code of the reward function blocks it",)
    return next((found for found in places if found), ("code that could not be found",))


class LoopWatch:
    """Notices when the event loop it was made in does not turn. `look` is called from other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._asked: float | None = None

    def look(self) -> tuple[float, tuple[str, ...]] | None:
        """For how many seconds it has not answered, and where it stands; None: it had answered when asked last."""
        now, asked = time.monotonic(), self._asked
        if asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._answer)
            return None
        return now - asked, places_of_stack(sys._current_frames().get(self._thread))

    def _answer(self) -> None:
        self._asked = None


def with_blocked(news: AttemptNews, watch: LoopWatch | None) -> AttemptNews:
    """The news with what is known of the worker's event loop; while that stands, all attempts are late for its sake."""
    silent = watch.look() if watch is not None else None
    if silent is None:
        return news
    return replace(news, standing=(), blocked=silent if silent[0] >= _BLOCKED_S else None)


def attended(call: Any, look: Callable[[], None]) -> Any:
    """What a rollout worker answers; meanwhile ``look``: its event loop may stand, and somebody has to tell.

    Raises:
        RayError: of the call.
    """
    while not ray.wait([call], timeout=_AGAIN_S)[0]:
        look()
    return ray.get(call)


class AttemptDesk:
    """Asks the rollout workers what became of attempts, and tells the user what is new.

    Args:
        workers: those with a method ``attempts``; others tell nothing. One that died is replaced in here.
        say: prints a line.
    """

    def __init__(self, workers: Sequence[Any], say: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self.say_once = cache(say)  # the same line, that is
        self._calls: list[Any] = []  # those that have not been answered yet
        self._asked_at = 0.0
        self.book = AttemptBook()

    def look(self, wait_s: float = 0.0) -> None:
        """Print what is new: of what was asked for earlier, or after waiting for what is asked for now."""
        self._take(0.0)
        now = time.monotonic()
        if wait_s or now - self._asked_at >= _AGAIN_S:
            self._asked_at = now
            self._take(wait_s)  # what is open was asked for too early
            if not self._calls:
                self._calls = [worker.attempts.remote() for worker in self._workers if hasattr(worker, "attempts")]
            self._take(wait_s)

    def _take(self, wait_s: float) -> None:
        if not self._calls:
            return
        answered, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=wait_s)
        for call in answered:
            try:
                news = ray.get(call)
            except RayError:  # its worker died, which the watchdog tells
                continue
            for line in self.book.take(news):
                self._say(line)

    def story(self, *, validation: bool) -> str:
        """See `AttemptBook.story`; of all that has happened up to now."""
        self.look(_LAST_ANSWERS_S)
        told = self.book.story(validation=validation)
        return told or "why is in the logs of the rollout workers (search for 'Error in _run_prompt')"

    def close_step(self) -> tuple[int, int]:
        """See `AttemptBook.close_step`; of all that has happened up to now."""
        self.look(_LAST_ANSWERS_S)
        return self.book.close_step()

"""Notices that an actor of the run has died while the trainer waits, and ends the wait with its name.

verl 0.9.1 waits without a limit for rows; an engine that dies meanwhile leaves it waiting for ever. The watchdog ends
the wait, and with it the run, with the name of what died. Often a call that was under way or the groups that fail
without the engine end it first; then it is asked whether somebody's death is behind that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from seamless_verl.verl_adapter.vllm.vllm_plugin import engine_died

_INTERVAL_S = 5.0
_LAST_ANSWERS_S = 3.0  # the dead answer at once, the busy not at all
_LAST_RESORT_S = 45.0  # for the run to end by itself once it is known why it must


class Watchdog:
    """Asks every actor, again and again, whether it lives; a busy one may take its time to answer.

    Args:
        actors: handles by the name that people know them by.
        servers: the same of rollout servers, which may live while the engine behind them does not.
        last_word: told why, before the process is ended that did not end by itself.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        servers: Mapping[str, Any] | None = None,
        last_word: Callable[[str], None] = print,
    ) -> None:
        self._servers = dict(servers or {})
        self._actors = {**actors, **self._servers}
        self._last_word = last_word
        self._asked = {name: self._ask(name) for name in self._actors}
        self._story: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def cause_of(self, error: BaseException) -> str | None:
        """The dead actor behind ``error``, in a line; None if all live or the user ended the run.

        Whoever has not said so by itself is asked once more, which takes up to three seconds.
        """
        with self._lock:
            self._stop.set()
            if self._story is None and isinstance(error, Exception):
                self._asked = {name: self._ask(name) for name in self._actors}
                ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=_LAST_ANSWERS_S)
                self._story = self._look()
            return self._story

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            with self._lock:
                if self._stop.is_set():
                    return
                self._story = self._look()
            if self._story is not None:
                self._end_the_wait(self._story)
                return

    def _end_the_wait(self, story: str) -> None:
        """Again and again: `asyncio.run` takes the first interrupt for a cancellation, which whoever blocks the loop
        (`ray.get` in a coroutine of verl's) never sees.
        """
        last_resort = threading.Timer(_LAST_RESORT_S, self._end_the_process, [story])
        last_resort.daemon = True
        last_resort.start()
        main = threading.main_thread().ident
        assert main is not None  # it runs
        while True:
            with self._lock:
                if self._stop.is_set():
                    return
                signal.pthread_kill(main, signal.SIGINT)
            if self._stop.wait(_INTERVAL_S):
                return

    def _end_the_process(self, story: str) -> None:
        self._last_word(story)
        os._exit(1)

    def _ask(self, name: str) -> Any:
        actor = self._actors[name]
        return actor.__ray_call__.remote(engine_died) if name in self._servers else actor.__ray_ready__.remote()

    def _look(self) -> str | None:
        for name, answer in self._asked.items():
            if not ray.wait([answer], timeout=0)[0]:
                continue
            try:
                if name in self._servers and ray.get(answer):
                    return f"{name} died: its engine process"
                ray.get(answer)
            except RayError as error:
                return f"{name} died: {type(error).__name__}: {str(error).splitlines()[0]}"
            self._asked[name] = self._ask(name)
        return None

"""Notices that an actor of the run has died while the trainer waits for something that can no longer come.

verl 0.9.1 waits without a limit for rows and for weights; an engine that dies meanwhile leaves it waiting for ever.
The watchdog ends the wait, and with it the run, with the name of what died.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

_INTERVAL_S = 5.0


class Watchdog:
    """Asks every actor, again and again, whether it lives; a busy one may take its time to answer.

    Args:
        actors: handles by the name that people know them by.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._asked = {name: (handle, handle.__ray_ready__.remote()) for name, handle in actors.items()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.story: str | None = None

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.story = self._look()
            if self.story is not None and not self._stop.is_set():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # ends whatever it waits for
                return

    def _look(self) -> str | None:
        for name, (handle, answer) in self._asked.items():
            if not ray.wait([answer], timeout=0)[0]:
                continue
            try:
                ray.get(answer)
            except RayError as error:
                return f"{name} died: {type(error).__name__}: {str(error).splitlines()[0]}"
            self._asked[name] = (handle, handle.__ray_ready__.remote())
        return None

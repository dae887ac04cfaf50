"""One place as the page asks for it: the index kept up to date, the report's page, conversations, tokens.

Invariant: nothing runs between questions, so that a page that nobody looks at costs nothing; and the report of a run
that grows is made again at most `_SHARE` of the time.
"""

from __future__ import annotations

import shlex
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from seamless_verl.errors import SeamlessError
from seamless_verl.observe.page.findings import silent_attempts
from seamless_verl.observe.page.html import render
from seamless_verl.observe.recording import FLIGHT
from seamless_verl.observe.reporter import METRICS, STEPS, VALIDATION
from seamless_verl.observe.run_folder import NoRunFolder, load_digest
from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.rows import Row, build_rows
from seamless_verl.watch import compared, long_texts, readers, transcript, watched_groups
from seamless_verl.watch.attempt_time import AttemptTimes
from seamless_verl.watch.index import RunIndex
from seamless_verl.watch.run_places import JOURNALS, Place, content_of, files_of, standing
from seamless_verl.watch.run_text import RunText
from seamless_verl.watch.text_search import MOST, Search
from seamless_verl.watch.transcript import Said, of_rows, of_texts, ordinals_of, parted

_UPDATE_S = 0.5
_SHARE = 0.02  # of one core, beside a run that has none to spare
_COUNT_S = 0.2
_PAGE = 60  # groups of a step on one page
_MOST_RECORDING = 128 << 20
_REPORTED = (f"{FLIGHT}/*.jsonl", STEPS, METRICS, VALIDATION)  # what the report is made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is drawn of the run as a whole; ``name`` changes when it does."""

    name: str
    page: str
    figures: dict[str, Any]
    times: AttemptTimes


class NotThere(SeamlessError):
    """What was asked for is not in the run, in words for the page."""


class Watched:
    """One place as the page asks for it.

    Args:
        tokenizer: folder given by the user; ``None``: the run's own.
        is_alive: whether the process of a run lives.
    """

    def __init__(self, place: Place, tokenizer: Path | None, is_alive: Callable[[Path], bool]) -> None:
        self.place = place
        self._is_alive = is_alive
        self._lock = threading.Lock()  # the server answers in threads
        self._report_lock = threading.Lock()  # the report of a long run takes its time, and nobody else waits for it
        self._index: RunIndex | None = None
        self._updated = 0.0
        self._tokenizer, self._text = tokenizer, RunText(place, tokenizer)
        self._trained: list[int] | None = None  # steps with attempts
        self._report: Report | None = None
        self._stands: tuple[str, dict[str, Any]] = ("", {})
        self._report_again = 0.0

    def _now(self) -> float:
        """Seconds since 1970; 0 where no time goes by for the run any more."""
        return time.time() if self._is_alive(self.place.path) else 0.0

    def close(self) -> None:
        with self._lock:
            self._forget()

    def standing(self) -> dict[str, Any]:
        """A line of the list of runs; told anew when a file of the run has changed."""
        alive = self._is_alive(self.place.path)
        name = f"{alive} {content_of(self.place.path, (*_REPORTED, *JOURNALS))}"
        if name != self._stands[0]:
            self._stands = name, standing(self.place.path, alive=alive)
        return {"id": self.place.id, "name": self.place.name, **self._stands[1]}

    def report(self) -> Report:
        """Made again when the recording has grown.

        Raises:
            NotThere: nothing of the run as a whole was recorded, or too much to be held beside a run that trains.
            FlightFormatError: what was recorded cannot be read.
        """
        with self._report_lock:
            running = self._is_alive(self.place.path)
            silent = self._silent() if running else []
            name = f"{content_of(self.place.path, _REPORTED)}{'+' if running else ''}{' '.join(sorted(silent))}"
            now = time.monotonic()
            if self._report is None or (name != self._report.name and now >= self._report_again):
                self._report = self._made(name, silent, running=running)
                self._report_again = time.monotonic() + (time.monotonic() - now) / _SHARE
            return self._report

    def _silent(self) -> list[str]:
        with self._lock:
            before = self._now() - watched_groups.SILENT_S
            return [session for session, _ in self._current().silent(before)]

    def _made(self, name: str, silent: Sequence[str], *, running: bool) -> Report:
        size = sum(file.stat().st_size for file in files_of(self.place.path, (f"{FLIGHT}/*.jsonl",)))
        if size > _MOST_RECORDING:
            raise NotThere(
                f"The recording of this run has {size >> 20} MiB; drawing it takes more memory than this server takes. "
                f"Its steps, groups and attempts are all there. For the page: seamless-verl report {self.place.path}"
            )
        try:
            run = load_digest(self.place.path, running=running)
        except NoRunFolder as error:
            raise NotThere(str(error)) from error
        return Report(
            name=name,
            page=render(run, also=silent_attempts(silent)),
            figures=compared.figures(run),
            times=AttemptTimes(run),
        )

    def figures(self) -> dict[str, Any]:
        """What is laid over another run."""
        return {"run": {**self.standing(), "path": shlex.quote(str(self.place.path))}, **self.report().figures}

    def times(self, key: str, step: str) -> dict[str, Any]:
        """Where the time of an attempt, or the device time of a step, went; ``why`` where that is not known."""
        try:
            times = self.report().times
        except SeamlessError as error:
            return {"why": str(error)}
        told = times.attempt(key) if key else times.step(int(step)) if step.isdecimal() else None
        if told is None:
            return {"why": "The recording does not know it (yet): it is read again as it grows."}
        if key and not times.tells_requests:
            told["why"] = "This recording is of an earlier version: it does not say whose its requests were."
        return told

    def search(self, text: str, start: int) -> dict[str, Any]:
        """Attempts that have ``text`` in a name, an error, or in what was said.

        Args:
            start: where the last answer said to go on.
        """
        with self._lock:
            index = self._current()
            look = Search(text, lambda session: self._turns(index, session), time.monotonic)
            named, all_named = index.named(text.lower(), MOST, look.is_over) if start == 0 else ([], True)
            places: list[str | Path] = [*index.kept(), *index.text_files()]
            onward = look.look(places, start)
            return {
                **self._head(index), "named": named, "all_named": all_named, "onward": onward, "of": len(places),
                "found": look.with_attempts(index.attempt, index.numbered), "why_no_text": self._text.why_none,
            }  # fmt: skip

    def _turns(self, index: RunIndex, session: str) -> list[dict[str, Any]]:
        known = index.attempt(session)
        if known is None or (whole := self._whole(index, known)) is None:
            return []
        return transcript.conversation(*whole, transcript.with_pictures(self._text.decode()))

    def steps(self) -> dict[str, Any]:
        with self._lock:
            index = self._current()
            records = {record["step"]: record for record in readers.records(self.place.path / STEPS)}
            if self._trained is None:
                self._trained = index.steps()
            steps: list[int | None] = [*sorted({*records, *self._trained}, reverse=True)]
            steps += [None] if index.num_groups(None) else []
            told = self._summaries(index, steps, records)
            return {
                **self._head(index),
                "steps": told,
                "is_behind": index.is_behind or any(line["groups"] is None for line in told),
                "flags": watched_groups.FLAGS,
            }

    def groups(self, step: str, sort: str, flag: str, text: str, start: int) -> dict[str, Any]:
        """Groups of a step, one page of them; raises `NotThere` where there is no such order or flag."""
        if sort not in watched_groups.SORTS or (flag and flag not in watched_groups.FLAGS):
            raise NotThere(f"there is no order {sort!r}, or no mark {flag!r}")
        if step != watched_groups.NO_STEP and not step.isdecimal():
            raise NotThere(f"{step} is no step: a number, or {watched_groups.NO_STEP}")
        with self._lock:
            index = self._current()
            number = int(step) if step.isdecimal() else None
            found = watched_groups.groups_of(index.attempts(step=number), self._now())
            chosen = watched_groups.chosen(found, sort=sort, flag=flag, text=text)
            return {
                **self._head(index), "step": step, "sorts": list(watched_groups.SORTS), "flags": watched_groups.FLAGS,
                "of": len(found), "in_all": index.num_groups(number), "matching": len(chosen),
                "groups": chosen[start : start + _PAGE],
                "onward": start + _PAGE if start + _PAGE < len(chosen) else None,
            }  # fmt: skip

    def attempt(self, key: str, seen: str = "") -> dict[str, Any] | None:
        """Facts, turns and rows of one attempt, from the best source that is left of it; of long texts the beginning.

        Args:
            seen: the ``mark`` of an earlier answer.

        Returns:
            ``None``: it would be that answer again. Nothing is read of the attempt to know that.

        Raises:
            NotThere: the run knows no such attempt.
        """
        with self._lock:
            index = self._current()
            known = self._known(index, key)
            told: dict[str, Any] = self._head(index)
            told["group"] = watched_groups.groups_of(index.group(known["group"]), self._now())[0]
            state = known["index"] is not None and index.state_of_texts(known["group"], known["index"])
            told["mark"] = long_texts.mark_of([known, told["group"], told["problems"], told["is_behind"], state])
            if seen == told["mark"]:
                return None
            told |= self._content_of(index, known)
            for part in ("turns", "texts"):
                told[part] = long_texts.cut(told[part], part)
            return told

    def text(self, key: str, at: str) -> dict[str, str]:
        """The whole of a text that `attempt` has the beginning of.

        Args:
            at: where it stands, as that says.

        Raises:
            NotThere: there is no such attempt, or no text there (any more).
        """
        with self._lock:
            index = self._current()
            found = long_texts.found(self._content_of(index, self._known(index, key)), at)
        if found is None:
            raise NotThere(f"attempt {key} has no text {at} (any more)")
        return {"text": found}

    def partings(self, group: str) -> dict[str, Any]:
        """Where the attempts of a group part from the first of them of which something is left.

        Raises:
            NotThere: no such group.
        """
        with self._lock:
            index = self._current()
            attempts = watched_groups.groups_of(index.group(group))
            if not attempts:
                raise NotThere(f"{self.place.name} knows no group {group}")
            members = attempts[0]["attempts"]
            said = [(known["key"], self._said(index, known)) for known in members]
            if sum(bool(rows) for _, rows in said) > 1:
                return parted(said, transcript.with_pictures(self._text.decode()), "token")
            texts = [
                (m["key"], [] if m["index"] is None else of_texts(index.texts(group, m["index"]))) for m in members
            ]
            return parted(texts, str, "character")

    def _said(self, index: RunIndex, known: dict[str, Any]) -> list[Said]:
        whole = self._whole(index, known)
        if whole is None:
            rows = self._closed_rows(known)
            return of_rows(rows, ordinals_of(rows))
        tree = whole[0].tree
        ordinals = {answer.turn.generation_id: answer.ordinal for answer in tree.answers if answer.turn is not None}
        return of_rows(build_rows(tree), ordinals)

    def _content_of(self, index: RunIndex, known: dict[str, Any]) -> dict[str, Any]:
        """What was said in an attempt, and what was made of it."""
        decode = self._text.decode()
        told: dict[str, Any] = {"texts": []}
        if known["index"] is not None:
            told["texts"] = index.texts(known["group"], known["index"])
        whole = self._whole(index, known)
        if whole is not None:
            session, answers = whole
            rows = build_rows(session.tree)
            told["turns"] = transcript.conversation(session, answers, transcript.with_pictures(decode))
            told["attempt"] = transcript.facts(known, session)
        else:
            rows = self._closed_rows(known)
            told["turns"] = transcript.told_by_rows(rows, decode)
            told["attempt"] = transcript.facts(known, None)
        told["rows"] = [{"tokens": len(row.token_ids), "trained": row.num_trained} for row in rows]
        told["why_no_turns"] = "" if told["turns"] else transcript.why_nothing(known)
        told["why_no_text"] = self._text.why_none
        return told

    def tokens(self, key: str, row: int, seen: str = "") -> dict[str, Any] | None:
        """A row token by token; ``seen`` and ``None`` as for `attempt`.

        Raises:
            NotThere: no such attempt or row, or its tokens are not recorded.
        """
        with self._lock:
            index = self._current()
            known = self._known(index, key)
            head = self._head(index)
            mark = long_texts.mark_of([known, row, head["problems"], head["is_behind"]])
            if seen == mark:
                return None
            whole = self._whole(index, known)
            rows = (
                tuple(whole[0].images.released(made) for made in build_rows(whole[0].tree))
                if whole is not None
                else self._closed_rows(known)
            )
            if not rows:
                raise NotThere(transcript.why_nothing(known))
            if not 0 <= row < len(rows):
                raise NotThere(f"attempt {key} has {len(rows)} rows; there is no row {row}")
            signals = readers.signals(self.place.path, known, rows, row)
            told = transcript.token_view(rows[row], self._text.of_token, signals)
            return {
                **head, "attempt": known, "row": row, "num_rows": len(rows), "mark": mark,
                "why_no_text": self._text.why_none, **told,
            }  # fmt: skip

    # ------------------------------------------------------------ parts

    def _summaries(
        self, index: RunIndex, steps: Sequence[int | None], records: Mapping[int, Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """A line per step. Those whose attempts have changed are counted anew, for as long as `_COUNT_S`."""
        until, found = time.monotonic() + _COUNT_S, []
        for step in steps:
            told = index.summaries.get(step)
            name = watched_groups.NO_STEP if step is None else step
            if told is None and time.monotonic() < until:
                began = time.thread_time()
                told = watched_groups.summary(name, index.attempts(step=step), self._now())
                told |= {"counted": told["groups"], "groups": index.num_groups(step)}
                lasts = "under way" not in told["flags"]  # what is silent changes by itself
                index.summaries.keep(step, told, took_s=time.thread_time() - began, lasts=lasts)
            record = records.get(step, {}) if step is not None else {}
            found.append(watched_groups.with_record(told or watched_groups.uncounted(name), record))
        return found

    def _head(self, index: RunIndex) -> dict[str, Any]:
        problems = [f"{file}: {problem}" for file, problem in index.sources.problems()]
        return {"run": self.standing(), "problems": problems, "is_behind": index.is_behind}

    def _current(self) -> RunIndex:
        if self._index is not None and not self._index.where.exists():  # the run is gone, or another is in its place
            self._forget()
        for beside in (True, False):
            try:
                return self._updated_index(beside=beside)
            except sqlite3.Error as error:  # the disk is full: what the index notes as read may not be in it
                self._forget()
                failed = error
        raise failed

    def _updated_index(self, *, beside: bool) -> RunIndex:
        if self._index is None:
            self._index = RunIndex(self.place.path, beside=beside)
        if self._index.is_behind or time.monotonic() - self._updated > _UPDATE_S:
            if not self._index.update() <= {None, *(self._trained or ())}:
                self._trained = None
            self._updated = time.monotonic()
        return self._index

    def _forget(self) -> None:
        if self._index is not None:
            self._index.close()
        self._index = self._trained = None
        self._text = RunText(self.place, self._tokenizer)

    def _known(self, index: RunIndex, key: str) -> dict[str, Any]:
        known = index.attempt(key)
        if known is None:
            raise NotThere(f"{self.place.name} knows no attempt {key}")
        return known

    def _whole(self, index: RunIndex, known: dict[str, Any]) -> tuple[Session, list[Answer]] | None:
        """Session and answers, where a journal has them; it may forget them at any time."""
        file = known["file"]
        if file is None or not file.endswith(".sqlite"):
            return None
        with readers.journal(self.place.path / file, index.scratch) as db:
            return readers.whole_session(db, known["session"])

    def _closed_rows(self, known: dict[str, Any]) -> tuple[Row, ...]:
        if known["file"] is None or not known["file"].endswith(".jsonl"):
            return ()
        return msgspec.convert(readers.closed_session(self.place.path / known["file"]), tuple[Row, ...])

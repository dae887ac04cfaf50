"""The tiny coding agent: a program that knows a base URL and an API key, and repairs a file until its tests pass.

It works like a person at a terminal: runs the tests, shows the model the file and the first failure, writes the edit
that the model answers with into the file, runs the tests again, and goes on in the same conversation. It is a worker
of ``seamless_verl.agents.agent_pool`` and imports nothing but the standard library and its own sandbox::

    python -m seamless_verl.recipes.swe.tiny.agent

One job is one attempt; its payload has the fields of ``Attempt``.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from seamless_verl.agents.agent_pool import serve
from seamless_verl.recipes.swe.tiny import edit
from seamless_verl.recipes.swe.tiny.chat import ChatClient, ChatFailed, ChatRefused
from seamless_verl.recipes.swe.tiny.sandbox import Sandbox, TestRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt is given.

    Attributes:
        folder: the workspace, which holds ``source_file`` and ``test_file`` and nothing else.
        base_url, api_key, model: the endpoint and how to name oneself there.
        max_turns: answers asked for at most.
        max_tokens: length of one answer at most.
        deadline_s: seconds that the attempt may take in all.
        temperature: sampling temperature to ask for; ``None`` leaves it to the endpoint.
    """

    folder: str
    source_file: str
    test_file: str
    base_url: str
    api_key: str
    model: str
    max_turns: int
    max_tokens: int
    deadline_s: float
    temperature: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attempt says about itself; the grade is not among it.

    Attributes:
        ended: ``passed``, ``turns`` (used up), ``length`` (an answer was cut), ``refused`` (by the endpoint),
            ``failed`` (the endpoint is broken), ``deadline`` or ``forgotten``.
        turns: answers received.
        valid_edits: how many of them were edits of an existing line.
        detail: one line for people.
    """

    ended: str
    turns: int
    valid_edits: int
    detail: str = ""


def attempt(job: Attempt, sandbox: Sandbox, forgotten: threading.Event) -> Outcome:
    """Work on the file in the workspace until the tests pass or a limit is met."""
    deadline = time.monotonic() + job.deadline_s
    source_path, turns, valid_edits = Path(job.folder) / job.source_file, 0, 0
    tests = (Path(job.folder) / job.test_file).read_text(encoding="utf-8")
    lines = source_path.read_text(encoding="utf-8").splitlines()
    run = _run_tests(sandbox, job, lines, tests)
    messages = [{"role": "user", "content": edit.user_message(lines, describe(run))}]

    def ended(how: str, detail: str = "") -> Outcome:
        return Outcome(ended=how, turns=turns, valid_edits=valid_edits, detail=detail)

    with ChatClient(job.base_url, job.api_key) as client:
        while not run.all_passed:
            if turns == job.max_turns:
                return ended("turns")
            if forgotten.is_set():
                return ended("forgotten")
            request: dict[str, Any] = {"model": job.model, "messages": messages, "max_tokens": job.max_tokens}
            if job.temperature is not None:
                request["temperature"] = job.temperature
            try:
                answer = client.complete(request, deadline=deadline, forgotten=forgotten)
            except TimeoutError as error:
                return ended("deadline", str(error))
            except ChatRefused as error:
                return ended("refused", str(error))
            except ChatFailed as error:
                return ended("failed", str(error))
            turns += 1
            if answer.finish_reason == "length":
                return ended("length")
            edited = edit.apply_edit(lines, answer.content)
            if edited is not None:
                valid_edits += 1
                lines = edited
                source_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
                run = _run_tests(sandbox, job, lines, tests)
            messages.append({"role": "assistant", "content": answer.content})
            text = edit.user_message(lines, describe(run), bad_edit=edited is None)
            messages.append({"role": "user", "content": text})
    return ended("passed")


def describe(run: TestRun) -> str:
    """The outcome of a test run in the words that the model was warmed up on."""
    first = run.load_error
    failed = next((test for test in run.tests if test.error is not None), None)
    if first is None and failed is not None and failed.error is not None:
        call, _, expected = failed.doc.rpartition(" == ")
        first = failed.message if failed.error == "AssertionError" else edit.failure(call, failed.error, expected)
    text: str = edit.outcome(first, run.passed, len(run.tests))
    return text


def _run_tests(sandbox: Sandbox, job: Attempt, lines: list[str], tests: str) -> TestRun:
    source = "\n".join(lines) + "\n"
    return sandbox.run(source_file=job.source_file, source=source, test_file=job.test_file, tests=tests)


@cache
def _sandbox() -> Sandbox:
    return Sandbox(zygotes=4)  # code that loops takes its CPU time, on a busy machine seconds: others need not wait


def handle(payload: dict[str, Any], forgotten: threading.Event) -> dict[str, Any]:
    """One job of the pool."""
    return asdict(attempt(Attempt(**payload), _sandbox(), forgotten))


if __name__ == "__main__":
    _sandbox()  # now and not in many threads at once
    serve(handle)

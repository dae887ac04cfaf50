"""One software-engineering task: what the agent may see, what only the grader may see, and how both travel as JSON.

Invariant: `AgentView` has no field that could carry the solution or the tests. The agent's process is handed an
`AgentView` and nothing else; `SweTask` stays with the runner and the grader.

::

    JSONL record ──records.parse_record──► SweTask ──to_json──► extra_info.task (parquet)
                                              │
                          .agent_view() ──► AgentView ──► harness process
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seamless_verl.errors import SeamlessError


class TaskError(SeamlessError):
    """A task that cannot be used: names the instance, the key, what is wrong and what to write instead."""

    def __init__(self, instance_id: str, key: str, problem: str, fix: str) -> None:
        super().__init__(f"instance {instance_id!r}: {key}: {problem}. Fix: {fix}.")
        self.instance_id = instance_id
        self.key = key
        self.problem = problem
        self.fix = fix


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What the agent's process is told about a task.

    Attributes:
        instance_id: name of the task, for logs.
        repo: ``owner/name``, a URL or a path that git can fetch from.
        base_commit: commit (or branch) that the agent starts from.
        problem_statement: the task in words.
        image: container image that holds the repository; empty where the sandbox fetches it.
        workdir: folder of the repository inside the image.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    image: str = ""
    workdir: str = "/testbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweTask:
    """A task with its tests. The reference solution (``patch``) is not part of it: nothing here needs it.

    Attributes:
        view: the part that the agent may see.
        test_command: shell command that runs the tests from the root of the repository.
        fail_to_pass: tests that fail before and must pass after, by the names the test runner prints.
        pass_to_pass: tests that pass before and must still pass.
        test_patch: diff that brings the tests; applied by the grader only.
        version: version of the repository in the data set's sense.
    """

    view: AgentView
    test_command: str
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    test_patch: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        for key, value in sorted(self._flat().items()):  # a test's name before the command made of it
            if re.search("[\ud800-\udfff]", "".join(value)):  # JSON can write one, UTF-8 cannot
                raise TaskError(self.view.instance_id, key, "holds half a character", "write it whole, or leave it out")
        if not self.test_command.strip():
            raise TaskError(
                self.view.instance_id, "test_command", "is missing", "write the command that runs the task's tests"
            )

    @property
    def expected(self) -> tuple[str, ...]:
        """Every test that has to pass, each once, in the data set's order."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    def to_json(self) -> str:
        """Canonical JSON (sorted keys), one flat object: the text in column ``extra_info.task``."""
        return json.dumps(self._flat(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    def _flat(self) -> dict[str, Any]:
        flat = dataclasses.asdict(self)
        return {**flat.pop("view"), **flat}

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> SweTask:
        """Inverse of `to_json`, given the decoded object.

        Raises:
            TaskError: a key is missing, unknown or of the wrong type.
        """
        instance_id = str(data.get("instance_id", "?"))
        view_fields = {f.name: f for f in dataclasses.fields(AgentView)}
        own_fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "view"}
        for key in data:
            if key not in view_fields and key not in own_fields:
                raise TaskError(instance_id, str(key), "is not a known key of a task", "prepare the data set again")
        for key, field in {**view_fields, **own_fields}.items():
            if key not in data and field.default is dataclasses.MISSING:
                raise TaskError(instance_id, key, "is missing", f"add {key} to the record")
        values = {key: _typed(instance_id, key, value, key in _LISTS) for key, value in data.items()}
        view = AgentView(**{key: value for key, value in values.items() if key in view_fields})
        return cls(view=view, **{key: value for key, value in values.items() if key in own_fields})

    def agent_view(self) -> AgentView:
        """The part of the task that may leave for the agent's process."""
        return self.view


_LISTS = frozenset({"fail_to_pass", "pass_to_pass"})


def _typed(instance_id: str, key: str, value: object, is_list: bool) -> Any:
    if is_list:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(typing.cast("list[str]", value))
        raise TaskError(instance_id, key, f"must be a list of strings, is {type(value).__name__}", "write a JSON list")
    if not isinstance(value, str):
        raise TaskError(instance_id, key, f"must be a string, is {type(value).__name__}", "write a JSON string")
    return value

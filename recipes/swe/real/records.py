"""Records of the SWE-bench / SWE-Gym / SWE-smith form, checked and turned into `SweTask`s.

Every problem names file, line, instance, field and what to write instead. The reference solution (``patch``) is read
by nobody and copied nowhere.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.recipes.swe.real.task import AgentView, SweTask, TaskError

IMAGE_PRESETS: Mapping[str, str] = {
    "swe-bench": "swebench/sweb.eval.x86_64.{id_1776}:latest",
    "swe-gym": "xingyaoww/sweb.eval.x86_64.{id_s}:latest",
}
"""Published image names. Docker allows no double underscore in a name, so each data set spells it its own way."""

_IMAGE_KEYS = ("image", "image_name", "docker_image")
_COMMAND_KEYS = ("test_command", "test_cmd")
TEST_FILES = "{test_files}"
"""Where a command names it come the files of the tests: those of pytest's ids, else those of the test patch."""
TEST_IDS = "{test_ids}"
"""Where a command names it come pytest's ids of the tests, files for those that a list cut."""
_MAX_IDS_CHARS = 500_000  # Linux takes 2 MB of arguments and environment
# Tests may build on others that ran before them in their file, listed or not; and where pytest does not know one of the
# ids it runs nothing. The last report counts; files that do not end in time leave that of the ids.
_BY_IDS = "{ids} || {files}"

_COMMAND_FIX = (
    "add test_command to the record, or pass --test-commands FILE (JSON: repo or repo@version to command), "
    "or --test-command COMMAND"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What fills the gaps of a record.

    Attributes:
        image_template: image name with placeholders (see `image_name`), or a key of `IMAGE_PRESETS`; empty: none.
        test_command: command for records that bring none.
        test_commands: command by ``repo@version`` or ``repo``; goes before ``test_command``.
        workdir: folder of the repository inside the image.
    """

    image_template: str = ""
    test_command: str = ""
    test_commands: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/testbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A line that cannot be used.

    Attributes:
        path: the file.
        line: its line, from 1.
        field: the record's key, or ``line`` where the line as a whole is at fault.
        message: what is wrong and what to write instead; names the instance where it is known.
    """

    path: Path
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def read_tasks(path: Path, defaults: Defaults, seen: set[str]) -> Iterator[SweTask | Problem]:
    """Tasks and problems in the order of the file, one line in memory at a time.

    Args:
        path: JSONL file; empty lines are passed over.
        defaults: what fills gaps.
        seen: instance ids met so far; extended, so that several files can share it.
    """
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            try:
                task = parse_record(_decode(raw), defaults)
            except TaskError as error:
                yield Problem(path=path, line=number, field=error.key, message=str(error))
                continue
            if task.view.instance_id in seen:
                again = TaskError(task.view.instance_id, "instance_id", "occurs a second time", "remove one of the two")
                yield Problem(path=path, line=number, field="instance_id", message=str(again))
                continue
            seen.add(task.view.instance_id)
            yield task


def parse_record(record: Mapping[str, Any], defaults: Defaults) -> SweTask:
    """One record as a task.

    Raises:
        TaskError: a key is missing or of the wrong type; names the instance and the key.
    """
    instance_id = _text(record, "instance_id", "?", required=True)
    repo = _text(record, "repo", instance_id, required=True)
    # A SWE-smith task is a branch, named like the instance, of the data set's own copy of the repository.
    base_default = instance_id if repo.startswith("swesmith/") else ""
    base_commit = _text(record, "base_commit", instance_id) or base_default
    if not base_commit:
        raise TaskError(instance_id, "base_commit", "is missing", "write the commit that the agent starts from")
    test_patch = _text(record, "test_patch", instance_id)
    if repo.startswith("swesmith/") and not test_patch:
        raise TaskError(
            instance_id,
            "test_patch",
            "is missing, and SWE-smith's branches end in a commit that removes the tests, so no attempt could pass",
            f"add what `git diff {instance_id} {instance_id}~1` prints in a clone of https://github.com/{repo}",
        )
    fail_to_pass = _names(record, "FAIL_TO_PASS", instance_id)
    pass_to_pass = _names(record, "PASS_TO_PASS", instance_id)
    if pass_to_pass and not fail_to_pass:
        problem = "is empty beside PASS_TO_PASS, so that an untouched repository would earn the whole reward"
        raise TaskError(instance_id, "FAIL_TO_PASS", problem, "name the tests that show the repair, or leave it out")
    names = (*fail_to_pass, *pass_to_pass)
    files = _files_of(names) or _files_of_patch(test_patch, dotted=repo == "django/django")
    version = _text(record, "version", instance_id)
    known = defaults.test_commands
    default_command = known.get(f"{repo}@{version}", known.get(repo, defaults.test_command))
    return SweTask(
        view=AgentView(
            instance_id=instance_id,
            repo=repo,
            base_commit=base_commit,
            problem_statement=_text(record, "problem_statement", instance_id, required=True),
            image=_image(record, instance_id, repo, base_commit, version, defaults),
            workdir=_text(record, "workdir", instance_id) or defaults.workdir,
        ),
        test_command=_command(record, instance_id, default_command, names, files),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        test_patch=test_patch,
        version=version,
    )


def image_name(template: str, fields: Mapping[str, str]) -> str:
    """Fill an image template.

    Placeholders: ``instance_id``, ``id_1776`` and ``id_s`` (the id in lower case with ``__`` as ``_1776_`` / ``_s_``),
    ``repo``, ``version``, ``base_commit``, ``environment_setup_commit``.

    Raises:
        ConfigError: an unknown placeholder.
    """
    instance_id = fields["instance_id"]
    values = {
        **fields,
        "id_1776": instance_id.replace("__", "_1776_").lower(),
        "id_s": instance_id.replace("__", "_s_").lower(),
    }
    try:
        return IMAGE_PRESETS.get(template, template).format(**values)
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{name}}}" for name in sorted(values))
        raise ConfigError(
            "--image-template",
            template,
            f"cannot be filled in ({error})",
            f"use {known}, or a preset: " + ", ".join(IMAGE_PRESETS),
        ) from error


def _decode(raw: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(raw)
    except ValueError as error:
        raise TaskError("?", "line", f"is not JSON ({error})", "write one JSON object per line, in UTF-8") from error
    if not isinstance(record, dict):
        raise TaskError("?", "line", f"is a JSON {type(record).__name__}", "write one JSON object per line")
    return record


def _text(record: Mapping[str, Any], key: str, instance_id: str, *, required: bool = False) -> str:
    value = record.get(key)
    if value is None or (isinstance(value, str) and not value.strip()):
        if required:
            raise TaskError(instance_id, key, "is missing or empty", f"write {key} as a string")
        return ""
    if not isinstance(value, str):
        raise TaskError(instance_id, key, f"must be a string, is {type(value).__name__}", "write a JSON string")
    return value


def _names(record: Mapping[str, Any], key: str, instance_id: str) -> tuple[str, ...]:
    """A list of test names; some files hold the list as JSON inside a string."""
    value = record.get(key, record.get(key.lower()))
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise TaskError(instance_id, key, f"is a string that is not JSON ({error})", "write a list") from error
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise TaskError(
            instance_id, key, "must be a list of test names", 'write for example ["tests/test_a.py::test_b"]'
        )
    return tuple(value)


def _image(
    record: Mapping[str, Any], instance_id: str, repo: str, base_commit: str, version: str, defaults: Defaults
) -> str:
    for key in _IMAGE_KEYS:
        if image := _text(record, key, instance_id):
            return image
    if not defaults.image_template:
        return ""
    setup = _text(record, "environment_setup_commit", instance_id)
    return image_name(
        defaults.image_template,
        {
            "instance_id": instance_id,
            "repo": repo,
            "version": version,
            "base_commit": base_commit,
            "environment_setup_commit": setup,
        },
    )


def _command(
    record: Mapping[str, Any], instance_id: str, default: str, names: tuple[str, ...], files: tuple[str, ...]
) -> str:
    command = _own_command(record, instance_id, names, files) or default
    ids = _ids_of(names)
    if not command and ids:
        by_id, by_file = (f"python -m pytest -q {which}" for which in (TEST_IDS, TEST_FILES))
        command = by_file if ids == files else _BY_IDS.format(ids=by_id, files=by_file)
    if not command:
        detail = "FAIL_TO_PASS holds no pytest ids to derive it from" if names else "there is no FAIL_TO_PASS either"
        raise TaskError(instance_id, "test_command", f"is missing, and {detail}", _COMMAND_FIX)
    if TEST_FILES in command and not files:
        problem = f"asks for {TEST_FILES}, and neither the tests' ids nor test_patch name a Python file"
        raise TaskError(instance_id, "test_command", problem, "write the files into this record's test_command")
    if TEST_IDS in command and not ids:
        problem = f"asks for {TEST_IDS}, and the names of the tests are no pytest ids"
        raise TaskError(instance_id, "test_command", problem, f"write {TEST_FILES}, or this record's test_command")
    for place, paths in ((TEST_FILES, files), (TEST_IDS, ids)):
        command = command.replace(place, " ".join(map(shlex.quote, paths)))
    return command


def _own_command(record: Mapping[str, Any], instance_id: str, names: tuple[str, ...], files: tuple[str, ...]) -> str:
    install = record.get("install_config")
    places = (record, install) if isinstance(install, Mapping) else (record,)
    for place in places:
        for key in _COMMAND_KEYS:
            value = place.get(key)
            if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
                # Listed tests count one by one, so none may keep others from running; else the exit code counts.
                return ("\n" if names else " && ").join(value)
            if command := _text(place, key, instance_id):
                # SWE-rebench's is only the beginning: its harness writes the files behind it.
                prefix = place is install and files and not any(at in command for at in (TEST_FILES, TEST_IDS))
                return f"{command} {TEST_FILES}" if prefix else command
    return ""


def _files_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The files of pytest's ids; none where other runners' names (Django's, for one) are among them."""
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return tuple(files) if all("::" in name for name in names) and all(f.endswith(".py") for f in files) else ()


def _ids_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """pytest's ids; the file where one of its ids is cut at a blank, all files where the ids would not fit."""
    files = _files_of(names)
    if sum(map(len, names)) > _MAX_IDS_CHARS:
        return files
    cut = {name.partition("::")[0] for name in names if "[" in name and not name.endswith("]")}
    return tuple(dict.fromkeys(path if (path := n.partition("::")[0]) in cut else n for n in names)) if files else ()


def _files_of_patch(test_patch: str, *, dotted: bool) -> tuple[str, ...]:
    """The Python files that a patch leaves; ``dotted``: as the modules that Django's runner asks for."""
    files = re.findall(r"^\+\+\+ (?:b/)?(.+\.py)\s*$", test_patch, re.MULTILINE)
    return tuple(file[:-3].removeprefix("tests/").replace("/", ".") if dotted else file for file in files)

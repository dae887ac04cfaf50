"""Tasks: one small Python file with one injected bug, and a test file that shows it.

Everything is drawn from one seed. Three splits share no function body: a body (the lines after the docstring) that
occurs in a held-out task, right or wrong, never occurs in a training task or a demonstration, because a hash of the
body decides on which side it lies (``is_reserved``). Templates held out as a whole are kept apart even under renaming
of their variables.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from random import Random

from seamless_verl.recipes.swe.tiny import edit, execution
from seamless_verl.recipes.swe.tiny.mutations import Lines, body_key, draw_mutation, renamed_body_key
from seamless_verl.recipes.swe.tiny.templates import (
    CONSTANTS,
    HELD_OUT_NOUNS,
    HELD_OUT_TEMPLATES,
    IDENTIFIERS,
    NOUNS,
    TEMPLATES,
    Arguments,
    Template,
    Value,
)

SPLITS = ("train", "held_out", "held_out_templates")
CASES_PER_TASK = 5
_RESERVED_ONE_IN = 5
_DRAWS_PER_TASK = 30


@dataclass(frozen=True, slots=True)
class Case:
    """One call and the value it must return."""

    arguments: Arguments
    expected: Value

    def call(self, function: str) -> str:
        return f"{function}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A bug to fix.

    Attributes:
        template, operator, constant: where the function and its bug come from; hidden from the agent, like ``fixed``.
        split: one of ``SPLITS``.
        function: name of the function; its file is ``<function>.py``.
        source: lines of the file as the agent finds it.
        fixed: lines of the correct file; differs from ``source`` in exactly one line.
        cases: calls of the test file, at least two of which fail on ``source``.
    """

    template: str
    operator: str
    constant: int
    split: str
    function: str
    source: Lines
    fixed: Lines
    cases: tuple[Case, ...]

    @property
    def source_file(self) -> str:
        return f"{self.function}.py"

    @property
    def test_file(self) -> str:
        return f"test_{self.function}.py"

    @property
    def answer(self) -> str:
        """The edit that fixes the bug."""
        answer: str = edit.edit_between(self.source, self.fixed)
        return answer

    def tests(self) -> str:
        """Text of the test file: one ``test_N`` per case, whose docstring is ``call == expected``."""
        blocks = [f"from {self.function} import {self.function}\n"]
        for number, case in enumerate(self.cases, 1):
            call, expected = case.call(self.function), repr(case.expected)
            check = f"got == {expected} and type(got) is {type(case.expected).__name__}"
            message = edit.failure(call, "%s", expected)
            blocks.append(
                f'\ndef test_{number}():\n    """{call} == {expected}"""\n    got = {call}\n'
                f'    assert {check}, "{message}" % repr(got)[:{edit.SHOWN_VALUE_CHARS}]\n'
            )
        return "\n".join(blocks)

    def to_json(self) -> str:
        """What the dataset stores: the public part (files and command) and, under ``hidden``, how it was made."""
        hidden = {key: value for key, value in asdict(self).items() if key != "source"}
        public = {
            "source_file": self.source_file,
            "source": "\n".join(self.source) + "\n",
            "test_file": self.test_file,
            "tests": self.tests(),
            "test_command": f"python {self.test_file}",
        }
        return json.dumps({**public, "hidden": hidden})

    def run(self, lines: Lines) -> tuple[str, float]:
        """Outcome text and share of passed tests of ``lines``, computed in this process (data generation only)."""
        function = execution.load(lines, self.function)
        if isinstance(function, str):
            return edit.outcome(function, 0, len(self.cases)), 0.0
        passed, first = 0, None
        for case in self.cases:
            got = execution.call(function, case.arguments)
            if got.equals(case.expected):
                passed += 1
            elif first is None:
                first = edit.failure(case.call(self.function), got.shown(), repr(case.expected))
        return edit.outcome(first, passed, len(self.cases)), passed / len(self.cases)


@cache
def _held_out_shapes() -> frozenset[str]:
    """Bodies of the held-out templates with their variables numbered, for every constant."""
    return frozenset(
        renamed_body_key(template.dress("f", {role: f"name_{role}" for role in template.roles()}, constant))
        for template in TEMPLATES
        if template.name in HELD_OUT_TEMPLATES
        for constant in CONSTANTS
    )


def is_reserved(body: str, shape: str) -> bool:
    """Whether a body may occur in held-out tasks only. ``body`` is a ``body_key``, ``shape`` a ``renamed_body_key``."""
    return zlib.crc32(body.encode()) % _RESERVED_ONE_IN == 0 or shape in _held_out_shapes()


def reserved(lines: Lines) -> bool:
    """``is_reserved`` of a whole function."""
    return is_reserved(body_key(lines), renamed_body_key(lines))


def generate(split: str, seed: int) -> Iterator[Task]:
    """An endless stream of tasks of one split; the same seed gives the same stream on every supported Python."""
    rng = Random(f"{split}/{seed}")
    wanted = [t for t in TEMPLATES if (t.name in HELD_OUT_TEMPLATES) == (split == "held_out_templates")]
    while True:
        task = _draw(rng, split, rng.choice(wanted))
        if task is not None:
            yield task


def _draw(rng: Random, split: str, template: Template) -> Task | None:
    """One attempt at a task; ``None`` when the bug cannot be shown by tests or the body belongs to another split."""
    held_out = split != "train"
    # A quarter of the (template, constant) pairs is held out, another quarter for each template.
    index = TEMPLATES.index(template)
    constant = rng.choice([c for c in CONSTANTS if ((c + index) % 4 == 0) == held_out])
    function = f"{rng.choice(template.verbs)}_{rng.choice(HELD_OUT_NOUNS if held_out else NOUNS)}"
    fixed = template.dress(function, _draw_names(rng, template), constant)
    mutation = draw_mutation(rng, fixed)
    if mutation is None:
        return None
    source = mutation.apply(fixed)
    if split == "train" and (reserved(fixed) or reserved(source)):
        return None
    if split == "held_out" and not (reserved(fixed) and reserved(source)):
        return None
    cases = _draw_cases(rng, template, constant, function, fixed, source)
    if cases is None:
        return None
    return Task(
        template=template.name,
        operator=mutation.operator,
        constant=constant,
        split=split,
        function=function,
        source=source,
        fixed=fixed,
        cases=cases,
    )


def _draw_names(rng: Random, template: Template) -> dict[str, str]:
    names: dict[str, str] = {}
    for role in template.roles():
        names[role] = rng.choice([name for name in IDENTIFIERS[role] if name not in names.values()])
    return names


def _draw_cases(
    rng: Random, template: Template, constant: int, function: str, fixed: Lines, source: Lines
) -> tuple[Case, ...] | None:
    """Calls that tell right from wrong: at least two fail on ``source``, at most one of them by not ending."""
    right, wrong = execution.load(fixed, function), execution.load(source, function)
    if isinstance(right, str) or isinstance(wrong, str):
        return None
    failing: list[Case] = []
    passing: list[Case] = []
    endless = 0
    for _ in range(_DRAWS_PER_TASK):
        arguments = template.draw_arguments(rng, constant)
        expected = execution.call(right, arguments)
        if expected.error is not None or len(repr(expected.value)) > edit.SHOWN_VALUE_CHARS:
            continue
        case = Case(arguments, expected.value)
        if case in failing or case in passing:
            continue
        got = execution.call(wrong, arguments)
        endless += got.error == "Timeout"
        if endless > 1:
            return None
        (passing if got.equals(case.expected) else failing).append(case)
        if len(failing) >= CASES_PER_TASK and len(passing) >= 2:
            break
    if len(failing) < 2 or len(failing) + len(passing) < CASES_PER_TASK:
        return None
    shown = failing[: rng.randint(2, CASES_PER_TASK - 1)]
    shown += passing[: CASES_PER_TASK - len(shown)]
    shown += [case for case in failing if case not in shown][: CASES_PER_TASK - len(shown)]
    rng.shuffle(shown)
    return tuple(shown)

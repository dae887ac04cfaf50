"""The task generator: what a task promises, and that the splits share no body. Pure Python, no torch."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from itertools import islice
from random import Random

import pytest

from seamless_verl.recipes.swe.tiny import edit, execution
from seamless_verl.recipes.swe.tiny.demonstrations import conversations, demonstrate
from seamless_verl.recipes.swe.tiny.mutations import (
    BODY_START,
    OPERATORS,
    body_key,
    mutations,
    renamed_body_key,
    variables,
)
from seamless_verl.recipes.swe.tiny.tasks import SPLITS, Task, generate, reserved
from seamless_verl.recipes.swe.tiny.templates import HELD_OUT_NOUNS, HELD_OUT_TEMPLATES, TEMPLATES

KNOWN = ("sum_below", "add_cells", "comparison")
COUNTS = {"train": 1500, "held_out": 150, "held_out_templates": 60}


@pytest.fixture(scope="module")
def tasks() -> dict[str, list[Task]]:
    return {split: list(islice(generate(split, 0), COUNTS[split])) for split in SPLITS}


def test_same_seed_same_tasks_other_seed_others() -> None:
    one, again, other = (list(islice(generate("train", seed), 50)) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_a_known_task_stays_the_same_on_every_python() -> None:
    """Breaks when the generator changes, on purpose or not: cached data sets and published scores then change too."""
    task = next(generate("train", 0))
    assert (task.template, task.function, task.operator) == KNOWN


@pytest.mark.parametrize("split", SPLITS)
def test_every_task_keeps_its_promises(tasks: dict[str, list[Task]], split: str) -> None:
    for task in tasks[split]:
        assert task.split == split
        differing = [i for i, (bug, right) in enumerate(zip(task.source, task.fixed, strict=True)) if bug != right]
        assert len(differing) == 1
        assert differing[0] >= BODY_START
        assert task.operator in OPERATORS
        assert task.run(task.fixed) == ("5/5 passed", 1.0)
        outcome, share = task.run(task.source)
        assert share <= 0.6
        assert outcome.startswith("FAIL ")
        assert edit.apply_edit(task.source, task.answer) == list(task.fixed)
        assert (task.template in HELD_OUT_TEMPLATES) == (split == "held_out_templates")
        assert (task.function.split("_")[1] in HELD_OUT_NOUNS) == (split != "train")


def test_all_templates_and_operators_occur(tasks: dict[str, list[Task]]) -> None:
    known = {template.name for template in TEMPLATES}
    assert len(known) == len(TEMPLATES) == 34
    assert {task.template for task in tasks["train"]} == known - HELD_OUT_TEMPLATES
    assert {task.template for task in tasks["held_out_templates"]} == HELD_OUT_TEMPLATES
    assert {task.operator for task in tasks["train"]} == set(OPERATORS)


def bodies_of(texts: list[str]) -> list[tuple[str, ...]]:
    """Files that a demonstration shows, and the one that its last edit makes."""
    files = []
    for user, assistant in zip(texts[::2], texts[1::2], strict=True):
        lines = [line.partition("|")[2] for line in user.splitlines() if line.partition("|")[0].isdigit()]
        edited = edit.apply_edit(lines, assistant)
        assert edited is not None
        files += [tuple(lines), tuple(edited)]
    return files


def test_no_body_of_a_held_out_task_occurs_in_training(tasks: dict[str, list[Task]]) -> None:
    seen = {body_key(lines) for task in tasks["train"] for lines in (task.source, task.fixed)}
    shapes = {renamed_body_key(lines) for task in tasks["train"] for lines in (task.source, task.fixed)}
    for right in (0.2, 1.0):
        for texts in islice(conversations(7, right), 500):
            seen |= {body_key(lines) for lines in bodies_of(texts)}
            shapes |= {renamed_body_key(lines) for lines in bodies_of(texts)}
    for task in tasks["held_out"]:
        assert body_key(task.fixed) not in seen
        assert body_key(task.source) not in seen
    for task in tasks["held_out_templates"]:
        assert renamed_body_key(task.fixed) not in shapes


def test_the_side_of_a_body_does_not_depend_on_how_much_is_drawn(tasks: dict[str, list[Task]]) -> None:
    assert not any(reserved(lines) for task in tasks["train"] for lines in (task.source, task.fixed))
    assert all(reserved(lines) for task in tasks["held_out"] for lines in (task.source, task.fixed))
    assert all(reserved(task.fixed) for task in tasks["held_out_templates"])


def test_all_of_a_task_is_in_its_json_and_of_that_a_part_is_public(tasks: dict[str, list[Task]]) -> None:
    for task in tasks["train"][:200]:
        public = json.loads(task.to_json())
        whole = {**public.pop("hidden"), "source": public["source"].splitlines()}
        assert whole == json.loads(json.dumps(asdict(task)))
        assert sorted(public) == ["source", "source_file", "test_command", "test_file", "tests"]


def test_test_file_is_python_with_one_test_per_case(tasks: dict[str, list[Task]]) -> None:
    for task in tasks["train"][:100]:
        module = ast.parse(task.tests())
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        assert [function.name for function in functions] == [f"test_{n}" for n in range(1, 6)]
        for function, case in zip(functions, task.cases, strict=True):
            assert ast.get_docstring(function) == f"{case.call(task.function)} == {case.expected!r}"


def test_mutations_are_single_tokens_and_compile(tasks: dict[str, list[Task]]) -> None:
    for task in tasks["train"][:100]:
        for mutation in mutations(task.fixed):
            mutated = mutation.apply(task.fixed)
            assert mutated != task.fixed
            compile("\n".join(mutated), "mutated", "exec")
            assert sum(a != b for a, b in zip(mutated, task.fixed, strict=True)) == 1


def test_renaming_keeps_the_shape_and_changes_the_body() -> None:
    template = next(template for template in TEMPLATES if template.name == "count_above")
    one = template.dress("f", {"xs": "values", "k": "limit", "a": "total", "x": "v"}, 3)
    two = template.dress("g", {"xs": "items", "k": "cut", "a": "count", "x": "n"}, 3)
    assert body_key(one) != body_key(two)
    assert renamed_body_key(one) == renamed_body_key(two)
    assert variables(one) == ("total", "v", "values", "limit")


def test_demonstrator_who_is_always_right_solves_every_task(tasks: dict[str, list[Task]]) -> None:
    rng = Random(0)
    for task in tasks["train"][:100]:
        assert demonstrate(rng, task, 1.0, 3)[1:] == [task.answer]
    wrong = [demonstrate(rng, task, 0.0, 3) for task in tasks["train"][:100]]
    assert sum(len(texts) == 6 for texts in wrong) > 60, "who is never right uses up the turns"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (["def f(x):", "    while True:", "        pass"], "Timeout"),
        (["def f(x):", "    while True:", "        x *= x + 2"], "Timeout"),
        (["def f(x):", "    kept = [x]", "    for y in kept:", "        kept.append(y)"], "Timeout"),
        (["def f(x):", "    return x / 0"], "ZeroDivisionError"),
        (["def f(x):", "    x = []", "    x.append(x)", "    return x"], "RecursionError"),
    ],
)
def test_limits_of_the_run_in_process(source: list[str], error: str) -> None:
    function = execution.load(source, "f")
    assert not isinstance(function, str)
    assert execution.call(function, [2]) == execution.Call(error=error)


def test_source_that_does_not_load() -> None:
    assert execution.load(["def f(x:"], "f") == "SyntaxError"
    missing = execution.load(["def g(x): return x"], "f")
    assert not isinstance(missing, str)
    assert execution.call(missing, [1]).error == "ImportError"


def test_arguments_are_not_changed_by_a_call() -> None:
    function = execution.load(["def f(xs):", "    xs.append(1)", "    return xs"], "f")
    assert not isinstance(function, str)
    numbers = [5]
    assert execution.call(function, [numbers]).value == [5, 1]
    assert numbers == [5]

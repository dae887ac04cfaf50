"""JSONL of the SWE-bench form to verl's parquet: what is read, refused, split and kept from the agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.recipes.swe.real.prepare import main, split_of
from seamless_verl.recipes.swe.real.records import Defaults, image_name, parse_record
from seamless_verl.recipes.swe.real.task import SweTask, TaskError

pytest.importorskip("pyarrow")

SOLUTION = "+canary_of_the_solution"
TESTS = "+canary_of_the_tests"
IDS = "tests/test_a.py::test_x 'tests/test_b.py::test_y[a b]'"


def record(number: int = 1, **more: Any) -> dict[str, Any]:
    base = {
        "instance_id": f"owner__name-{number}",
        "repo": "owner/name",
        "base_commit": "abc123",
        "problem_statement": f"Problem {number}.",
        "version": "1.0",
        "FAIL_TO_PASS": '["tests/test_a.py::test_x", "tests/test_b.py::test_y[a b]"]',
        "PASS_TO_PASS": ["tests/test_a.py::test_z"],
        "patch": SOLUTION,
        "test_patch": TESTS,
    }
    return {key: value for key, value in {**base, **more}.items() if value is not None}


def write(path: Path, *records: dict[str, Any] | str) -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return table


def test_a_swe_bench_record_becomes_a_task() -> None:
    task = parse_record(record(), Defaults(image_template="swe-bench"))

    assert task.expected == ("tests/test_a.py::test_x", "tests/test_b.py::test_y[a b]", "tests/test_a.py::test_z")
    files = "python -m pytest -q tests/test_a.py tests/test_b.py"
    assert task.test_command == f"python -m pytest -q {IDS} tests/test_a.py::test_z || {files}"
    assert task.view.image == "swebench/sweb.eval.x86_64.owner_1776_name-1:latest"
    assert SweTask.from_mapping(json.loads(task.to_json())) == task


def test_neither_solution_nor_tests_are_in_what_the_agent_sees() -> None:
    task = parse_record(record(), Defaults())

    assert SOLUTION not in task.to_json(), "the solution is in no column"
    view = repr(task.agent_view())
    for hidden in (SOLUTION, TESTS, "test_x", "pytest"):
        assert hidden not in view


@pytest.mark.parametrize(
    ("more", "defaults", "command"),
    [
        ({"test_cmd": "make test"}, Defaults(test_command="x"), "make test"),
        ({"test_cmd": ["cd a", "pytest"]}, Defaults(), "cd a\npytest"),
        ({"test_cmd": ["a", "b"], "FAIL_TO_PASS": None, "PASS_TO_PASS": None}, Defaults(), "a && b"),
        ({"install_config": {"test_cmd": "pytest -rA"}}, Defaults(), "pytest -rA tests/test_a.py tests/test_b.py"),
        ({"install_config": {"test_cmd": "x {test_files} y"}}, Defaults(), "x tests/test_a.py tests/test_b.py y"),
        ({"install_config": {"test_cmd": "x {test_ids}"}, "PASS_TO_PASS": ["a.py::x"]}, Defaults(), f"x {IDS} a.py::x"),
        ({"install_config": {"test_cmd": "make"}, "FAIL_TO_PASS": ["x"]}, Defaults(), "make"),
        ({}, Defaults(test_commands={"owner/name": "a", "owner/name@1.0": "b"}, test_command="c"), "b"),
        ({}, Defaults(test_commands={"owner/name": "a"}, test_command="c"), "a"),
        ({}, Defaults(test_command="c"), "c"),
        ({"FAIL_TO_PASS": ["a.py::x[b", "a.py::y"], "PASS_TO_PASS": []}, Defaults(), "python -m pytest -q a.py"),
        (
            {"FAIL_TO_PASS": ["a.py::x[b", "b.py::y"], "PASS_TO_PASS": ["a.py::z"]},
            Defaults(test_command="make {test_ids} # {test_files}"),
            "make a.py b.py::y # a.py b.py",
        ),
        ({"FAIL_TO_PASS": [f"a.py::x{'x' * 500_000}"], "PASS_TO_PASS": []}, Defaults(), "python -m pytest -q a.py"),
    ],
)
def test_where_the_test_command_comes_from(more: dict[str, Any], defaults: Defaults, command: str) -> None:
    assert parse_record(record(**more), defaults).test_command == command


@pytest.mark.parametrize(
    ("repo", "name", "files"),
    [
        ("owner/name", "tests/test_a.py::test_x", "tests/test_a.py"),
        ("sympy/sympy", "test_x", "tests/app/test_b.py 'tests/a b.py'"),
        ("django/django", "test_x (app.test_b.Case)", "app.test_b 'a b'"),
    ],
)
def test_commands_are_given_the_files_of_the_ids_else_of_the_test_patch(repo: str, name: str, files: str) -> None:
    patch = "".join(
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ {new}\n@@ -1 +1 @@\n-a\n+b\n"
        for path, new in {
            "tests/app/test_b.py": "b/tests/app/test_b.py",
            "tests/app/data.json": "b/tests/app/data.json",
            "tests/gone.py": "/dev/null",
            "tests/a b.py": "b/tests/a b.py\t",
        }.items()
    )
    lists = {"FAIL_TO_PASS": [name], "PASS_TO_PASS": [], "test_patch": patch}
    rebench = record(repo=repo, **lists, install_config={"test_cmd": "run -rA"})

    assert parse_record(rebench, Defaults()).test_command == f"run -rA {files}"
    bench = record(repo=repo, **lists)
    assert parse_record(bench, Defaults(test_commands={repo: "run {test_files} -v"})).test_command == f"run {files} -v"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"test_cmd": "x {test_files}", "FAIL_TO_PASS": ["x"]}, "{test_files}, and neither the tests' ids nor"),
        ({"test_cmd": "x {test_ids}", "FAIL_TO_PASS": ["x"]}, "{test_ids}, and the names of the tests are no pytest"),
        (
            {"FAIL_TO_PASS": None, "PASS_TO_PASS": None},
            "test_command: is missing.*no FAIL_TO_PASS either",
        ),
        (
            {"FAIL_TO_PASS": ["test_x (app.Case)"]},
            "test_command: is missing, and FAIL_TO_PASS holds no",
        ),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS: is empty beside PASS_TO_PASS"),
        ({"FAIL_TO_PASS": "[not json"}, "FAIL_TO_PASS: is a string that is not JSON"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: must be a list of test names"),
        ({"repo": None}, "repo: is missing or empty"),
        ({"base_commit": " "}, "base_commit: is missing"),
        ({"problem_statement": 7}, "problem_statement: must be a string, is int"),
        ({"instance_id": ""}, "instance_id: is missing or empty"),
    ],
)
def test_a_bad_record_names_instance_key_and_fix(more: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        parse_record(record(**more), Defaults())
    assert "Fix: " in str(caught.value)
    assert str(caught.value).startswith("instance '")


def test_swe_smith_tasks_are_branches_of_its_own_copies() -> None:
    smith = record(repo="swesmith/owner__name.abc", base_commit=None, image_name="swesmith.x86_64.owner")

    view = parse_record(smith, Defaults(image_template="other")).view

    assert (view.base_commit, view.image) == ("owner__name-1", "swesmith.x86_64.owner")
    # The tip of the branch has the tests removed: without a patch that brings them nobody could pass.
    with pytest.raises(TaskError, match="test_patch: is missing.*git diff owner__name-1 owner__name-1~1"):
        parse_record({**smith, "test_patch": ""}, Defaults())


def test_image_templates() -> None:
    fields = {
        "instance_id": "A__b-1",
        "repo": "A/b",
        "version": "2",
        "base_commit": "c",
        "environment_setup_commit": "d",
    }

    assert image_name("swe-gym", fields) == "xingyaoww/sweb.eval.x86_64.a_s_b-1:latest"
    assert image_name("mine/{repo}:{version}-{environment_setup_commit}", fields) == "mine/A/b:2-d"
    with pytest.raises(ConfigError, match=r"--image-template=\{nope\}"):
        image_name("{nope}", fields)


def test_the_columns_that_verl_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *(record(n) for n in range(300)))

    assert main(["--input", str(source), "--output", str(tmp_path / "out"), "--val-share", "0.1"]) == 0

    train, val = rows(tmp_path / "out/train.parquet"), rows(tmp_path / "out/val.parquet")
    assert len(train) + len(val) == 300
    assert 10 < len(val) < 60
    first = train[0]
    task = json.loads(first["extra_info"]["task"])
    assert first["prompt"] == [{"role": "user", "content": task["problem_statement"]}]
    assert first["agent_name"] == "seamless_agent"
    assert first["reward_model"] == {"style": "rule", "ground_truth": ""}
    assert [row["extra_info"]["index"] for row in train] == list(range(len(train)))
    assert {row["extra_info"]["split"] for row in val} == {"val"}
    assert SOLUTION not in json.dumps(train + val)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["num_train"], manifest["num_val"]) == (len(train), len(val))
    assert "300" not in capsys.readouterr().out.split("train")[0]


def test_each_image_is_named_once(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(record(n, image=f"image-{n % 2}") for n in range(5)))
    assert main(["--input", str(source), "--output", str(tmp_path), "--val-share", "0"]) == 0
    assert (tmp_path / "images.txt").read_text() == "image-0\nimage-1\n"


def test_the_same_input_gives_the_same_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(record(n) for n in range(60)))
    for name in ("one", "two"):
        assert main(["--input", str(source), "--output", str(tmp_path / name), "--val-share", "0.2"]) == 0
    assert not (tmp_path / "one/images.txt").exists()
    for name in ("train.parquet", "val.parquet", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_split_of_a_task_does_not_depend_on_the_others() -> None:
    ids = [f"id-{n}" for n in range(2000)]
    small = {i for i in ids if split_of(i, 0.05) == "val"}
    large = {i for i in ids if split_of(i, 0.10) == "val"}

    assert small < large
    assert 60 < len(small) < 140


def test_bad_lines_are_told_by_file_and_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", record(1), "{broken", record(1), record(2, repo=None), "[]")

    assert main(["--input", str(source), "--output", str(tmp_path / "out")]) == 1

    errors = capsys.readouterr().err
    assert f"{source}:2: instance '?': line: is not JSON" in errors
    assert f"{source}:3: instance 'owner__name-1': instance_id: occurs a second time" in errors
    assert f"{source}:4: instance 'owner__name-2': repo: is missing" in errors
    assert f"{source}:5: instance '?': line: is a JSON list" in errors
    assert not list(tmp_path.glob("out/*"))


def test_bad_lines_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", record(1), "{broken", record(2))

    assert main(["--input", str(source), "--output", str(tmp_path / "out"), "--val-share", "0", "--skip-invalid"]) == 0

    assert "2 train + 0 val" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "train.parquet"]


@pytest.mark.parametrize("key", ["problem_statement", "FAIL_TO_PASS", "instance_id"])
def test_half_a_character_is_a_bad_line_as_any_other(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = {key: ["tests/test_a.py::\ud83d"] if key == "FAIL_TO_PASS" else "half \ud83d"}
    arguments = ["--input", str(write(tmp_path / "t.jsonl", record(1), record(2, **half))), "--val-share", "0"]

    assert main([*arguments, "--check"]) == 1
    told = f"t.jsonl:2: instance {half.get('instance_id', 'owner__name-2')!r}: {key.lower()}: holds half a character"
    assert told in capsys.readouterr().err
    assert main([*arguments, "--output", str(tmp_path), "--skip-invalid"]) == 0
    assert len(rows(tmp_path / "train.parquet")) == 1


def test_a_task_of_the_validation_file_is_never_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, val = write(tmp_path / "a.jsonl", record(1), record(2)), write(tmp_path / "b.jsonl", record(2))
    command = ["--input", str(train), "--val-input", str(val), "--output", str(tmp_path / "out")]

    assert main(command) == 1
    assert f"{train}:2: instance 'owner__name-2': instance_id: occurs a second time" in capsys.readouterr().err
    assert main([*command, "--skip-invalid"]) == 0
    assert [len(rows(tmp_path / f"out/{split}.parquet")) for split in ("train", "val")] == [1, 1]


def test_check_writes_nothing_and_limit_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *(record(n) for n in range(9)), "{broken")

    assert main(["--input", str(source), "--check", "--limit", "5", "--val-share", "0"]) == 0

    assert "5 train + 0 val tasks checked" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_tasks_whose_tests_the_agent_could_rewrite_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare: dict[str, Any] = {"test_patch": None, "test_cmd": "make test"}
    names = ["test_x (app.Case)"]
    source = write(
        tmp_path / "in.jsonl",
        record(1, **bare),
        record(2, **bare, FAIL_TO_PASS=names, PASS_TO_PASS=None),
        record(3, test_cmd="make test", FAIL_TO_PASS=names, PASS_TO_PASS=None),
        record(4, **bare, FAIL_TO_PASS=None, PASS_TO_PASS=None),
    )

    assert main(["--input", str(source), "--check", "--val-share", "0"]) == 0
    errors = capsys.readouterr().err
    assert "2 tasks (owner__name-2, owner__name-4): test_patch: is missing and no test's name holds a file" in errors
    assert "1 tasks (owner__name-4): FAIL_TO_PASS: is missing" in errors
    assert "4 tasks (owner__name-1, owner__name-2, owner__name-3): image: is missing" in errors

    assert main(["--input", str(write(source, record(1, image="a"))), "--check", "--val-share", "0"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--val-share", "1.5"], "--val-share=1.5"),
        (["--limit", "-1"], "--limit=-1"),
        (["--val-share", "0.000001"], "leaves no validation task out of 1"),
        (["--val-share", "0.999999"], "leaves no training task"),
        (["--val-input", "/nowhere"], "--input=/nowhere: is not a file"),
        (["--test-commands", "/nowhere"], "--test-commands=/nowhere: cannot be read"),
    ],
)
def test_a_command_line_that_cannot_work(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", record(1))

    assert main(["--input", str(source), "--output", str(tmp_path / "out"), *arguments]) == 2

    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))


def test_a_stored_task_that_is_incomplete_or_foreign_is_refused() -> None:
    good = json.loads(parse_record(record(), Defaults()).to_json())

    with pytest.raises(TaskError, match="'owner__name-1': test_command: is missing"):
        SweTask.from_mapping({key: value for key, value in good.items() if key != "test_command"})
    with pytest.raises(TaskError, match="patch: is not a known key"):
        SweTask.from_mapping({**good, "patch": "x"})
    with pytest.raises(TaskError, match="fail_to_pass: must be a list of strings"):
        SweTask.from_mapping({**good, "fail_to_pass": "x"})

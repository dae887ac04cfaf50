"""``seamless-verl new``: a folder that is whole or not there, under a name that can be imported."""

import argparse
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.run import new_command
from seamless_verl.run.new_command import write

EXAMPLES = Path(__file__).parents[3] / "examples"


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_the_example_is_what_it_writes(tmp_path):
    assert contents(write("my_task", tmp_path)) == contents(EXAMPLES / "my_task")


def test_another_name_stands_wherever_the_first_one_stood(tmp_path):
    written = contents(write("chess", tmp_path))
    assert {"recipe/chess.yaml", "test_chess.py"} < set(written)
    assert not [file for file, text in written.items() if "my_task" in text + file]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-task", ["no name of a Python package", "for example my_task"]),
        ("2048", ["no name of a Python package"]),
        ("Chess", ["for example chess"]),
        ("../up", ["for example up"]),
        ("", ["no name"]),
        ("class", ["no name of a Python package"]),
        ("swe", ["a recipe of ours", "my_swe"]),
        ("json", ["installed module", "my_json"]),
        ("yaml", ["installed module", "my_yaml"]),
    ],
)
def test_a_name_that_would_not_do_is_refused_with_one_that_would(tmp_path, name, words):
    with pytest.raises(ConfigError) as refused:
        write(name, tmp_path)
    for word in words:
        assert word in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_left_alone(tmp_path):
    (tmp_path / "chess").mkdir()
    with pytest.raises(ConfigError, match="exists. Fix: choose another name"):
        write("chess", tmp_path)
    assert not list((tmp_path / "chess").iterdir())


def test_where_nothing_can_be_written_nothing_is_left(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written \(.*Fix: change to a folder of yours"):
        write("chess", tmp_path / "file")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "write_text", full)
    assert new_command.new(argparse.Namespace(name="chess")) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

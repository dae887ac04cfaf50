"""What `pip install` brings alone is enough for the commands around a run: verl, Ray and torch may be missing."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OTHERS = ("recipes", "hydra_configs")
# What `pip install -e` leaves: asked behind the folder of the command, also for modules of a package that lies there.
EDITABLE = f"""
import runpy, sys
from importlib.util import spec_from_file_location
from pathlib import Path

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top, *parts = name.split(".")
        if top == "seamless_verl":
            file = Path({str(ROOT)!r}, *([] if parts[:1] in (["recipes"], ["hydra_configs"]) else [top]), *parts)
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            return spec_from_file_location(name, file) if file.is_file() else None

sys.meta_path.append(Editable)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
COMMANDS = ("seamless_verl.main +recipe=arithmetic", "seamless_verl.cli doctor", "seamless_verl.cli proxy --help")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `install_requires` brings, and nothing else that is installed here."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    asked = [Requirement(line) for line in settings["options"]["install_requires"].split("\n") if line]
    folder, seen = tmp_path_factory.mktemp("alone"), set[str]()
    while asked:
        found = distribution(asked.pop().name)
        if found.name in seen:
            continue
        seen.add(found.name)
        needs = map(Requirement, found.requires or ())
        asked += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(found.locate_file(name))))
    assert not seen & {"verl", "ray", "torch", "vllm"}
    return folder


def package_in(folder: Path, *others: str) -> Path:
    """The package as a wheel brings it with ``others``, without them as it lies in the clone."""
    parts = {file.name: file for file in (ROOT / "seamless_verl").iterdir() if file.name not in OTHERS}
    (folder / "seamless_verl").mkdir()
    for name, file in {**parts, **{name: ROOT / name for name in others}}.items():
        (folder / "seamless_verl" / name).symlink_to(file)
    return folder


def run(folder: Path, words: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", "-m", *words.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("words", ["doctor", "proxy --help", "watch --help", "report nowhere", "simulate --help"])
def test_each_command_answers_without_a_traceback(alone: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "here").mkdir()
    done = run(tmp_path / "here", f"seamless_verl.cli {words}", alone, package_in(tmp_path, *OTHERS))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == {"doctor": 1, "report nowhere": 2}.get(words, 0)
    if words == "doctor":
        for missing in ("verl", "vllm", "torch", "ray"):
            assert any(line.split()[:4] == ["!!", missing, "not", "installed"] for line in done.stdout.splitlines())


@pytest.mark.parametrize("words", COMMANDS)
def test_a_clone_below_the_folder_that_hides_the_package_is_named(alone: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "seamless_verl").symlink_to(ROOT)
    (tmp_path / "editable.py").write_text(EDITABLE)
    done = run(tmp_path, f"editable {words}", alone)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "holds a clone called seamless_verl/" in done.stderr


@pytest.mark.parametrize("words", COMMANDS)
def test_a_clone_as_the_folder_that_hides_an_installed_wheel_is_named(alone: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "wheel").mkdir()
    done = run(package_in(tmp_path), words, alone, package_in(tmp_path / "wheel", *OTHERS))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "start in another folder" in done.stderr

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
    parts = {file.name: file for file in (ROOT / "seamless_verl").iterdir()}
    (folder / "seamless_verl").mkdir()
    for name, file in {**parts, "recipes": ROOT / "recipes", "hydra_configs": ROOT / "hydra_configs"}.items():
        (folder / "seamless_verl" / name).symlink_to(file)
    return folder


@pytest.mark.parametrize("words", ["doctor", "proxy --help", "watch --help", "report nowhere", "simulate --help"])
def test_each_command_answers_without_a_traceback(alone: Path, tmp_path: Path, words: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(alone)}
    command = [sys.executable, "-S", "-m", "seamless_verl.cli", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == {"doctor": 1, "report nowhere": 2}.get(words, 0)
    if words == "doctor":
        for missing in ("verl", "vllm", "torch", "ray"):
            assert any(line.split()[:4] == ["!!", missing, "not", "installed"] for line in done.stdout.splitlines())

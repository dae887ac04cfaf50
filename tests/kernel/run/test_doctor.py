"""`seamless-verl doctor` calls a machine ready only where a run with verl's defaults would find what it imports."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl import cli
from seamless_verl.machine import Machine

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def machine_with(monkeypatch):
    """Pretends that the machine has so many accelerators and these modules."""

    def pretend(accelerators, *modules):
        machine = Machine(
            accelerators=accelerators,
            cores=2,
            memory_available=16 * GIB,
            memory_total=24 * GIB,
            disk_free=50 * GIB,
            shared_memory_free=GIB,
        )
        monkeypatch.setattr(cli, "survey", lambda folder: machine)
        monkeypatch.setattr(cli, "is_installed", modules.__contains__)
        return {finding.what: finding for finding in cli.examine(ROOT)}

    return pretend


def test_on_gpus_what_verl_and_vllm_import_there_is_missed(machine_with, capsys):
    found = machine_with(8)
    assert found["cupy"].fatal
    assert "cupy-cuda13x" in found["cupy"].fix
    assert found["flash-attn"].fatal
    assert "--no-build-isolation" in found["flash-attn"].fix
    assert found["flashinfer"].fatal  # seen on an H200: the engine ends minutes after the start
    assert cli.main(["doctor"]) == 1
    assert "to mend" in capsys.readouterr().out
    with_all = machine_with(8, "cupy", "flash_attn", "flashinfer")
    assert not any(with_all[name].fix for name in ("cupy", "flash-attn", "flashinfer"))


@pytest.mark.parametrize(("accelerators", "modules"), [(0, ()), (8, ("torch_npu",))])
def test_elsewhere_nobody_misses_them(machine_with, accelerators, modules):
    assert not {"cupy", "flash-attn", "flashinfer"} & machine_with(accelerators, *modules).keys()


@pytest.mark.parametrize(
    ("vllm", "torch", "fix"),
    [("0.24.0", "2.11.0+cpu", ""), ("0.27.1+cpu", "2.13.0", ""), ("0.28.0", "2.12.0", "run by us with")],
)
def test_both_tested_sets_are_known_as_such(machine_with, monkeypatch, vllm, torch, fix):
    versions = {"vllm": vllm, "torch": torch}
    monkeypatch.setattr(cli, "_TESTED", {name: cli._TESTED[name] for name in versions})
    monkeypatch.setattr(cli.importlib.metadata, "version", versions.__getitem__)
    found = machine_with(0)
    assert all(found[name].fix.startswith(fix) and bool(found[name].fix) == bool(fix) for name in versions)


def test_the_extra_for_gpus_brings_what_the_checkpoint_engine_imports():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert "cupy-cu130" in settings["options.extras_require"]["gpu"]


@pytest.fixture
def with_verl(tmp_path):
    """Runs Python where another verl is installed, which loads our plug-in at its end as each verl does."""

    def run(version, *words, **environment):
        files = {"version/version": version, "trainer/ppo/v1/__init__.py": "", "trainer/ppo/core_algos.py": ""}
        files["__init__.py"] = f"__version__ = '{version}'\nimport seamless_verl.verl_adapter.plugin"
        for name, text in files.items():
            file = tmp_path / "verl" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, **environment}
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


def test_nothing_of_a_verl_that_this_is_not_written_for_is_changed(with_verl):
    imported = ("-c", "import verl.trainer.ppo.v1, verl.trainer.ppo.core_algos")
    for version, told in (("0.9.0", "0.9.0"), ("0.9.10", "0.9.10"), ("0.10.0.dev0", "0.10.0.dev0")):
        done = with_verl(version, *imported)
        assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
        assert f"verl 0.9.1, this is {told}" in done.stderr
    worker = with_verl("0.9.0", *imported, RAY_RAYLET_PID="1")
    assert (worker.returncode, worker.stderr) == (0, ""), "the user's process has said it"
    for version, environment in (("0.9.1.post1", {}), ("0.9.0", {"SEAMLESS_ANY_VERL": "1"})):
        done = with_verl(version, *imported, **environment)
        assert "No module named 'verl." in done.stderr, "our trainer asks for modules that the stand-in has not"


def test_the_command_and_the_doctor_refuse_such_a_verl(with_verl):
    done = with_verl("0.9.0", "-m", "seamless_verl.main", "+recipe=arithmetic")
    assert done.returncode == 2
    assert done.stderr.startswith("error: verl: "), done.stderr
    assert "0.9.0" in done.stderr
    assert "pip install verl==0.9.1" in done.stderr
    assert "\n!! verl  " in with_verl("0.9.0", "-m", "seamless_verl.cli", "doctor").stdout

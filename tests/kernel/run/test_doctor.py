"""`seamless-verl doctor` calls a machine ready only where a run with verl's defaults would find what it imports."""

import configparser
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

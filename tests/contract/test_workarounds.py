"""The tables of patches: each names what exists, and installing them imports nothing."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from seamless_verl.verl_adapter import workarounds as ours

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and vLLM, at import

TABLES = [*ours.VERL, *ours.VERL_ON_CPU, *ours.VLLM, *ours.VLLM_ON_CPU]


@pytest.mark.parametrize("it", TABLES, ids=lambda it: f"{it.module}-{getattr(it.install, '__name__', it.install)}")
def test_a_workaround_names_a_module_and_a_function_that_exist(it):
    assert importlib.util.find_spec(it.module) is not None
    assert it.mends
    assert it.until
    if isinstance(it.install, str):
        module, _, function = it.install.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_they_are_light_to_install():
    code = (
        "import sys\n"
        "from seamless_verl.verl_adapter.workarounds import VERL, VLLM, VLLM_ON_CPU, install\n"
        "install([*VERL, *VLLM, *VLLM_ON_CPU])\n"
        "print(sorted({'torch', 'ray', 'verl', 'vllm', 'numpy', 'omegaconf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_module_that_is_imported_already_is_patched_at_once():
    seen = []
    ours.install([ours.Workaround(module="json", install=seen.append, mends="nothing", until="now")])
    assert [module.__name__ for module in seen] == ["json"]


@pytest.mark.parametrize(
    ("mode", "device", "refused"), [("seamless", "cuda", True), ("seamless", "cpu", False), ("sync", "cuda", False)]
)
def test_verls_entry_point_refuses_a_machine_without_the_devices_before_it_starts_ray(
    monkeypatch, tmp_path, mode, device, refused
):
    from omegaconf import OmegaConf
    from verl.utils.device import auto_set_device

    from seamless_verl.errors import MachineError
    from seamless_verl.run import check_machine

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(check_machine, "cluster_address", lambda given: None)
    config = OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": 8, "device": device, "v1": {"trainer_mode": mode}},
            "actor_rollout_ref": {"rollout": {"nnodes": 0, "n_gpus_per_node": 0}},
        }
    )
    if refused:
        with pytest.raises(MachineError, match=r"asks for 8 to train .* this machine has none"):
            auto_set_device(config)
    else:
        auto_set_device(config)

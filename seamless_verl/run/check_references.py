"""Refuses keys that name what is not there: models, data, reward functions, agent runners, sources of a curriculum.

Files are read and never run; classes are imported and never built. Rollout workers build their agent runner when all
replicas have been loaded, so whatever can be known before that is asked here.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seamless_verl.agents.contract import runner_class
from seamless_verl.checked import value_of, whole_number
from seamless_verl.config import AgentConfig, SeamlessConfig
from seamless_verl.errors import ConfigError, meant
from seamless_verl.run.check_combinations import AGENT_LOOP, check_routing_replay, uses_critic
from seamless_verl.run.check_machine import ADDRESS, cluster_address, model_configs

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_RUNNER, _KWARGS = "seamless.agent.runner", "seamless.agent.kwargs"
_REWARDS = (
    "reward.custom_reward_function.path", "reward.reward_manager.name", "reward.reward_manager.module.path",
    "reward.reward_kwargs", "reward.sandbox_fusion.url",
)  # fmt: skip
_DEFAULT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


def check_files(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None = None) -> list[str]:
    """Raise on a model, data file, agent or task that is missing or malformed; warnings: see `_told_of_rewards`.

    Whatever lies in ``pending`` is about to be built and is not looked at.
    """
    _check_paths(config, pending)
    _check_positions(config)
    _check_reward(config)
    _check_columns(config, seamless, pending)
    _check_agent(config, seamless, pending)
    _check_parsers(seamless)
    _check_curriculum(config, seamless, pending)
    check_rows(config, [Path(file).expanduser() for file in _tables(config, pending)])
    _check_amount(config, pending)
    return _told_of_rewards(config, seamless, pending)


def _tables(config: Mapping[str, Any], pending: Path | None) -> list[str]:
    """The parquet files of the data that are here to be looked at."""
    files = _plain_files(config, "train_files") + _plain_files(config, "val_files")
    return [file for file in files if _is_table_here(file, pending)]


def _is_table_here(file: str, pending: Path | None) -> bool:
    return file.endswith(".parquet") and "://" not in file and not _is_below(file, pending)


def _check_paths(config: Mapping[str, Any], pending: Path | None) -> None:
    _check_model("actor_rollout_ref.model.path", config["actor_rollout_ref"]["model"]["path"], pending)
    if uses_critic(config):
        _check_model("critic.model.path", config["critic"]["model"]["path"], pending)
    for key in ("train_files", "val_files"):
        for name in _plain_files(config, key):
            if "://" not in name and not _is_below(name, pending) and not Path(name).expanduser().exists():
                raise ConfigError(f"data.{key}", name, "does not exist", "give the path of a parquet file")
            if not name.endswith((".parquet", ".json", ".jsonl")):
                raise ConfigError(f"data.{key}", name, "is nothing that verl reads", "give parquet or JSON lines")


def _is_below(path: str, folder: Path | None) -> bool:
    return folder is not None and folder in Path(path).parents


def _check_model(key: str, path: str | None, pending: Path | None) -> None:
    if path is None:
        raise ConfigError(key, "null", "is not set", "give a folder with a Hugging Face model, or a hub name")
    local = Path(path).expanduser()
    if local.is_dir() and not (local / "config.json").is_file() and not _is_below(path, pending):
        fix = "give the folder that holds the model's config.json, weights and tokenizer"
        raise ConfigError(key, path, "holds no config.json", fix)
    if local.exists() or "://" in path or _is_below(path, pending):
        return
    if local.is_absolute() or path.startswith((".", "~")) or not _HUB_NAME.fullmatch(path):
        raise ConfigError(key, path, "does not exist", "give a folder that exists, or a hub name such as Qwen/Qwen3-8B")


def _check_positions(config: Mapping[str, Any]) -> None:
    """verl's servers refuse such a length, when they start."""
    model, key = config["actor_rollout_ref"]["model"], "actor_rollout_ref.rollout.max_model_len"
    changed = dict(model.get("override_config") or {})
    found: dict[str, Any] = next(model_configs(model["path"]), {})
    known = {**found.get("text_config", {}), **found, **changed.get("model_config", changed)}
    positions = known.get("max_position_embeddings")
    if isinstance(positions, int) and (value_of(config, key, None) or 0) > positions:
        asked = whole_number(config, key)
        problem = f"is more than the {positions} positions of {model['path']} (max_position_embeddings)"
        stretched = f"+actor_rollout_ref.model.override_config.max_position_embeddings={asked}"
        raise ConfigError(key, asked, problem, f"write {positions}, or {stretched} where positions can be stretched")


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


def _told_of_rewards(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None) -> list[str]:
    """A runner grades its attempts (`_output` of the agent loop), so verl's rewards are for rows of other loops only.

    Raises:
        ConfigError: there are no such rows, and GPUs would be kept for a reward model.
    """
    files = _plain_files(config, "train_files") + _plain_files(config, "val_files")
    if seamless.agent.runner is None or not files or not all(_is_table_here(file, pending) for file in files):
        return []
    usual = {value_of(config, _DEFAULT_LOOP, None)}
    if any((_loops(Path(file).expanduser()) or usual) != {AGENT_LOOP} for file in files):
        return []
    told = f"all rows of the data are graded by {_RUNNER}={seamless.agent.runner}"
    key = "reward.reward_model.enable"
    if value_of(config, key, False):
        raise ConfigError(key, True, f"would keep GPUs for nothing: {told}", "write false")
    found = {key: value_of(config, key, None) for key in _REWARDS}
    unused = [f"{key}={value}" for key, value in found.items() if value and value != "naive"]  # verl's default manager
    return [f"{', '.join(unused)}: not used, since {told}"] if unused else []


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


def _check_columns(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None) -> None:
    """verl would miss a column minutes after the start; and rows that ask for no agent never reach the runner."""
    import pyarrow.parquet as parquet

    needed = {"data.prompt_key": str(value_of(config, "data.prompt_key", "prompt"))}
    if seamless.agent.runner is not None:
        needed["data.*_files"] = "extra_info"
    tables = _tables(config, pending)
    for file in tables:
        try:
            columns = parquet.read_schema(Path(file).expanduser()).names
        except (OSError, ValueError) as error:
            raise ConfigError("data.*_files", file, f"cannot be read as parquet ({error})", "make it anew") from error
        for key, column in needed.items():
            if column not in columns:
                raise ConfigError(key, column, f"{file} has no such column", meant(column, columns))
    if seamless.agent.runner is None or not tables or value_of(config, _DEFAULT_LOOP, None) == AGENT_LOOP:
        return
    if not any(AGENT_LOOP in _loops(Path(file).expanduser()) for file in tables):
        problem = f"is never called: no row of {', '.join(tables)} has agent_name={AGENT_LOOP}"
        fix = f"add that column to the data, or write {_DEFAULT_LOOP}={AGENT_LOOP}"
        raise ConfigError(_RUNNER, seamless.agent.runner, problem, fix)


def _check_amount(config: Mapping[str, Any], pending: Path | None) -> None:
    """verl drops a last batch that is not whole, and asserts when nothing is left."""
    import pyarrow.parquet as parquet

    files, batch = _plain_files(config, "train_files"), config["data"]["train_batch_size"]
    if not files or not all(_is_table_here(file, pending) for file in files):
        return
    rows = sum(parquet.read_metadata(Path(file).expanduser()).num_rows for file in files)
    most = value_of(config, "data.train_max_samples", -1)
    if most > 0 and most < rows:
        rows = most
    if rows < batch and not value_of(config, "trainer.val_only", False):
        problem = f"{', '.join(files)}: {rows} rows, fewer than one batch"
        raise ConfigError("data.train_batch_size", batch, problem, f"write {rows} or less, or give more data")


def _check_agent(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None) -> None:
    if seamless.agent.runner is None:
        return
    here = cluster_address(value_of(config, ADDRESS, None)) is None
    check_task = getattr(check_runner(seamless.agent, here=here), "check_task", None)
    if check_task is None:
        return
    for file in _tables(config, pending):
        for task in _tasks_of(file):
            check_task(task)


def _check_parsers(seamless: SeamlessConfig) -> None:
    """Where vLLM is installed here. Its register is read, since to import it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    for key, package in {"tool_parser": "tool_parsers", "reasoning_parser": "reasoning"}.items():
        name = getattr(seamless.proxy, key)
        known = registered_parsers(Path(str(spec.origin)).parent / package / "__init__.py") if name and spec else []
        if known and name not in known:
            raise ConfigError(f"seamless.proxy.{key}", name, "vLLM has no such parser", meant(str(name), known))


def registered_parsers(file: Path) -> list[str]:
    """Names in a register of vLLM's (a contract test compares); none where another version keeps it elsewhere."""
    return re.findall(r'^    "([^"]+)": \(', file.read_text(encoding="utf-8"), re.M) if file.is_file() else []


def check_runner(agent: AgentConfig, *, here: bool) -> Any:
    """The class that ``agent.runner`` names, when nothing speaks against calling it with ``agent.kwargs``.

    Args:
        agent: with a runner.
        here: attempts will run on this machine, so that what it lacks matters.

    Raises:
        ConfigError: it cannot be imported or called, or does not take these arguments.
        SeamlessError: what its own checks find.
    """
    try:
        runner = runner_class(str(agent.runner))
    except (ImportError, AttributeError, ValueError) as error:
        fix = "give the full name of an AgentRunner class, as seamless_verl.recipes.swe.tiny.runner.TinySweRunner"
        raise ConfigError(_RUNNER, agent.runner, f"cannot be imported ({error})", fix) from error
    _check_signature(runner, agent)
    if (check_options := getattr(runner, "check_options", None)) is not None:
        check_options(agent.kwargs)
    if here and (check_machine := getattr(runner, "check_machine", None)) is not None:
        check_machine(agent.kwargs)
    return runner


def _check_signature(runner: Any, agent: AgentConfig) -> None:
    try:
        parameters = inspect.signature(runner).parameters.values()
    except ValueError:  # a class written in C may have none
        return
    except TypeError as error:
        raise ConfigError(_RUNNER, agent.runner, "cannot be called", "name an AgentRunner class") from error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = (
        [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [key for key in agent.kwargs if key not in named]
    )
    for key in unknown:
        fix = meant(key, named) if named else f"leave {_KWARGS} empty"
        raise ConfigError(f"{_KWARGS}.{key}", agent.kwargs[key], f"is no argument of {agent.runner}", fix)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in agent.kwargs:
            raise ConfigError(f"{_KWARGS}.{name}", None, f"is not set, and {agent.runner} needs it", "set it")


def _check_curriculum(config: Mapping[str, Any], seamless: SeamlessConfig, pending: Path | None) -> None:
    """Stages and pools against the sources of the data, where it is there to be looked at."""
    files = _plain_files(config, "train_files")
    here = files and all(_is_table_here(file, pending) for file in files)
    if not seamless.curriculum.enabled or not here:
        return
    import pyarrow.parquet as parquet

    from seamless_verl.curriculum.curriculum import configured

    sources: list[str] = []
    for file in files:
        path = Path(file).expanduser()
        if "data_source" not in parquet.read_schema(path).names:
            fix = "add it, verl's rewards use it too"
            raise ConfigError("data.train_files", file, "has no column data_source", fix)
        sources += map(str, parquet.read_table(path, columns=["data_source"])["data_source"].to_pylist())
    configured(seamless.curriculum, sources=sources, train_batch_size=config["data"]["train_batch_size"], seed=None)


def _tasks_of(file: str, most: int = 1000) -> Iterable[Mapping[str, Any]]:
    """The first tasks of a data file (all of them would take minutes on real data sets)."""
    import pyarrow.parquet as parquet

    for batch in parquet.ParquetFile(Path(file).expanduser()).iter_batches(batch_size=most, columns=["extra_info"]):
        for row in batch.to_pylist():
            yield _task_of(row, file)
        return


def _task_of(row: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    task = (row["extra_info"] or {}).get("task")
    if task is None:
        raise ConfigError(
            "data.*_files", file, "has a row without extra_info.task", "prepare the data with the recipe's tool"
        )
    try:
        return dict(json.loads(task) if isinstance(task, str) else task)
    except (TypeError, ValueError) as error:
        problem = f"has a row whose extra_info.task is no mapping, and no JSON of one: {str(task)[:80]!r}"
        raise ConfigError("data.*_files", file, problem, "write json.dumps({…})") from error


def task_at(config: Mapping[str, Any], number: int, *, validation: bool) -> tuple[str, Mapping[str, Any]]:
    """Name and task of row ``number`` of the data, counted over all files.

    Raises:
        ConfigError: there is no such row, or it asks for another agent loop, or has no task.
    """
    files, before = _files(config, "val_files" if validation else "train_files"), 0
    for file in files:
        table = _table(file)
        if 0 <= number - before < table.num_rows:
            row = table.slice(number - before, 1).to_pylist()[0]
            loop = row.get("agent_name") or value_of(config, _DEFAULT_LOOP, None)
            if loop != AGENT_LOOP:
                raise ConfigError("--task", number, f"its agent_name is {loop}", f"try rows of {AGENT_LOOP}")
            extra = row["extra_info"] or {}
            return f"{extra.get('split', '')}/{extra.get('index', number)}", _task_of(row, file)
        before += table.num_rows
    raise ConfigError("--task", number, f"{', '.join(files)}: {before} rows", f"write 0 to {before - 1}")


def _table(file: str) -> Any:
    """A data file's rows, as verl reads them."""
    path = Path(file).expanduser()
    try:
        if file.endswith(".parquet"):
            return importlib.import_module("pyarrow.parquet").read_table(path)
        return importlib.import_module("datasets").load_dataset("json", data_files=str(path), split="train").data
    except Exception as error:  # each reader has errors of its own
        fix = "give parquet, JSON or JSONL files"
        raise ConfigError("data.*_files", file, f"cannot be read ({error})", fix) from error


def check_rows(config: Mapping[str, Any], files: Iterable[Path]) -> None:
    """`check_routing_replay`, where a row of these parquet files names our agent loop.

    Raises:
        ConfigError: see there.
    """
    try:
        check_routing_replay(config)
    except ConfigError:  # only then are the files worth reading
        if any(AGENT_LOOP in _loops(file) for file in files):
            raise


def _loops(file: Path) -> set[str | None]:
    """Agent loops that rows name; empty: they do not say, and have the default."""
    import pyarrow.parquet as parquet

    if "agent_name" not in parquet.read_schema(file).names:
        return set()
    return set(parquet.read_table(file, columns=["agent_name"])["agent_name"].unique().to_pylist())


def _plain_files(config: Mapping[str, Any], name: str) -> list[str]:
    """None where a dataset class of the user's own is given their names: what it makes of them, only running it would
    show. Ours reads as verl's does."""
    reader = value_of(config, "data.custom_cls.path", None)
    return _files(config, name) if reader is None or reader.startswith("pkg://seamless_verl.") else []


def _files(config: Mapping[str, Any], name: str) -> list[str]:
    value = value_of(config, f"data.{name}")
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        told = "null" if value is None else value
        raise ConfigError(f"data.{name}", told, "must be a file or a list of files", "give parquet files")
    return files

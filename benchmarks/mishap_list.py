"""The mistakes and mishaps that `benchmarks.mishaps` tries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from benchmarks.mishap import RUN, Mishap, nothing, rewritten
from benchmarks.mishap_runs import RUNS, no_mounts

_CLI = ("{python}", "-m", "seamless_verl.cli")


def _key(name: str, *overrides: str, says: tuple[str, ...], prepare: Callable[[Path], None] = nothing) -> Mishap:
    """A run that is refused for its settings."""
    return Mishap(name=name, command=(*RUN, *overrides), words=says, prepare=prepare)


def _tool(name: str, *options: str, says: tuple[str, ...], prepare: Callable[[Path], None] = nothing) -> Mishap:
    """Another command that is refused."""
    return Mishap(name=name, command=(*_CLI, *options), words=says, prepare=prepare)


def _table(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[Path], None]:
    """Changes the copy of the training data, which ``_OWN_DATA`` names."""

    def rewrite(folder: Path) -> None:
        change(pd.read_parquet(folder / "train.parquet")).to_parquet(folder / "train.parquet")

    return rewrite


_OWN_DATA = "data.train_files={folder}/train.parquet"


def _no_parquet(folder: Path) -> None:
    (folder / "train.parquet").write_text("question,answer\n1+1,2\n")


def _living_run(folder: Path) -> None:
    from seamless_verl.machine import identity

    (folder / "run").mkdir()
    (folder / "run" / "pid").write_text(identity(os.getpid()))


def _empty_model(folder: Path) -> None:
    (folder / "model").mkdir()


_KEYS = (
    _key("key misspelt", "data.train_batch_sise=8", says=("no such key", "did you mean data.train_batch_size?")),
    _key("key of ours misspelt", "seamless.staleness.etta=1", says=("no such key", "seamless.staleness.eta")),
    _key("key of ours added", "+seamless.agent.dedline_s=3", says=("dedline_s", "deadline_s")),
    _key("recipe misspelt", "+recipe=my_tsk", says=("my_tsk",)),
    _key("platform misspelt", "+platform=gup", says=("+platform=gup", "write +platform=gpu")),
    _key("flags that exclude each other", "--cfg", "job", "-m", says=("exclude each other", "Fix: give one")),
    _key("text for a number", "data.train_batch_size=many", says=("data.train_batch_size=many", "Fix:")),
    _key("trainer mode misspelt", "trainer.v1.trainer_mode=seamles", says=("did you mean seamless?",)),
    _key("policy misspelt", "seamless.scheduler.policy=gredy", says=("seamless.scheduler.policy", "greedy")),
    _key("estimator misspelt", "algorithm.adv_estimator=grop", says=("algorithm.adv_estimator=grop", "grpo")),
    _key("deadline of nothing", "seamless.agent.deadline_s=0", says=("seamless.agent.deadline_s=0", "Fix:")),
    _key("no rollouts", "actor_rollout_ref.rollout.n=0", says=("actor_rollout_ref.rollout.n=0", "Fix:")),
    _key(
        "mini-batch does not divide",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        says=("does not divide data.train_batch_size=8", "write 2"),
    ),
    _key(
        "micro-batch does not divide",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24",
        says=("ppo_micro_batch_size_per_gpu=24", "write 16"),
    ),
    _key(
        "lengths do not fit",
        "actor_rollout_ref.rollout.max_model_len=100",
        says=("is less than data.max_prompt_length + data.max_response_length = 128", "write 128"),
    ),
    _key("more GPUs than there are", "trainer.device=cuda", says=("trainer.device", "Fix:")),
    _key(
        "cluster that is not there",
        "ray_kwargs.ray_init.address=127.0.0.1:1",
        "trainer.device=cuda",
        says=("127.0.0.1:1", "Fix:"),
    ),
    _key(
        "port in use",
        "seamless.proxy.port={port}",
        says=("seamless.proxy.port=", "write 0"),
    ),
)
_FILES = (
    _key("model path misspelt", "actor_rollout_ref.model.path=/models/qwen", says=("/models/qwen", "does not exist")),
    _key(
        "model folder without a model",
        "actor_rollout_ref.model.path={folder}/model",
        says=("holds no config.json", "Fix:"),
        prepare=_empty_model,
    ),
    _key("data path misspelt", "data.train_files=/data/trian.parquet", says=("/data/trian.parquet", "does not exist")),
    _key("data is no parquet", _OWN_DATA, says=("cannot be read as parquet", "Fix:"), prepare=_no_parquet),
    _key(
        "column misspelt",
        _OWN_DATA,
        says=("data.prompt_key=prompt", "no such column", "write promt"),
        prepare=_table(lambda rows: rows.rename(columns={"prompt": "promt"})),
    ),
    _key(
        "no row asks for agents",
        _OWN_DATA,
        "data.val_files={folder}/train.parquet",
        says=("is never called", "agent_name=seamless_agent"),
        prepare=_table(lambda rows: rows.assign(agent_name="single_turn_agent")),
    ),
    _key(
        "fewer rows than a batch",
        _OWN_DATA,
        says=("data.train_batch_size=8", "5 rows", "write 5 or less"),
        prepare=_table(lambda rows: rows.head(5)),
    ),
    _key(
        "reward file missing",
        "reward.custom_reward_function.path={folder}/rewards.py",
        says=("rewards.py", "does not exist", "Fix:"),
    ),
    _key(
        "module of assets misspelt",
        "seamless.assets.dir=null",
        "seamless.assets.module=my_task.dat",
        says=("my_task.dat", "Fix:"),
    ),
    _key(
        "run folder of a living run",
        says=("belongs to a run that is still going", "another folder"),
        prepare=_living_run,
    ),
    _key("run folder is a file", "hydra.run.dir={folder}/train.parquet", says=("cannot be made a folder", "Fix:")),
    _key(
        "run folder cannot be written",
        "hydra.run.dir=/proc/runs/mine",
        says=("cannot be made a folder", "may write to"),
    ),
)
_AGENTS = (
    _key("runner misspelt", "seamless.agent.runner=my_task.agent.Runer", says=("cannot be imported", "Fix:")),
    _key("runner's argument misspelt", "+seamless.agent.kwargs.thread=4", says=("is no argument of", "write threads")),
    _key(
        "agent misspelt", "seamless.agent.kwargs.agent=my_task.agent.atempt", says=("no such function", "write attempt")
    ),
    _key(
        "agent with a syntax error",
        says=("its module raises SyntaxError", "agent.py", "mend it there"),
        prepare=rewritten("agent.py", "MOST_TURNS = 2", "MOST_TURNS = ="),
    ),
    _key(
        "agent imports what is not there",
        says=("its module raises ModuleNotFoundError", "agent.py:", "import opennai"),
        prepare=rewritten("agent.py", "from openai import", "import opennai\nfrom openai import"),
    ),
    _key(
        "reward with other arguments",
        says=("cannot be called", "write def score(task, outcome)"),
        prepare=rewritten("reward.py", "outcome: dict[str, Any] | None)", "result: dict[str, Any] | None)"),
    ),
)
_TOOLS = (
    _tool("new with a bad name", "new", "my-task-2", says=("no name of a Python package", "my_task_2")),
    _tool("new over a folder", "new", "my_task", says=("exists", "another name")),
    _tool("try without such a recipe", "try", "my_tsk", says=("+recipe=my_tsk", "Fix:")),
    _tool("try a recipe without agents", "try", "arithmetic", says=("seamless.agent.runner", "Fix:")),
    _tool(
        "try a task that is not there", "try", "my_task", "seamless.assets.dir={assets}", "--task", "9999",
        says=("--task=9999", "write 0 to 319"),
    ),
    _tool(
        "try with no server", "try", "my_task", "seamless.assets.dir={assets}", "--engine", "http://127.0.0.1:9",
        says=("http://127.0.0.1:9", "start it first"),
    ),
    _tool("report of nothing", "report", "{folder}/nowhere", says=("nowhere",)),
    _tool("watch of nothing", "watch", "{folder}/nowhere", says=("does not exist", "Fix:")),
    _tool("simulate from nothing", "simulate", "--from", "{folder}/nowhere", says=("nowhere",)),
    _tool(
        "proxy without a server", "proxy", "--engine", "http://127.0.0.1:9", "--model", "{assets}/model", "--port", "0",
        says=("http://127.0.0.1:9", "start it first"),
    ),
)  # fmt: skip


def _mounted(script: str) -> tuple[str, ...]:
    """Runs a command where the mounts of a shell script are."""
    return ("unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh")


_MACHINE = (
    Mishap(
        name="disk too small for the run folder",
        command=(*_mounted("mkdir {folder}/run && mount -t tmpfs -o size=64k none {folder}/run"), *RUN),
        words=("disk", "Fix:"),
        cannot=no_mounts,
    ),
    Mishap(
        name="shared memory too small",
        command=(*_mounted("mount -t tmpfs -o size=16m none /dev/shm"), *RUN),
        words=("shared memory: 16 MiB free in /dev/shm", "Fix:", "--shm-size"),
        cannot=no_mounts,
    ),
)

MISHAPS: tuple[Mishap, ...] = (*_KEYS, *_FILES, *_AGENTS, *_TOOLS, *_MACHINE, *RUNS)

"""The trainer's process: ``python -m seamless_verl.verl_adapter.job RUN_DIR``, started by the supervisor.

verl runs its trainer in a Ray actor; here it is this process, which spares one interpreter and lets Ctrl-C reach it.
Everything that verl, Ray and vLLM print goes to ``logs/``; the terminal shows the reporter's lines only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from seamless_verl.errors import SeamlessError
from seamless_verl.machine import ANY_VERL
from seamless_verl.observe.reporter import tell
from seamless_verl.run.check_machine import cluster_address
from seamless_verl.run.checkpoints import have_one
from seamless_verl.run.restarts import Exit, RunBroken, exit_of
from seamless_verl.run.supervisor import INTERPRETER, MARKS

_log = logging.getLogger(__name__)

_LOG = "trainer.log"
_CLOSE_S = 30.0  # more than a runner's child may take to end its container, less than an interrupted trainer has
_DYING_S = 30.0  # until Ray notices that the controller of this run's last life is gone


class StartUp:
    """Seconds from the user's command, or from the last restart, to now, by part."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.parts: dict[str, float] = {}
        self._last = started_at

    def lap(self, part: str) -> None:
        now = time.time()
        self.parts[part] = round(now - self._last, 3)
        self._last = now


def main(run_dir: Path) -> int:
    start_up = StartUp(float(os.environ.get("SEAMLESS_STARTED_AT", time.time())))
    start_up.lap("compose_and_check")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    terminal = _redirect_output(run_dir / "logs" / _LOG)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        _train(run_dir, terminal, start_up)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the end of the line: the user is told, the exit code says so
        _tell(run_dir, terminal, _told(error))
        with contextlib.suppress(OSError):  # the log's disk is full
            traceback.print_exc()
        return exit_of(error)
    return 0


def _tell(run_dir: Path, terminal: TextIO, story: str) -> None:
    tell(terminal, f"error: {story}\n(full story: {run_dir / 'logs' / _LOG})")


def _last_word(run_dir: Path, terminal: TextIO, story: str) -> None:
    """End the process, since the run did not end by itself; log the stack of every thread, and tell the user why."""
    faulthandler.dump_traceback(all_threads=True)
    _tell(run_dir, terminal, f"RunBroken: {story}")
    os._exit(Exit.DIED)


def _train(run_dir: Path, terminal: TextIO, start_up: StartUp) -> None:
    import ray
    import transfer_queue as tq
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.ppo.v1 import get_trainer_cls

    from seamless_verl.observe.reporter import Reporter
    from seamless_verl.verl_adapter.trainer.adoption import refuse_joined_queue
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    config = _load_config(run_dir)
    start_up.lap("import_verl")
    _start_ray(config, get_ppo_ray_runtime_env(config))
    start_up.lap("start_ray")
    _name_logger_file(run_dir)

    config.transfer_queue.enable = True
    _check_alone()
    tq.init(config.transfer_queue)
    refuse_joined_queue()  # of one that began at the same time
    reporter = Reporter(run_dir, terminal)
    try:
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
        if isinstance(trainer, SeamlessTrainer):
            trainer.reporter = reporter
        trainer.init()
        start_up.lap("start_workers_and_replicas")
        _fit(config, trainer, start_up, partial(_last_word, run_dir, terminal))
        if config.ray_kwargs.get("timeline_json_file"):
            ray.timeline(filename=config.ray_kwargs.timeline_json_file)
    finally:
        tq.close()
        ray.shutdown()
    if isinstance(trainer, SeamlessTrainer):
        _close(run_dir, reporter, start_up, trainer)
    else:
        reporter.say(
            f"verl's trainer mode {config.trainer.v1.trainer_mode} has ended; its output: {run_dir / 'logs' / _LOG}"
        )


def _name_logger_file(run_dir: Path) -> None:
    """For trainer.logger=[file]: verl's own place is one for all, and each life and point of a sweep would empty it."""
    if not os.environ.keys() & {"VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"}:
        files = (run_dir / f"logger-{number}.jsonl" for number in itertools.count(1))
        os.environ["VERL_FILE_LOGGER_PATH"] = str(next(file for file in files if not file.exists()))


def _load_config(run_dir: Path) -> Any:
    """The run's configuration, checked as verl's entry point checks it."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device
    from verl.utils.logging_utils import configure_verl_logging

    config: Any = OmegaConf.load(run_dir / "config.yaml")
    OmegaConf.set_struct(config, True)
    configure_verl_logging()
    auto_set_device(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return config


def _fit(config: Any, trainer: Any, start_up: StartUp, last_word: Callable[[str], None]) -> None:
    """Start the rollout workers, train, and end them.

    Raises:
        RunBroken: an actor of the run died; the error that followed from that is its cause.
    """
    from seamless_verl.verl_adapter.dataloader.replaced_workers import ReplacingManager
    from seamless_verl.verl_adapter.slices.deaths import Watchdog
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    with (
        _tracking_finished(trainer),
        _agent_loops(config, trainer) as manager,
        Watchdog(_actors(trainer, manager), _servers(trainer), last_word) as watchdog,
    ):
        start_up.lap("start_agent_loops")
        if isinstance(trainer, SeamlessTrainer):
            trainer.flight.blame = watchdog.cause_of
            trainer.before_checkpoint = watchdog.confirm
            if isinstance(manager, ReplacingManager):
                manager.say = trainer.reporter.say
                manager.note_death = trainer.flight.worker_died
        try:
            trainer.fit(manager)
        except BaseException as error:
            story = watchdog.cause_of(error)
            if story is None:
                raise
            raise RunBroken(story) from error


@contextmanager
def _tracking_finished(trainer: Any) -> Iterator[None]:
    """As verl's task runner: wandb and its like are told whether the run succeeded, and write what they hold."""
    code = 1
    try:
        yield
        code = 0
    finally:
        tracking = getattr(trainer, "logger", None)  # made in `fit`
        if tracking is not None:
            tracking.finish(exit_code=code)


@contextmanager
def _agent_loops(config: Any, trainer: Any) -> Iterator[Any]:
    """As verl's entry point makes them; their workers are closed however the body ends."""
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.utils.import_utils import load_class_from_fqn

    name = config.actor_rollout_ref.rollout.get("agent", {}).get("agent_loop_manager_class")
    manager_cls: Any = load_class_from_fqn(name, "AgentLoopManager") if name else AgentLoopManagerTQ
    manager = manager_cls.create(
        config=config,
        llm_client=trainer.get_llm_client(),
        teacher_client=trainer.get_teacher_client(),
        reward_loop_worker_handles=trainer.get_reward_handles(),
    )
    try:
        yield manager
    finally:
        _close_workers(getattr(manager, "agent_loop_workers", []))


def _close_workers(workers: Sequence[Any]) -> None:
    """Let rollout workers end their agents, with processes and containers; Ray would only kill the workers."""
    import ray
    from ray.exceptions import RayError

    problems = {}
    try:
        # A manager of the user's may have workers that know nothing of this.
        calls = {w.close.remote(): f"rollout worker {rank}" for rank, w in enumerate(workers) if hasattr(w, "close")}
        ended = ray.wait(list(calls), num_returns=len(calls), timeout=_CLOSE_S)[0] if calls else []
        problems = {calls[call]: f"no answer within {_CLOSE_S:.0f} s" for call in calls.keys() - set(ended)}
        for call in ended:
            try:
                ray.get(call)
            except RayError as error:
                problems[calls[call]] = f"{type(error).__name__}: {_first_lines(error, most=1)}"
    except RayError as error:  # the cluster itself is gone; what ended the run is what people should read
        problems["Ray"] = f"{type(error).__name__}: {_first_lines(error, most=1)}"
    if problems:
        story = "; ".join(f"{name}: {problem}" for name, problem in sorted(problems.items()))
        _log.warning("agents may be left, not all rollout workers could be closed (%s)", story)


def _actors(trainer: Any, manager: Any) -> dict[str, Any]:
    """Actors whose death ends the run, servers left out; by the names that people know them by."""
    from seamless_verl.verl_adapter.dataloader.replaced_workers import ReplacingManager

    servers = trainer.standalone_server_manager if hasattr(trainer, "standalone_server_manager") else None
    named = {f"trainer worker {rank}": worker for rank, worker in enumerate(trainer.actor_rollout_wg.workers)}
    if not (
        isinstance(manager, ReplacingManager) and getattr(getattr(trainer, "rows", None), "outlives_workers", False)
    ):
        workers = getattr(manager, "agent_loop_workers", [])
        named |= {f"rollout worker {rank}": worker for rank, worker in enumerate(workers)}
    named |= {f"reward worker {rank}": worker for rank, worker in enumerate(trainer.get_reward_handles() or [])}
    named |= _transfer_queue()
    if servers is not None:
        if not getattr(trainer, "outlives_replicas", False):
            for replica in servers.get_replicas():
                named |= {
                    f"weights' worker {rank} of rollout replica {replica.replica_rank}": worker
                    for rank, worker in enumerate(replica.workers)
                }
        named["load balancer"] = servers.global_load_balancer
    return named


def _transfer_queue() -> dict[str, Any]:
    """TransferQueue's actors; calls to a dead one get no answer, and no error."""
    import ray

    entries = ray.util.list_named_actors(all_namespaces=True)
    found = [(entry["name"], entry["namespace"]) for entry in entries if entry["name"].startswith("TransferQueue")]
    return {name: ray.get_actor(name, namespace=namespace) for name, namespace in sorted(found)}


def _check_alone() -> None:
    """TransferQueue joins a controller that it finds, and all runs call their partitions train and val.

    Raises:
        MachineError: another run's controller is there; it and this run would train, clear and end each other's.
    """
    import ray

    from seamless_verl.verl_adapter.trainer.adoption import another_run

    until = time.monotonic() + _DYING_S
    controller = {"name": "TransferQueueController", "namespace": "transfer_queue"}
    while controller in ray.util.list_named_actors(all_namespaces=True):
        if time.monotonic() > until:
            raise another_run()
        time.sleep(0.2)


def _servers(trainer: Any) -> dict[str, Any]:
    """Servers whose death ends the run: none where a scheduler decides, which goes on without a replica."""
    if getattr(trainer, "outlives_replicas", False):
        return {}
    managers = [getattr(trainer, name, None) for name in ("llm_server_manager", "standalone_server_manager")]
    replicas = [replica for manager in managers if manager is not None for replica in manager.get_replicas()]
    named = {}
    for replica in replicas:
        for rank, server in enumerate(replica.servers):
            node = f", node {rank}" if len(replica.servers) > 1 else ""
            named[f"rollout replica {replica.replica_rank}{node}"] = server
    return named


def _start_ray(config: Any, environment: dict[str, Any]) -> None:
    import ray
    from omegaconf import OmegaConf

    settings: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init") or OmegaConf.create(), resolve=True)
    own = {key: value for key, value in (settings.pop("runtime_env", None) or {}).items() if value is not None}
    environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    if INTERPRETER in os.environ:
        environment["py_executable"] = shlex.quote(os.environ[INTERPRETER])
    # Workers of a cluster that was there before do not inherit the mark by which the supervisor ends what is left, how
    # long a transfer of weights may wait, nor what our plug-in reads.
    names = [name for name in os.environ if name in (*MARKS, ANY_VERL) or name.startswith("SEAMLESS_TRANSFER_")]
    passed_on = {name: os.environ[name] for name in names}
    merged: Any = OmegaConf.to_container(OmegaConf.merge({"env_vars": passed_on}, environment, own))
    os.environ.update(merged.get("env_vars", {}))  # this process is the trainer: it runs under the workers' settings
    if cluster_address(settings.get("address")) is None:
        settings.setdefault("_temp_dir", os.environ.get("SEAMLESS_RAY_DIR"))  # where the supervisor looks for logs
    ray.init(**settings, runtime_env=merged)
    signal.signal(signal.SIGTERM, _interrupt)  # Ray sets its own, which ends without a word


def _close(run_dir: Path, reporter: Any, start_up: StartUp, trainer: Any) -> None:
    from seamless_verl.observe.reporter import STEPS, VALIDATION, closing_lines, file_lines, read_records
    from seamless_verl.observe.summary import summarize

    steps, settings, began = read_records(run_dir / STEPS), trainer.config.trainer, trainer.first_step_at
    summary = summarize(
        steps,
        read_records(run_dir / VALIDATION),
        wall_s=round(time.time() - float(os.environ.get("SEAMLESS_COMMAND_AT", start_up.started_at)), 2),
        time_to_first_step_s=began and round(began - start_up.started_at, 2),
        start_up_s=start_up.parts,
    )
    temporary = run_dir / "summary.json.part"
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    temporary.replace(run_dir / "summary.json")
    kept = settings.default_local_dir if have_one(Path(settings.default_local_dir)) else None
    files = file_lines(run_dir, settings.rollout_data_dir, kept, steps)
    for line in (*closing_lines(summary, trainer.seamless.notes), *files):
        reporter.say(line)


def _redirect_output(log: Path) -> TextIO:
    """Send stdout and stderr of this process and its children to a file; return the terminal."""
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    return terminal


def _interrupt(number: int, _: object) -> None:
    """End the run once: Slurm's SIGTERM beside the supervisor's SIGINT, in either order, leaves the clean-up in peace.

    SIGINT stays what it is after another SIGINT: the watchdog repeats it until it is heard. A user who cannot wait
    sends SIGKILL (the supervisor does, at the second Ctrl-C). Not SIG_IGN, which processes started now would inherit.
    """
    for late in {signal.SIGTERM} if number == signal.SIGINT else {signal.SIGTERM, signal.SIGINT}:
        signal.signal(late, lambda *_: None)
    raise KeyboardInterrupt


def _told(error: Exception) -> str:
    """An error of ours says all in its message, also where it was raised in a process of Ray's."""
    cause = getattr(error, "cause", error)  # a `RayTaskError` has one
    if isinstance(cause, SeamlessError):
        return f"{type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {_first_lines(error)}"


def _first_lines(error: Exception, most: int = 12) -> str:
    """The end of a remote traceback is what tells; Ray puts it last. Its frames are in the log."""
    lines = str(error).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = next((n for n in range(frames[-1], len(lines)) if not lines[n].startswith(" ")), 0) if frames else 0
    return "\n".join(lines[after:][-most:])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""``python -m seamless_verl.main [verl's overrides] +recipe=NAME``: compose, check, build assets, train.

The composition root of the user's process. It stays light: verl, torch and Ray are imported by the trainer's process
(`seamless_verl.verl_adapter.job`), which it starts and cleans up after (`seamless_verl.run.supervisor`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.checked import asked_devices
from seamless_verl.config import TRAINER_MODE, SeamlessConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.machine import Machine, check_whole, survey, told_of_journal
from seamless_verl.observe.recording import FLIGHT
from seamless_verl.observe.reporter import STEPS, read_records
from seamless_verl.observe.run_folder import SUMMARY
from seamless_verl.run import capacity, check_combinations, check_machine, checkpoints, compose, preflight
from seamless_verl.run.environment import IMPORTED, cpu_environment, trainer_environment
from seamless_verl.run.recipe_assets import find_or_build, plain
from seamless_verl.run.restarts import End, Restarts, obstacle, visible
from seamless_verl.run.supervisor import run_trainer
from seamless_verl.scheduling.declaration import verl_keys, with_policy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 success, 1 the run failed, 2 bad input, 128 + n ended by signal n."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    started = psutil.Process().create_time()  # the imports above are part of the user's wait
    runs = Path(os.environ.get("SEAMLESS_RUNS", "runs"))
    command = None
    try:
        check_whole()
        check_machine.check_verl()
        machine = survey(runs.absolute())
        platform = check_machine.platform_of(machine, arguments)
        hydra_arguments = compose.hydra_arguments(arguments, platform=platform, runs=runs, now=started, pid=os.getpid())
        command = _Command(machine, started)
        command.run(hydra_arguments)
    except (SeamlessError, HydraException, OmegaConfBaseException) as error:
        keys = compose.known_keys() if isinstance(error, HydraException) else []
        _say(f"error: {compose.explain(error, keys)}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        was_begun = command is not None and command.codes
        _say("interrupted" if was_begun else "interrupted before anything was started", sys.stderr)
        return 130
    return next((code for code in command.codes if code), 0)


@dataclass(slots=True)
class _Command:
    """What the user asked for: one run, or the points of a sweep, one after the other.

    Attributes:
        started: the command, and of a sweep's later points each; seconds since the epoch.
        codes: exit codes of the points that ended.
        interrupts: signals that the user sent; no further point begins after one.
        is_composed: Hydra found the configuration.
    """

    machine: Machine
    started: float
    codes: list[int] = field(default_factory=list)
    interrupts: list[int] = field(default_factory=list)
    is_composed: bool = False

    def run(self, arguments: Sequence[str]) -> None:
        """Let Hydra compose each point and run it."""
        os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints the error in its own words and exits
        compose.register_ours()
        used: set[Path] = set()

        def task(config: DictConfig) -> None:
            self._point(config, used)

        before, sys.argv = sys.argv, ["seamless_verl", *arguments]
        try:
            hydra.main(config_path=str(compose.verl_config_dir()), config_name="ppo_trainer", version_base=None)(task)()
        except OSError as error:
            if self.is_composed or isinstance(error, HydraException):  # Hydra's "not found" is an OSError as well
                raise
            raise compose.folder_refused(arguments, error) from error
        finally:
            sys.argv = before

    def _point(self, config: DictConfig, used: set[Path]) -> None:
        """``used``: folders for checkpoints of the points before."""
        self.is_composed = True
        compose.check_launcher(HydraConfig.get().runtime.choices)
        if self.interrupts:  # the user has ended the sweep, not just one point of it
            return
        if self.codes:
            self.started = time.time()
        # Caught here, or Hydra adds a line of its own and a sweep loses the points that follow.
        try:
            warning = checkpoints.check_own(config.trainer, used, Path(HydraConfig.get().runtime.output_dir))
            if warning and HydraConfig.get().mode == RunMode.MULTIRUN:
                _say(f"warning: {warning}")
            self.codes.append(0 if _has_ended_before() else self._run_point(config))
        except (SeamlessError, OmegaConfBaseException) as error:
            _say(f"error: {error}", sys.stderr)
            self.codes.append(2)

    def _run_point(self, config: DictConfig) -> int:
        """Its exit code."""
        hydra_runtime = HydraConfig.get().runtime
        sources = [(source.provider, source.schema, source.path) for source in hydra_runtime.config_sources]
        compose.check_hidden(hydra_runtime.choices, sources)
        compose.check_packages(config, hydra_runtime.choices)
        asked_devices(config)  # first: a recipe's slices are written in these numbers
        section = OmegaConf.to_container(config.seamless, resolve=True)
        seamless = SeamlessConfig.from_mapping(section)  # type: ignore[arg-type]
        if config.trainer.v1.trainer_mode == TRAINER_MODE:
            seamless = with_policy(seamless, config)
            config.seamless.scheduler.policy = seamless.scheduler.policy
        run_dir = Path(hydra_runtime.output_dir).absolute()
        if seamless.run_dir and Path(seamless.run_dir).absolute() != run_dir:
            fix = f"leave it out, and write hydra.run.dir={compose.quoted(seamless.run_dir)}"
            raise ConfigError("seamless.run_dir", seamless.run_dir, "is filled in: it is Hydra's folder", fix)
        with compose.claimed(run_dir, _say):
            return self._run_in(run_dir, config, seamless)

    def _run_in(self, run_dir: Path, config: DictConfig, seamless: SeamlessConfig) -> int:
        machine = replace(self.machine, disk_free=shutil.disk_usage(run_dir).free)  # another disk than runs/, perhaps
        if config.trainer.v1.trainer_mode == TRAINER_MODE:
            _write_resources(config, seamless)
        for line in _checked(config, seamless, machine, run_dir):
            _say(line)
        for warning in find_or_build(config, seamless):
            _say(f"warning: {warning}")
        compose.make_absolute(config)
        OmegaConf.save(config, run_dir / "config.yaml", resolve=True)
        folder = Path(config.trainer.default_local_dir)
        checkpoints.mend_tracker(folder)
        resumed = config.trainer.resume_mode == "auto" and checkpoints.have_one(folder)
        origin = "" if folder.is_relative_to(run_dir) else f" from {folder}"
        (run_dir / SUMMARY).unlink(missing_ok=True)  # of an earlier run here; it would no longer be true
        _say(f"continuing {run_dir}{origin}" if resumed else f"run folder: {run_dir}")
        with _pages(run_dir) if seamless.watch else nullcontext():
            try:
                code = self._run_with_restarts(config, seamless, run_dir)
            except KeyboardInterrupt:  # between two lives, when nothing runs
                self.interrupts.append(signal.SIGINT)
                code = 128 + signal.SIGINT
        if code:
            _explain_end(code, run_dir, config.trainer, is_interrupted=bool(self.interrupts))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            _say(f"sweep point {HydraConfig.get().job.num} ended with exit code {code}")
        return code

    def _run_with_restarts(self, config: DictConfig, seamless: SeamlessConfig, run_dir: Path) -> int:
        """Run the trainer, again from its last checkpoint where that is worth it; return the last life's exit code."""
        trainer, restarts = config.trainer, Restarts(seamless.supervise.restarts)
        imported = IMPORTED if trainer.device == "cpu" else ()
        environment = self._environment(config, seamless, run_dir)
        while True:
            code = run_trainer(run_dir, uuid.uuid4().hex[:12], environment, imported, self.interrupts)
            has_checkpoint, hindered = _left_to_continue(trainer)
            steps = read_records(run_dir / STEPS)
            step = steps[-1]["step"] if steps else (0 if trainer.v1.trainer_mode == TRAINER_MODE else None)
            verdict = restarts.after(End(code=code, at=time.monotonic(), step=step, obstacle=hindered))
            if not verdict.restart:
                if verdict.reason:
                    _say(verdict.reason, sys.stderr)
                return visible(code)
            _say(f"{verdict.reason}, from {'the last checkpoint' if has_checkpoint else 'the beginning'}", sys.stderr)
            environment["SEAMLESS_STARTED_AT"] = repr(time.time())  # of this life; the command's start stays

    def _environment(self, config: DictConfig, seamless: SeamlessConfig, run_dir: Path) -> dict[str, str | None]:
        """Of the trainer's process."""
        times = dict.fromkeys(("SEAMLESS_COMMAND_AT", "SEAMLESS_STARTED_AT"), repr(self.started))
        environment: dict[str, str | None] = {**times, **trainer_environment(plain(config))}
        if (cluster := _cluster(config)) is not None:
            environment[check_machine.VARIABLE] = cluster
        if config.trainer.device == "cpu":
            cores, memory = self.machine.cores, run_dir / "memory.jsonl"
            environment.update(cpu_environment(plain(config), seamless.resources, cores, memory))
        return environment


@contextmanager
def _pages(run_dir: Path) -> Iterator[None]:
    """Serves pages of the run from a process of its own, which prints their address and ends with this one."""
    command = [sys.executable, "-m", "seamless_verl.cli", "watch", str(run_dir), "--of-run"]
    pages = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is for the run
    try:
        yield
    finally:
        pages.terminate()
        pages.wait()


def _write_resources(config: DictConfig, seamless: SeamlessConfig) -> None:
    """Into verl's own keys."""
    check_combinations.check_resources(plain(config), seamless)
    for key, value in verl_keys(seamless.resources).items():
        OmegaConf.update(config, key, value)


def _checked(config: DictConfig, seamless: SeamlessConfig, machine: Machine, run_dir: Path) -> Iterator[str]:
    """Lines that say what will be done; refuses what cannot work."""
    mode, device, values = config.trainer.v1.trainer_mode, config.trainer.device, plain(config)
    unused = check_combinations.unused_by_verls_trainer(values, seamless)
    if mode != TRAINER_MODE:
        ignored = f"; it does not read {', '.join(unused)}" if unused else ""
        yield f"trainer: verl's own {mode} (leave trainer.v1.trainer_mode out for ours){ignored}"
    if device == "cpu":
        yield f"platform: CPU (no accelerator is used; {machine.cores} cores): real Ray, vLLM and FSDP2, small and slow"
    else:
        yield f"platform: {device}, {machine.accelerators} accelerators on this machine"
    if (cluster := _cluster(config)) is not None:
        yield f"joining the Ray cluster at {cluster}"
    for warning in preflight.check_settings(values, seamless, machine):
        yield f"warning: {warning}"
    journals = seamless.agent.runner is not None and seamless.proxy.journal
    told = [check_combinations.told_of_layout(values, seamless)] if mode == TRAINER_MODE else []
    told.append(told_of_journal(seamless.proxy.journal_dir, run_dir) if journals else "")
    yield from filter(None, [*told, capacity.told_of_cap(values, seamless)])
    chosen = HydraConfig.get().runtime.choices.get("platform")
    check_machine.check_platform(chosen, device, check_machine.installed_vllm())


def _cluster(config: DictConfig) -> str | None:
    return check_machine.cluster_address(OmegaConf.select(config, check_machine.ADDRESS))


def _has_ended_before() -> bool:
    """Whether this point of a sweep has, in an earlier command with the same folder; says so."""
    hydras = HydraConfig.get()
    file = Path(hydras.runtime.output_dir) / SUMMARY
    if ended := hydras.mode == RunMode.MULTIRUN and file.exists():
        left = f"is left as it is: {file.parent} (remove its {SUMMARY} to run it again)"
        _say(f"sweep point {hydras.job.num} has ended before and {left}")
    return ended


def _left_to_continue(trainer: DictConfig) -> tuple[bool, str]:
    """Whether there is a checkpoint, and why the same command would not go on with the run; empty: it would."""
    found = checkpoints.have_one(Path(trainer.default_local_dir))
    return found, obstacle(resume_mode=trainer.resume_mode, save_freq=trainer.save_freq, has_checkpoint=found)


def _explain_end(code: int, run_dir: Path, trainer: DictConfig, *, is_interrupted: bool) -> None:
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    key, value = ("hydra.sweep.dir", run_dir.parent) if multirun else ("hydra.run.dir", run_dir)
    folder = shlex.quote(f"{key}={compose.quoted(value)}")
    found, hindered = _left_to_continue(trainer)
    resume = f"to continue from the last checkpoint: the same command with {folder}"
    if hindered or not found:
        why = hindered or "there is no checkpoint yet"
        resume = f"the same command with {folder} starts {'this point ' * multirun}over: {why}"
    if code > 128:
        how = "interrupted" if is_interrupted else "ended"
        _say(f"{how} (signal {code - 128}); nothing is left running; {resume}", sys.stderr)
    else:
        _say(f"failed with exit code {code}; logs: {run_dir / 'logs'}; {resume}", sys.stderr)
        if full := checkpoints.told_of_full_disk(run_dir, folder):
            _say(full, sys.stderr)
    if (run_dir / FLIGHT).is_dir():
        _say(f"what it did until then: seamless-verl report {shlex.quote(str(run_dir))} --open", sys.stderr)


def _say(line: str, stream: Any = None) -> None:
    stream = stream or sys.stdout
    with suppress(OSError):  # the terminal is gone; the run is not
        stream.write(line + "\n")
        stream.flush()


if __name__ == "__main__":
    sys.exit(main())

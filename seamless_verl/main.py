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
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.machine import Machine, survey, told_of_journal
from seamless_verl.observe.recording import FLIGHT
from seamless_verl.observe.reporter import STEPS, read_records
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
    codes: list[int] = []
    interrupts: list[int] = []
    try:
        machine = survey(runs.absolute())
        platform = check_machine.platform_of(machine, arguments)
        hydra_arguments = compose.hydra_arguments(arguments, platform=platform, runs=runs, now=started, pid=os.getpid())
        _run_hydra(hydra_arguments, machine, started, codes, interrupts)
    except (SeamlessError, HydraException, OmegaConfBaseException) as error:
        keys = compose.known_keys() if isinstance(error, HydraException) else []
        _say(f"error: {compose.explain(error, keys)}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        _say("interrupted" if codes else "interrupted before anything was started", sys.stderr)
        return 130
    return next((code for code in codes if code), 0)


def _run_hydra(
    arguments: Sequence[str], machine: Machine, started: float, codes: list[int], interrupts: list[int]
) -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints the error in its own words and exits

    compose.register_ours()
    points: list[int] = []
    used: set[Path] = set()

    def task(config: DictConfig) -> None:
        points.append(len(points))
        compose.check_launcher(HydraConfig.get().runtime.choices)
        if interrupts:  # the user has ended the sweep, not just one point of it
            return
        # Caught here, or Hydra adds a line of its own and a sweep loses the points that follow.
        try:
            checkpoints.check_own(config.trainer, used)
            codes.append(_run_one(config, machine, started if not codes else time.time(), interrupts))
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


def _run_one(config: DictConfig, machine: Machine, started: float, interrupts: list[int]) -> int:
    hydra_runtime = HydraConfig.get().runtime
    sources = [(source.provider, source.path) for source in hydra_runtime.config_sources]
    compose.check_hidden(hydra_runtime.choices, sources)
    check_machine.asked_devices(config)  # first: a recipe's slices are written in these numbers
    section = OmegaConf.to_container(config.seamless, resolve=True)
    seamless = SeamlessConfig.from_mapping(section)  # type: ignore[arg-type]
    if config.trainer.v1.trainer_mode == "seamless":
        seamless = with_policy(seamless, config)
        config.seamless.scheduler.policy = seamless.scheduler.policy
    run_dir = Path(hydra_runtime.output_dir).absolute()
    if seamless.run_dir and Path(seamless.run_dir).absolute() != run_dir:
        fix = f"leave it out, and write hydra.run.dir={compose.quoted(seamless.run_dir)}"
        raise ConfigError("seamless.run_dir", seamless.run_dir, "is filled in: it is Hydra's folder", fix)
    with compose.claimed(run_dir, _say):
        return _run_in(run_dir, config, seamless, machine, started, interrupts)


def _run_in(
    run_dir: Path,
    config: DictConfig,
    seamless: SeamlessConfig,
    machine: Machine,
    started: float,
    interrupts: list[int],
) -> int:
    machine = replace(machine, disk_free=shutil.disk_usage(run_dir).free)  # it may be on another disk than runs/
    _check(config, seamless, machine, run_dir)
    for warning in find_or_build(config, seamless):
        _say(f"warning: {warning}")
    compose.make_absolute(config)
    OmegaConf.save(config, run_dir / "config.yaml", resolve=True)
    folder = Path(config.trainer.default_local_dir)
    checkpoints.mend_tracker(folder)
    resumed = config.trainer.resume_mode == "auto" and checkpoints.have_one(folder)
    origin = "" if folder.is_relative_to(run_dir) else f" from {folder}"
    (run_dir / "summary.json").unlink(missing_ok=True)  # of an earlier run in this folder; it would no longer be true
    _say(f"continuing {run_dir}{origin}" if resumed else f"run folder: {run_dir}")
    times = dict.fromkeys(("SEAMLESS_COMMAND_AT", "SEAMLESS_STARTED_AT"), repr(started))
    environment: dict[str, str | None] = {**times, **trainer_environment(plain(config))}
    on_cpu = config.trainer.device == "cpu"
    if (cluster := _cluster(config)) is not None:
        environment[check_machine.VARIABLE] = cluster
    if on_cpu:
        environment.update(cpu_environment(plain(config), seamless.resources, machine.cores, run_dir / "memory.jsonl"))
    with _pages(run_dir) if seamless.watch else nullcontext():
        imported = IMPORTED if on_cpu else ()
        try:
            code = _run_with_restarts(config, seamless.supervise.restarts, run_dir, environment, imported, interrupts)
        except KeyboardInterrupt:  # between two lives, when nothing runs
            interrupts.append(signal.SIGINT)
            code = 128 + signal.SIGINT
    if code:
        _explain_end(code, run_dir, is_interrupted=bool(interrupts))
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        _say(f"sweep point {HydraConfig.get().job.num} ended with exit code {code}")
    return code


def _run_with_restarts(
    config: DictConfig,
    most: int,
    run_dir: Path,
    environment: dict[str, str | None],
    imported: Sequence[str],
    interrupts: list[int],
) -> int:
    """Run the trainer, again from its last checkpoint where that is worth it; return the last life's exit code."""
    trainer, restarts = config.trainer, Restarts(most)
    while True:
        code = run_trainer(run_dir, uuid.uuid4().hex[:12], environment, imported, interrupts)
        has_checkpoint = checkpoints.have_one(Path(trainer.default_local_dir))
        hindered = obstacle(resume_mode=trainer.resume_mode, save_freq=trainer.save_freq, has_checkpoint=has_checkpoint)
        steps = read_records(run_dir / STEPS)
        step = steps[-1]["step"] if steps else (0 if trainer.v1.trainer_mode == "seamless" else None)
        verdict = restarts.after(End(code=code, at=time.monotonic(), step=step, obstacle=hindered))
        if not verdict.restart:
            if verdict.reason:
                _say(verdict.reason, sys.stderr)
            return visible(code)
        _say(f"{verdict.reason}, from {'the last checkpoint' if has_checkpoint else 'the beginning'}", sys.stderr)
        environment["SEAMLESS_STARTED_AT"] = repr(time.time())  # of this life; the command's start stays


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


def _check(config: DictConfig, seamless: SeamlessConfig, machine: Machine, run_dir: Path) -> None:
    """Refuse what cannot work, and say what will be done; writes declared resources into verl's keys."""
    mode, device = config.trainer.v1.trainer_mode, config.trainer.device
    if mode == "seamless":
        check_combinations.check_resources(plain(config), seamless)
        for key, value in verl_keys(seamless.resources).items():
            OmegaConf.update(config, key, value)
    values = plain(config)
    unused = check_combinations.unused_by_verls_trainer(values, seamless)
    if mode != "seamless":
        ignored = f"; it does not read {', '.join(unused)}" if unused else ""
        _say(f"trainer: verl's own {mode} (leave trainer.v1.trainer_mode out for ours){ignored}")
    if device == "cpu":
        _say(f"platform: CPU (no accelerator is used; {machine.cores} cores): real Ray, vLLM and FSDP2, small and slow")
    else:
        _say(f"platform: {device}, {machine.accelerators} accelerators on this machine")
    if (cluster := _cluster(config)) is not None:
        _say(f"joining the Ray cluster at {cluster}")
    for warning in preflight.check_settings(values, seamless, machine):
        _say(f"warning: {warning}")
    journals = seamless.agent.runner is not None and seamless.proxy.journal
    told = [check_combinations.told_of_layout(values, seamless)] if mode == "seamless" else []
    told.append(told_of_journal(seamless.proxy.journal_dir, run_dir) if journals else "")
    for line in filter(None, [*told, capacity.told_of_cap(values, seamless)]):
        _say(line)
    chosen = HydraConfig.get().runtime.choices.get("platform")
    check_machine.check_platform(chosen, device, check_machine.installed_vllm())


def _cluster(config: DictConfig) -> str | None:
    return check_machine.cluster_address(OmegaConf.select(config, check_machine.ADDRESS))


def _explain_end(code: int, run_dir: Path, *, is_interrupted: bool) -> None:
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    key, value = ("hydra.sweep.dir", run_dir.parent) if multirun else ("hydra.run.dir", run_dir)
    folder = shlex.quote(f"{key}={compose.quoted(value)}")
    resume = f"to continue from the last checkpoint: the same command with {folder}"
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

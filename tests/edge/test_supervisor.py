"""The sweep finds a run's processes whatever they did to their names and environments."""

import contextlib
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import psutil
import pytest

from seamless_verl.machine import APART, HOSTS_IPC
from seamless_verl.recipes.swe.real import child
from seamless_verl.run import supervisor
from seamless_verl.run.supervisor import (
    GRACE,
    JOURNALS,
    RUN_ID,
    _apart,
    _collect_logs,
    _remove_shared_memory,
    sweep,
    sweep_node,
)

# Prints its pid and waits for ever.
NAMELESS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
# A parent that is gone at once: its child is inherited by the nearest subreaper.
ORPHAN = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {NAMELESS!r}], env={{}}, start_new_session=True)
"""


def test_an_orphan_without_the_mark_ends_and_a_spared_child_stays():
    program = f"""
        import subprocess, sys
        import psutil
        from seamless_verl.agents import ties
        from seamless_verl.run import supervisor

        ties.adopt_orphans()
        spared = subprocess.Popen([sys.executable, "-c", {NAMELESS!r}], stdout=subprocess.PIPE)
        spared.stdout.readline()
        before = frozenset(psutil.Process().children())
        parent = subprocess.Popen([sys.executable, "-c", {ORPHAN!r}], stdout=subprocess.PIPE)
        orphan = int(parent.stdout.readline())
        parent.wait()
        assert psutil.Process(orphan).ppid() == psutil.Process().pid
        supervisor.sweep("a-run", before)
        print("orphan", psutil.pid_exists(orphan), "spared", spared.poll() is None)
        spared.kill()
        spared.wait()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "orphan False spared True\n", ended.stderr


def test_a_process_that_renamed_itself_still_carries_the_mark():
    """Ray's and vLLM's way of renaming, under the environment that the supervisor gives to its processes."""
    program = "import os, setproctitle, signal; setproctitle.setproctitle('ray::Agent' + 4000 * ' x');" + NAMELESS
    env = {**os.environ, RUN_ID: "renamed", "SPT_NOENV": "1"}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert psutil.Process(process.pid).cmdline()[0].startswith("ray::Agent")
        sweep("renamed")
        alive = psutil.pid_exists(process.pid)
        process.kill()
    assert not alive


def test_what_is_started_is_out_of_reach_of_the_terminals_signals_and_shares_our_cores_as_one_of_us():
    program = "import os; print(os.getpgrp() == os.getpid(), os.getsid(0))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=partial(_apart, os.getpid()),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == ["True", str(os.getsid(0))]


# Tells when it is asked to end, and does not.
# Handlers write past the buffer: the signal may come while the line before is still being printed.
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_a_process_that_nothing_ends_is_named_and_left_at_the_limit(monkeypatch):
    """As one in uninterruptible sleep on a dead disk: no signal does anything."""
    monkeypatch.setattr(psutil.Process, "send_signal", lambda process, number: None)
    env = {**os.environ, RUN_ID: "undead"}
    with subprocess.Popen([sys.executable, "-c", STUBBORN], env=env, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            swept = sweep("undead", patience_s=0.1, limit_s=0.5)
        finally:
            process.kill()
    assert [survivor.pid for survivor in swept.survivors] == [process.pid]


def test_a_process_that_asks_for_more_time_cleans_up_while_others_end_by_force():
    cleaning = """
import os, signal, sys
def clean(*_):
    os.write(1, b"cleaning\\n")
    sys.stdin.readline()
    os.write(1, b"clean\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, clean)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
    env = {**os.environ, RUN_ID: "graceful"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", cleaning], env={**env, GRACE: "1000"}, **pipes) as slow,
        subprocess.Popen([sys.executable, "-c", STUBBORN], env=env, **pipes) as stubborn,
    ):
        slow.stdout.readline()
        stubborn.stdout.readline()
        swept = []
        sweeping = threading.Thread(target=lambda: swept.append(sweep("graceful", patience_s=0.3)))
        sweeping.start()
        assert stubborn.stdout.read() == "asked\n"  # to its end
        assert slow.stdout.readline() == "cleaning\n"
        slow.stdin.write("go on\n")
        slow.stdin.flush()
        assert slow.stdout.readline() == "clean\n"
        sweeping.join(30)
    assert [one.survivors for one in swept] == [()]


# A run whose trainer ends at once and leaves a process that no signal ends.
RUN = """
import sys
from pathlib import Path
import psutil
from seamless_verl.run import supervisor

def send_signal(process, number):
    print(int(number), flush=True)

psutil.Process.send_signal = send_signal
folder = Path(sys.argv[1])
(folder / "stubborn.py").write_text(sys.argv[2])
trainer = folder / "trainer"
trainer.write_text(f"#!/bin/sh\\n{sys.executable} {folder}/stubborn.py > {folder}/said 2>&1 &\\nexit 0\\n")
trainer.chmod(0o755)
supervisor.sys.executable = str(trainer)
supervisor._SWEEP_S = float(sys.argv[3])
supervisor._PATIENCE_S = float(sys.argv[4])
sys.exit(supervisor.run_trainer(folder, "a-run", {}, (), []))
"""


@pytest.fixture
def undead_run(tmp_path):
    started = []

    def start(limit_s, patience_s):
        command = [sys.executable, "-c", RUN, str(tmp_path), STUBBORN, str(limit_s), str(patience_s)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[0]

    yield start
    with started[0] as run:
        run.kill()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(tmp_path / "stubborn.py") in process.cmdline():
                process.kill()


def test_a_run_that_leaves_a_process_behind_names_it_cleans_up_and_fails(undead_run, tmp_path):
    run = undead_run(1.0, 0.1)
    _, said = run.communicate(timeout=60)
    (left,) = [line for line in said.splitlines() if "still run" in line]
    pid, name = left.partition(": ")[2].split()
    assert psutil.Process(int(pid)).name() == name
    assert "waiting up to 1 s for what does not end" in said
    assert run.returncode == 1


def test_a_run_gives_signs_of_life_to_other_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_SIGN_S", 0.0)
    owner = tmp_path / "pid"
    owner.touch()
    os.utime(owner, (1, 1))
    with subprocess.Popen(["sleep", "1.5"]) as trainer:
        assert supervisor._wait(trainer, [], owner, frozenset()) == 0
    assert owner.stat().st_mtime > 1


def test_orphans_that_ended_are_gone_while_the_trainer_runs_and_statuses_of_others_are_left_to_them(tmp_path):
    """The trainer goes on when a zombie of each kind was there and the orphan's is not any more."""
    goes_on = tmp_path / "goes on"
    os.mkfifo(goes_on)
    program = """
        import os, subprocess, sys, threading
        from pathlib import Path
        import psutil
        from seamless_verl.agents.ties import adopt_orphans
        from seamless_verl.run import supervisor

        adopt_orphans()
        owned = subprocess.Popen(["sh", "-c", "exit 7"])
        os.waitid(os.P_PID, owned.pid, os.WEXITED | os.WNOWAIT)
        spared = frozenset(psutil.Process().children())
        ends = "sh -c 'sh -c \\"exit 0\\" & echo $!'; read waits < \\"$0\\""
        trainer = subprocess.Popen(["sh", "-c", ends, sys.argv[1]], stdout=subprocess.PIPE)
        orphan = int(trainer.stdout.readline())

        def await_end():
            while psutil.pid_exists(orphan):
                threading.Event().wait(0.1)
            Path(sys.argv[1]).write_text("go on\\n")

        threading.Thread(target=await_end, daemon=True).start()
        print(supervisor._wait(trainer, [], Path(sys.argv[1] + ".pid"), spared), owned.wait())
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(goes_on)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "0 7\n", ended.stderr


def test_interrupts_during_the_sweep_turn_to_force_then_leave(undead_run, tmp_path):
    run = undead_run(10_000, 10_000)
    assert run.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == f"{int(signal.SIGKILL)}\n"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert "still run" in said
    assert run.returncode == 1


ENDED = """
import os, signal, sys
from pathlib import Path
from seamless_verl.run import supervisor

def sweep(*arguments, **named):
    os.kill(os.getpid(), signal.SIGINT)
    return swept(*arguments, **named)

swept, supervisor.sweep = supervisor.sweep, sweep
trainer = Path(sys.argv[1]) / "trainer"
trainer.write_text(f"#!/bin/sh\\n{sys.argv[2]}\\n")
trainer.chmod(0o755)
supervisor.sys.executable = str(trainer)
sys.exit(supervisor.run_trainer(Path(sys.argv[1]), "a-run", {}, (), []))
"""


@pytest.mark.parametrize(("end", "code"), [("exit 75", 130), ("exit 1", 130), ("kill -9 $$", 130), ("exit 0", 0)])
def test_ctrl_c_while_a_dead_trainer_is_swept_up_after_starts_nothing_again(tmp_path, end, code):
    done = subprocess.run([sys.executable, "-c", ENDED, str(tmp_path), end], timeout=60)
    assert done.returncode == code


def test_the_journals_of_a_killed_trainer_go_from_where_the_user_wants_them(tmp_path):
    scratch = tmp_path / "scratch"
    for run in ("a-run", "another"):
        (scratch / f"{APART}{run}" / "agent_loop_worker_0").mkdir(parents=True)
    program = ENDED.replace("{}, ()", f"{{{JOURNALS!r}: {str(scratch)!r}}}, ()")
    subprocess.run([sys.executable, "-c", program, str(tmp_path), "kill -9 $$"], timeout=60)
    assert [folder.name for folder in scratch.iterdir()] == [f"{APART}another"]


@pytest.mark.parametrize("given", ["", "1"])
def test_rays_hook_for_uv_run_is_off_in_what_imports_ray_before_verl_unless_the_user_wants_it(tmp_path, given):
    hook = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    told = tmp_path / "told"
    program = ENDED.replace("{}, ()", "{'RAY_ADDRESS': 'nowhere:1'}, ()")
    environment = {name: value for name, value in os.environ.items() if name != hook} | ({hook: given} if given else {})
    command = [sys.executable, "-c", program, str(tmp_path), f'echo "${hook}" >> {told}']
    subprocess.run(command, timeout=60, env=environment)
    assert told.read_text().splitlines() == 2 * [given or "0"], "the trainer and the sweep of other nodes"


WAITING = """
import sys
from pathlib import Path
from seamless_verl.run import supervisor

trainer = Path(sys.argv[1]) / "trainer"
trainer.write_text(f"#!/bin/sh\\ntrap 'echo asked; exit' TERM\\necho begun\\nread waits < {sys.argv[2]}\\n")
trainer.chmod(0o755)
supervisor.sys.executable = str(trainer)
sys.exit(supervisor.run_trainer(Path(sys.argv[1]), "a-run", {}, (), []))
"""


def test_a_killed_supervisor_takes_its_trainer_along(tmp_path):
    never = tmp_path / "never"
    os.mkfifo(never)
    command = [sys.executable, "-c", WAITING, str(tmp_path), str(never)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as run:
        assert run.stdout.readline() == "begun\n"
        run.kill()
        assert run.stdout.read() == "asked\n", "to the end of what both of them held open"


@pytest.mark.parametrize(("action", "code"), [(signal.SIG_IGN, 0), (signal.SIG_DFL, 128 + signal.SIGHUP)])
def test_a_closed_terminal_ends_a_run_but_not_under_nohup(tmp_path, action, code):
    ends = tmp_path / "ends"
    os.mkfifo(ends)
    command = [sys.executable, "-c", WAITING, str(tmp_path), str(ends)]
    nohup = partial(signal.signal, signal.SIGHUP, action)
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=nohup) as run,
        ends.open("r+b", 0) as end,
    ):
        assert run.stdout.readline() == "begun\n"
        run.send_signal(signal.SIGHUP)
        if action is signal.SIG_IGN:
            end.write(b"the trainer has done its work\n")
        assert run.wait(60) == code


EARLY = """
import os, signal, sys
from pathlib import Path
from seamless_verl.run import supervisor

make = supervisor._short_folder

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    return make()

supervisor._short_folder = interrupted
trainer = Path(sys.argv[1]) / "trainer"
trainer.write_text(f"#!/bin/sh\\nread waits < {sys.argv[2]}\\n")
trainer.chmod(0o755)
supervisor.sys.executable = str(trainer)
sys.exit(supervisor.run_trainer(Path(sys.argv[1]), "a-run", {}, (), []))
"""


def test_an_interrupt_before_there_is_a_trainer_is_not_lost(tmp_path):
    never = tmp_path / "never"
    os.mkfifo(never)
    command = [sys.executable, "-c", EARLY, str(tmp_path), str(never)]
    assert subprocess.run(command, timeout=30, check=False).returncode == 128 + signal.SIGINT


def test_the_processes_of_a_real_swe_attempt_ask_the_sweep_for_the_time_that_their_sandbox_needs(tmp_path):
    attempt = child.Child(module="m", token="t", request=b"", timeout_s=1.0)
    assert float(child._environment(attempt, tmp_path)[GRACE]) == child.GRACE_S > 10.0


@pytest.fixture
def segments(alone_in_shared_memory):
    """Makes shared-memory files as NCCL calls them; what a test leaves goes."""
    made = []

    def make(name):
        made.append(Path("/dev/shm", f"nccl-{name}{uuid.uuid4().hex[:6]}"))
        made[-1].write_bytes(bytes(mmap.PAGESIZE))
        return made[-1]

    yield make
    for file in made:
        file.unlink(missing_ok=True)


HOLDER = """
import mmap, signal, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("held", flush=True)
signal.pause()
"""


def test_shared_memory_of_killed_nccl_ranks_goes_and_that_of_others_stays(segments):
    before = segments("before")
    made_at = before.stat().st_ctime
    while True:  # the file system's clock ticks in milliseconds
        left = segments("left")
        if left.stat().st_ctime > made_at:
            break
        left.unlink()
    used = segments("used")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(used)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        _remove_shared_memory(set(), left.stat().st_ctime)
        there = [file.exists() for file in (before, left, used)]
        holder.kill()
    assert there == [True, False, True]


@pytest.mark.parametrize("apart", [(), ("--ipc",)])
def test_who_does_not_see_all_that_share_its_memory_removes_only_what_its_own_had_in_use(segments, apart):
    """As in a container with --ipc=host, and in one with all of its own."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", *apart]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("unshare --pid is missing or not allowed here")
    if not apart and os.readlink("/proc/self/ns/ipc") != HOSTS_IPC:
        pytest.skip("this container has shared memory of its own")
    since = time.time() - 1.0
    used, found = segments("used"), segments("found")
    program = "import sys; from seamless_verl.run import supervisor as s; s._remove_shared_memory"
    program += f"({{sys.argv[1]}}, {since})"
    subprocess.run([*alone, sys.executable, "-c", program, str(used)], check=True)
    assert (used.exists(), found.exists()) == (False, not apart)


def test_semaphores_of_a_run_beside_this_one_stay_and_those_of_the_dead_go(alone_in_shared_memory):
    """A process that opens one by its name later, as spawned ones do, would else find none."""
    since = time.time() - 1.0
    held = multiprocessing.get_context("spawn").Lock()
    name = Path("/dev/shm", f"sem.{held._semlock.name.removeprefix('/')}")
    left = Path("/dev/shm", f"sem.mp-{uuid.uuid4().hex[:8]}")
    left.touch()
    try:
        _remove_shared_memory({str(name), str(left)}, since)
        assert (name.exists(), left.exists()) == (True, False)
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_node_without_a_supervisor_is_swept_by_the_mark(segments, monkeypatch, tmp_path, is_named):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere" if is_named else tmp_path))
    journal = tmp_path / f"{APART}far-run" / "worker_0" / "journal.sqlite"
    journal.parent.mkdir(parents=True)
    journal.touch()
    started = time.time() - 1.0
    segment = segments("far")
    env = {**os.environ, RUN_ID: "far-run"}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(segment)], env=env, stdout=subprocess.PIPE) as engine:
        engine.stdout.readline()
        assert sweep_node("far-run", started, str(tmp_path) if is_named else "") == ""
        assert not psutil.pid_exists(engine.pid)
    assert not segment.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_node_keeps_is_named(alone_in_shared_memory, monkeypatch):
    monkeypatch.setattr(psutil.Process, "send_signal", lambda process, number: None)
    monkeypatch.setattr("seamless_verl.run.supervisor._SWEEP_S", 0.5)
    env = {**os.environ, RUN_ID: "undead-far-run"}
    with subprocess.Popen([sys.executable, "-c", STUBBORN], env=env, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            story = f"could not be ended and still run: {process.pid} python"
            assert sweep_node("undead-far-run", time.time(), "") == story
        finally:
            process.kill()


def test_logs_for_which_there_is_no_room_do_not_keep_the_rest_from_being_cleaned_up(monkeypatch, tmp_path, capsys):
    log = tmp_path / "ray" / "session_2026" / "logs" / "raylet.out"
    log.parent.mkdir(parents=True)
    log.write_text("much")
    monkeypatch.setattr(shutil, "copyfile", lambda *paths: os.open("/dev/full/none", os.O_RDONLY))
    _collect_logs(tmp_path / "ray", tmp_path / "kept")
    assert "not all logs could be kept" in capsys.readouterr().err

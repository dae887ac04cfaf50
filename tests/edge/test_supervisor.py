"""The sweep finds a run's processes whatever they did to their names and environments."""

import os
import subprocess
import sys
import textwrap

import psutil

from seamless_verl.supervisor import RUN_ID, _apart, sweep

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
        from seamless_verl import supervisor

        supervisor._prctl(supervisor._PR_SET_CHILD_SUBREAPER, 1)
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
        [sys.executable, "-c", program], preexec_fn=_apart, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True", str(os.getsid(0))]

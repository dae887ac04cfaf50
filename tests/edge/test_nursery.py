"""Processes from the nursery behave like the interpreter's own: arguments, environment, files, signals, status."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from seamless_verl import nursery
from seamless_verl.run.environment import CPU_ENVIRONMENT, IMPORTED

STANDIN = Path(nursery.__path__[0]) / "standin.py"


@pytest.fixture
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("n")
    address, executable = folder / "nursery", folder / "python"
    executable.write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", str(STANDIN), str(address), sys.executable])} "$@"\n'
    )
    executable.chmod(0o755)
    return folder


@contextmanager
def nursery_of(home: Path, *imported: str, **settings):
    """Within, a nursery with these modules stands behind the stand-in, whose path this is."""
    command = [sys.executable, "-m", "seamless_verl.nursery.nursery_server", str(home / "nursery"), *imported]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **settings) as server:
        try:
            assert any(line.startswith("nursery: ready") for line in server.stderr)
            yield home / "python"
        finally:
            server.kill()


@pytest.fixture
def python(home):
    """The stand-in's path, with a nursery behind it that has `json` and `decimal` imported."""
    with nursery_of(home, "json", "decimal") as executable:
        yield executable


def run(python: Path, *arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=30, **settings)


@pytest.mark.parametrize("imported", [("ray", "declares_an_actor"), IMPORTED], ids=["small", "of a run"])
def test_no_two_processes_draw_the_same_ids_of_ray(home, imported):
    """Tasks that have the same id end an actor that runs both at once."""
    (home / "declares_an_actor.py").write_text("import ray\n\n\n@ray.remote\nclass Declared:\n    pass\n")
    settings = {name: value for name, value in CPU_ENVIRONMENT.items() if value is not None}
    environment = {
        **os.environ,
        **settings,
        "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]),
    }
    code = f"import sys; print({imported[-1]!r} in sys.modules); import ray; print(ray.ObjectRef.from_random())"
    with nursery_of(home, *imported, env=environment) as executable:
        drawn = {run(executable, "-c", code, env=environment).stdout for _ in range(3)}
    assert len(drawn) == 3
    assert all(lines.startswith("True\n") for lines in drawn)


def test_code_runs_with_its_arguments_environment_and_directory(python, tmp_path):
    code = "import json, os, sys; print(json.dumps([sys.argv, os.environ.get('MARK'), os.getcwd(), __name__]))"
    result = run(python, "-c", code, "one", "two words", cwd=tmp_path, env={"MARK": "x"})
    assert json.loads(result.stdout) == [["-c", "one", "two words"], "x", str(tmp_path), "__main__"]


def test_modules_are_imported_already_and_each_process_is_a_new_one(python):
    code = "import os, sys; print('decimal' in sys.modules, os.getpid())"
    one, two = (run(python, "-c", code).stdout.split() for _ in range(2))
    assert one[0] == two[0] == "True"
    assert one[1] != two[1]


def test_scripts_and_modules_run_as_main(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(7)")
    result = run(python, "-u", str(script), "a")
    assert (result.stdout, result.returncode) == ("__main__ ['a']\n", 7)
    assert "usage" in run(python, "-m", "json.tool", "--help").stdout


def test_input_output_and_inherited_files_are_the_callers(python, tmp_path):
    read, write = os.pipe()
    code = f"import os, sys; os.write({write}, sys.stdin.read().upper().encode()); print('err', file=sys.stderr)"
    result = run(python, "-c", code, input="hello", pass_fds=[write])
    os.close(write)
    assert os.read(read, 10) == b"HELLO"
    assert result.stderr == "err\n"
    os.close(read)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ending_the_stand_in_ends_the_process(python, number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    standin = subprocess.Popen([str(python), "-c", code], stdout=subprocess.PIPE, text=True)
    with standin.stdout:
        pid = int(standin.stdout.readline())
        handle = os.pidfd_open(pid)
        standin.send_signal(number)
        assert standin.wait(timeout=30) != 0
        os.close(handle)
        # the pipe is held by the process alone now: end of file means that it is gone
        assert standin.stdout.read() == ""


def test_a_process_that_dies_by_a_signal_reports_it(python):
    assert run(python, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 137


def test_each_process_leads_a_group_of_its_own_so_that_ending_it_spares_the_others(python):
    code = "import os; print(os.getpid() == os.getpgid(0), os.getpgid(os.getppid()) != os.getpgid(0))"
    assert run(python, "-c", code).stdout == "True True\n"


def test_signals_are_handled_as_a_fresh_interpreter_handles_them(python):
    code = """
import signal
for number in sorted(signal.valid_signals()):
    print(number, signal.getsignal(number))
"""
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert normal(run(python, "-c", code).stdout) == normal(plain.stdout)


def normal(listing: str) -> list[str]:
    return [line.partition(" at 0x")[0] for line in listing.splitlines()]


def test_random_numbers_differ_between_forks(python):
    code = "import random, uuid; print(random.random(), uuid.uuid4())"
    one, two = (run(python, "-c", code).stdout.split() for _ in range(2))
    assert one[0] != two[0]
    assert one[1] != two[1]


def test_without_a_nursery_the_stand_in_is_the_interpreter(home):
    assert run(home / "python", "-c", "print('plain')").stdout == "plain\n"


def test_imports_that_leave_threads_behind_are_not_forked(home, tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()"
    )
    command = [sys.executable, "-m", "seamless_verl.nursery.nursery_server", str(home / "nursery"), "threaded"]
    result = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=30
    )
    assert "nothing is forked" in result.stderr
    assert run(home / "python", "-c", "print('plain')").stdout == "plain\n"

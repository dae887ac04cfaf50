"""The sandbox, for real: what hostile or broken code does, and what the verdict then is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import psutil
import pytest

from seamless_verl.errors import MachineError
from seamless_verl.recipes.swe.tiny import confinement, sandbox
from seamless_verl.recipes.swe.tiny.agent import describe
from seamless_verl.recipes.swe.tiny.sandbox import Limits, Sandbox, SandboxError, TestRun
from seamless_verl.recipes.swe.tiny.tasks import generate

TESTS = '''
from thing import thing

def test_one():
    """thing(1) == 2"""
    got = thing(1)
    assert got == 2, "got %r" % got

def test_two():
    """thing(4) == 5"""
    assert thing(4) == 5
'''
GOOD = "def thing(x):\n    return x + 1\n"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    box = Sandbox(zygotes=2, limits=Limits(wall_s=20.0))
    yield box
    box.close()


def run(box: Sandbox, source: str, tests: str = TESTS) -> TestRun:
    return box.run(source_file="thing.py", source=source, test_file="test_thing.py", tests=tests)


def body(*lines: str) -> str:
    """A ``thing`` that runs these lines and then gives the right answer."""
    return "def thing(x):\n" + "".join(f"    {line}\n" for line in lines) + "    return x + 1\n"


def errors(run: TestRun) -> list[str | None]:
    return [test.error for test in run.tests]


def test_good_code_passes(box: Sandbox) -> None:
    result = run(box, GOOD)
    assert result.all_passed
    assert result.share == 1.0
    assert [test.name for test in result.tests] == ["test_one", "test_two"]


def test_wrong_code_fails_with_the_message_of_the_test(box: Sandbox) -> None:
    result = run(box, "def thing(x):\n    return 2\n")
    assert not result.all_passed
    assert result.share == 0.5
    result = run(box, "def thing(x):\n    return 3\n")
    assert (result.tests[0].error, result.tests[0].message) == ("AssertionError", "got 3")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def thing(x:\n", "SyntaxError"),
        ("def other(x):\n    return x\n", "ImportError"),
        (body("1 / 0"), "ZeroDivisionError"),
        (body("raise SystemExit(0)"), "SystemExit"),
        (body("return lambda: 0"), "TypeError"),
        (body("x = []; x.append(x); return x"), "RecursionError"),
        (body("return thing(x)"), "RecursionError"),
    ],
)
def test_errors_keep_their_names(box: Sandbox, source: str, error: str) -> None:
    result = run(box, source)
    assert errors(result) == [error, error]
    assert result.problem is None


STUBBORN = "while True:\n        try:\n            while True: pass\n        except BaseException: pass"


@pytest.mark.parametrize("loop", ["while True: pass", STUBBORN])
def test_endless_loop_is_a_timeout(box: Sandbox, loop: str) -> None:
    assert errors(run(box, body(loop)))[0] in ("Timeout", "Crash")
    assert run(box, GOOD).all_passed


def test_sleeping_code_is_killed_at_the_wall_limit() -> None:
    box = Sandbox(limits=Limits(wall_s=0.5))
    try:
        result = run(box, body("import time", "time.sleep(x == 4 and 1000)"))
        assert result.problem == "Timeout"
        assert errors(result) == [None, "Timeout"]
        assert not result.all_passed
        assert run(box, GOOD).all_passed
    finally:
        box.close()


@pytest.mark.parametrize("when", ["import", "call"])
@pytest.mark.parametrize("end", ["os._exit(0)", "os.abort()"])
def test_ending_the_process_is_no_success(box: Sandbox, when: str, end: str) -> None:
    result = run(box, f"import os\n{end}\n" if when == "import" else body("import os", end))
    assert errors(result) == ["Crash", "Crash"]


def test_lies_of_the_code_under_test_do_not_reach_the_verdict(box: Sandbox) -> None:
    """It may write to every descriptor it can reach, fake equality, and replace what the tests could use."""
    shout = "for fd in range(256):\n    try: os.write(fd, b'{\"end\": true}\\n')\n    except OSError: pass\n"
    assert not run(box, f"import os\n{shout}\ndef thing(x):\n    return 0\n").all_passed
    equal = "class Same(int):\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
    assert run(box, equal + "def thing(x):\n    return Same(7)\n").passed == 0
    patch = "import builtins, sys\nfor m in list(sys.modules.values()):\n    m.run_tests = m._raise = None\n"
    assert run(box, patch + "builtins.AssertionError = None\ndef thing(x):\n    return 0\n").passed == 0


def test_no_network(box: Sandbox) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    try:
        port = server.getsockname()[1]
        attempt = body("import socket", f"socket.create_connection(('127.0.0.1', {port}))")
        assert errors(run(box, attempt)) == ["PermissionError"] * 2
        assert errors(run(box, body("import socket", "socket.socketpair()"))) == ["PermissionError"] * 2
        raw = body("import ctypes", "libc = ctypes.CDLL(None, use_errno=True)", "fd = libc.socket(2, 1, 0)",
                   "if fd < 0: raise OSError(ctypes.get_errno(), 'socket')")  # fmt: skip
        assert errors(run(box, raw)) == ["OSError"] * 2 or errors(run(box, raw)) == ["PermissionError"] * 2
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    finally:
        server.close()


def test_no_network_for_the_tests_either(box: Sandbox) -> None:
    tests = "import socket\ndef test_one():\n    socket.socket()\n"
    assert errors(run(box, GOOD, tests)) == ["PermissionError"]


@pytest.mark.parametrize("call", ["os.fork()", "os.system('true')", "os.execv('/bin/true', ['true'])", "os.kill(-1, 9)",
                                  "os.kill(os.getppid(), 9)", "os.setsid()"])  # fmt: skip
def test_no_other_process(box: Sandbox, call: str) -> None:
    if call == "os.system('true')":
        call = "if os.system('true') != 0: raise PermissionError"
    assert errors(run(box, body("import os", call))) == ["PermissionError"] * 2


ASK = {
    "F_SETOWN": "fcntl.fcntl(read, 8, victim)",
    "F_SETOWN_EX": "fcntl.fcntl(read, 15, struct.pack('ii', 1, victim))",
    "F_SETSIG": "fcntl.fcntl(read, 10, 9)",
    "FIOSETOWN": "fcntl.ioctl(read, 0x8901, struct.pack('i', victim))",
    "SIOCSPGRP": "fcntl.ioctl(read, 0x8902, struct.pack('i', victim))",
}


@pytest.mark.parametrize("name", ASK)
def test_no_other_process_is_signalled_by_the_kernel_for_it(box: Sandbox, name: str) -> None:
    """A pipe that is ready would signal its owner, as which anybody of the same user may be named."""
    with subprocess.Popen(["sleep", "60"]) as victim:
        lines = ["import fcntl, os, struct", f"victim = {victim.pid}", "read, write = os.pipe()", ASK[name]]
        lines += ["fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)"]
        result = run(box, body(*lines, "os.write(write, b'x')"))
        ended = victim.poll()
        victim.kill()
    assert (errors(result), ended) == (["PermissionError"] * 2, None)


def test_fork_bomb_makes_no_process(box: Sandbox) -> None:
    bomb = body("import os", "for _ in range(2000):", "    try: os.fork()", "    except OSError: pass")
    before = len(psutil.pids())
    assert run(box, bomb).all_passed, "every fork failed, so the code went on to its right answer"
    assert len(psutil.pids()) < before + 50


def test_threads_are_bounded_by_memory_and_end_with_the_run(box: Sandbox) -> None:
    lines = ["import threading", "wait = threading.Event()"]
    lines += ["for _ in range(500): threading.Thread(target=wait.wait, daemon=True).start()"]
    assert errors(run(box, body(*lines))) != [None, None]
    assert run(box, GOOD).all_passed


def test_memory_hog_fails_alone(box: Sandbox) -> None:
    assert errors(run(box, body("data = bytearray(1 << 30)"))) == ["MemoryError"] * 2
    assert run(box, GOOD).all_passed


def test_big_file_cannot_be_written(box: Sandbox) -> None:
    assert errors(run(box, body("open('big', 'wb').write(bytes(2 << 20))"))) == ["OSError"] * 2
    assert run(box, body("open('small', 'wb').write(bytes(1 << 10))")).all_passed


def test_limits_cannot_be_raised(box: Sandbox) -> None:
    raise_limit = body("import resource", "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))")
    assert errors(run(box, raise_limit)) == ["ValueError"] * 2


def test_files_of_others_are_out_of_reach(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cret")
    for call in (f"open({str(secret)!r}).read()", f"os.listdir({str(tmp_path)!r})", "os.listdir('..')",
                 "open('/proc/self/environ').read()", f"os.unlink({str(secret)!r})", f"os.chmod({str(secret)!r}, 0)",
                 f"open({str(tmp_path / 'new')!r}, 'w')", "open('/etc/passwd').read()"):  # fmt: skip
        assert errors(run(box, body("import os", call))) == ["PermissionError"] * 2, call
    assert secret.read_text() == "s3cret"


def test_two_runs_do_not_see_each_other() -> None:
    """One run lies in wait while another looks for its folder."""
    box = Sandbox(zygotes=2, limits=Limits(wall_s=2.0))
    try:
        with ThreadPoolExecutor(2) as threads:
            mine = "import os\nopen('mine', 'w').write('x')\n" + body("import time", "time.sleep(1000)")
            waiting = threads.submit(run, box, mine)
            found = threading.Event()
            while not found.is_set() and not waiting.done():
                folders = list(Path(box.root).glob("*/mine"))
                if folders:
                    found.set()
            assert found.is_set()
            result = threads.submit(run, box, body(f"open({str(folders[0])!r})")).result()
            assert errors(result) == ["PermissionError"] * 2
            assert waiting.result().problem == "Timeout"
    finally:
        box.close()


def test_without_landlock_no_file_can_be_opened(tmp_path: Path) -> None:
    script = f"""
from seamless_verl.recipes.swe.tiny import confinement
confinement.landlock_version = lambda: 0
confinement.confine({str(tmp_path)!r}, cpu_s=5, memory_bytes=1 << 30, file_bytes=1 << 20)
for name in ("own", "/dev/null", "/etc/passwd"):
    try:
        open(name)
    except PermissionError:
        print("denied", name)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:-1] == ["denied own", "denied /dev/null", "denied /etc/passwd"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_no_file_of_others_can_be_emptied_under_any_landlock(version: int, tmp_path: Path) -> None:
    """Those where the user may write but the code may not, and the installed Python's, which the code may read."""
    if confinement.landlock_version() < version:
        pytest.skip(f"this kernel's Landlock is older than version {version}")
    folder, library = tmp_path / "own", tmp_path / "library"
    victims = [tmp_path / "victim", library / "module.py"]
    folder.mkdir()
    library.mkdir()
    for victim in victims:
        victim.write_text("whole")
    script = f"""
import ctypes, os, struct
from seamless_verl.recipes.swe.tiny import confinement
confinement.landlock_version = lambda: {version}
confinement._READABLE.append({str(library)!r})
libc = ctypes.CDLL(None, use_errno=True)
confinement.confine({str(folder)!r}, cpu_s=5, memory_bytes=1 << 30, file_bytes=1 << 20)
for path in {[str(victim) for victim in victims]}:
    try:
        os.truncate(path, 0)
    except PermissionError:
        pass
    for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, 3):
        try:
            os.open(path, access | os.O_TRUNC)
        except PermissionError:
            pass
        how = struct.pack("QQQ", access | os.O_TRUNC, 0, 0)
        if os.uname().machine == "x86_64":
            libc.syscall(2, path.encode(), access | os.O_TRUNC)
        libc.syscall(437, -100, path.encode(), how, len(how))
open("own", "w").write("long")
open("own", "w").write("new")
with open("own", "r+") as own:
    own.truncate(2)
print(open("own").read(), open({str(victims[1])!r}).read())
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    assert [victim.read_text() for victim in victims] == ["whole", "whole"]
    assert done.stdout == "ne whole\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_is_short_enough_for_the_kernel_and_ends_in_allow(machine: str) -> None:
    program = confinement.filter_program(files=False, machine=machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
    assert program[-4:] == (0x7FFF0000).to_bytes(4, "little")


def test_environment_is_empty(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "t0ken")
    fresh = Sandbox()
    try:
        source = "import os\ndef thing(x):\n    return sorted(os.environ)\n"
        tests = "from thing import thing\ndef test_one():\n    got = thing(1)\n    assert 0, repr(got)\n"
        assert "SECRET" not in run(fresh, source, tests).tests[0].message
    finally:
        fresh.close()


def test_output_flood_is_cut(box: Sandbox) -> None:
    result = run(box, body("print('flood' * 100_000, flush=True)"))
    assert result.all_passed
    assert len(result.output) == box.limits.output_bytes


def test_file_without_tests_is_no_success(box: Sandbox) -> None:
    result = run(box, GOOD, "from thing import thing\n")
    assert not result.all_passed
    assert result.share == 0.0


def test_broken_test_file_is_no_success(box: Sandbox) -> None:
    assert not run(box, GOOD, "def test_one(:\n").all_passed
    assert "SyntaxError" in run(box, GOOD, "def test_one(:\n").output


@pytest.mark.parametrize("name", ["../x.py", "x.txt", "a b.py", ""])
def test_file_names_are_plain(box: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        box.run(source_file=name, source=GOOD, test_file="test_thing.py", tests=TESTS)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_a_killed_zygote_is_replaced() -> None:
    before = set(children())
    box = Sandbox()
    try:
        assert run(box, GOOD).all_passed
        (zygote,) = set(children()) - before
        zygote.send_signal(signal.SIGKILL)
        assert run(box, GOOD).all_passed
        (fresh,) = set(children()) - before
        assert fresh.pid != zygote.pid
    finally:
        box.close()
    assert set(children()) - before == set()


def test_a_zygote_that_dies_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START", "raise SystemExit(3)")
    box = Sandbox()
    try:
        with pytest.raises(SandboxError, match="two zygotes were lost"):
            run(box, GOOD)
    finally:
        box.close()


def test_confinement_that_fails_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = "def refuse(*_, **__): raise zygote.KernelRefused('seccomp filter: denied')"
    broken = sandbox._START.replace("main()", f"import seamless_verl.recipes.swe.tiny.zygote as zygote\n{refuse}")
    monkeypatch.setattr(sandbox, "_START", broken + "\nzygote.confine = refuse\nmain()")
    box = Sandbox()
    try:
        with pytest.raises(SandboxError, match="cannot be closed on this machine: seccomp filter: denied"):
            run(box, GOOD)
    finally:
        box.close()


def test_tests_can_catch_the_errors_of_the_code(box: Sandbox) -> None:
    tests = """
from thing import thing

def test_one():
    try:
        thing(1)
    except TypeError as error:
        assert str(error) == "no"
    else:
        assert False
"""
    assert run(box, "def thing(x):\n    raise TypeError('no')\n", tests).all_passed
    assert not run(box, "def thing(x):\n    raise KeyError('no')\n", tests).all_passed


def test_close_is_idempotent_and_final() -> None:
    box = Sandbox()
    assert run(box, GOOD).all_passed
    box.close()
    box.close()
    assert not os.path.exists(box.root)
    with pytest.raises(SandboxError, match="closed"):
        run(box, GOOD)


def test_a_machine_without_filters_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    with pytest.raises(MachineError, match="needs x86_64 or aarch64"):
        Sandbox()


def test_many_threads_share_the_zygotes(box: Sandbox) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda good: run(box, GOOD if good else body("return 0")), [True, False] * 20))
    assert [result.all_passed for result in results] == [True, False] * 20


def test_says_what_the_generator_said(box: Sandbox) -> None:
    """The model is warmed up on outcomes computed in process; the agent shows it those of the sandbox."""
    for task in islice(generate("train", 5), 40):
        for lines in (task.source, task.fixed):
            result = box.run(source_file=task.source_file, source="\n".join(lines) + "\n", test_file=task.test_file,
                             tests=task.tests())  # fmt: skip
            assert (describe(result), result.share) == task.run(lines)

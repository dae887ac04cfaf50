"""How large the house is and how far a request walks in it: counts, not times.

* lines of code of the package without blanks, comments and docstrings; files, their sizes, the longest function
* lines of test per line of kernel
* methods of verl's trainer that our trainer overrides, and in how many places
* files of ours that one loan passes under ``predictive`` (``benchmarks.house_loan``)
* files and types of ours that one chat completion passes, from its socket to the row, in the stand-alone proxy: a real
  process notes them while a request runs (``benchmarks.house_trace``)
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import signal
import statistics
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.http_pool import HttpPool
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    KEY,
    admin_pool,
    body_of,
    free_port,
    message,
    mock_engine,
    model_folder,
    open_ours,
    until_up,
)
from benchmarks.traffic import process as child_process

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "seamless_verl"
_KERNELS = ("trajectory", "scheduling", "staleness", "simulation")
_BESIDE = {"staleness": ("decode_cost.py",)}  # what several kernels share is tested with one of them
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(path: Path) -> int:
    """Lines with code on them; docstrings, comments and blanks are none."""
    source = path.read_text(encoding="utf-8")
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path.relative_to(_ROOT)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def sizes() -> list[Record]:
    files = sorted(_PACKAGE.rglob("*.py"))
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    longest, length = max((found for path in files for found in functions(path)), key=lambda found: found[1])
    print(f"longest function: {longest}")
    folder, most = Counter(path.parent for path in files if path.name != "__init__.py").most_common(1)[0]
    print(f"fullest folder: {folder.relative_to(_ROOT)}")
    names = Counter(path.name for path in files if path.name != "__init__.py")
    return [
        _at_most("lines of code", sum(map(code_lines, files)), 18_500),
        _at_most("files", len(files), 150),
        _at_most("median file", statistics.median(lengths), 150),
        _at_most("longest file", max(lengths), 400),
        _at_most("longest function", length, 50),
        _at_most("files in one folder", most, 20),
        _at_most("file names that occur more than once", sum(count > 1 for count in names.values()), 0),
    ]


def tests_per_kernel() -> list[Record]:
    """Tests of a kernel stand in ``tests/kernel/NAME`` or ``tests/kernel/test_NAME_*.py``."""
    records = []
    for name in _KERNELS:
        modules = [*(_PACKAGE / name).rglob("*.py"), *(_PACKAGE / module for module in _BESIDE.get(name, ()))]
        kernel = sum(map(code_lines, modules))
        tests = [*(_ROOT / "tests/kernel" / name).rglob("*.py"), *(_ROOT / "tests/kernel").glob(f"test_{name}_*.py")]
        ratio = sum(map(code_lines, tests)) / kernel
        records.append(
            Record(name=f"lines of test per line of {name}", value=ratio, unit="", bar=">= 1", holds=ratio >= 1)
        )
    return records


def overrides() -> list[Record]:
    """Of verl's trainer; needs verl installed."""
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    kinds = SeamlessTrainer.__mro__
    ours = [kind for kind in kinds if kind.__module__.startswith("seamless_verl.")]
    verls = {name for kind in kinds if kind.__module__.startswith("verl.") for name in vars(kind)}
    sites = [name for kind in ours for name, it in vars(kind).items() if name in verls and inspect.isfunction(it)]
    return [
        _at_most("methods of verl's trainer overridden", len(set(sites)), 20),
        _at_most("places where that is done", len(sites), 20),
    ]


async def completion() -> list[Record]:
    """One turn of a warm proxy and the close of its session, under the trace."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        scratch = Path(temporary)
        folder = model_folder(scratch / "model")
        engine, port, out, log = free_port(), free_port(), scratch / "trace.json", scratch / "log"
        stack.enter_context(mock_engine(engine, folder, core=None, log=log))
        (folder / "admin.key").write_text(KEY)
        command = [sys.executable, "-m", "benchmarks.house_trace", str(out), "proxy"]
        command += ["--engine", f"http://127.0.0.1:{engine}", "--model", str(folder), "--served-model", "mock"]
        command += ["--port", str(port), "--admin-key-file", str(folder / "admin.key")]
        command += ["--record", str(scratch / "record")]
        proxy = stack.enter_context(child_process(command, core=None, log=log))
        await until_up(f"http://127.0.0.1:{port}")
        admin = admin_pool(port)
        await _turn(admin, port)  # what only a first request does is no part of the way
        opened = await open_ours(admin, group="g")
        proxy.send_signal(signal.SIGUSR1)
        await _turn(admin, port, opened.id, opened.api_key)
        proxy.send_signal(signal.SIGUSR2)
        limit = time.monotonic() + 10
        while not out.exists() and time.monotonic() < limit:
            await admin.request("GET", "/healthz", timeout_s=5.0)  # a signal is handled when the loop turns
        admin.close()
        found = json.loads(out.read_text())
    for kind in ("files", "types"):
        print(f"{kind} that a completion passes: {', '.join(found[kind])}")
    return [
        _at_most("files that a completion passes", len(found["files"]), 25),
        _at_most("types that it becomes on the way", len(found["types"]), 14),
    ]


def loan() -> list[Record]:
    """Needs verl installed, as what is lent are its replicas."""
    from benchmarks.house_loan import loan_files

    files = loan_files()
    print(f"files that a loan passes: {', '.join(files)}")
    return [_at_most("files that a loan passes", len(files), 18)]


async def _turn(admin: HttpPool, port: int, session: str = "", key: str = "") -> None:
    if not session:
        opened = await open_ours(admin, group="warm")
        session, key = opened.id, opened.api_key
    pool = HttpPool(f"http://127.0.0.1:{port}", {"authorization": f"Bearer {key}"})
    question = body_of([message("user", "one question of a conversation")])
    answer = await pool.request("POST", "/v1/chat/completions", question, timeout_s=30.0)
    pool.close()
    closed = await admin.request("POST", f"/sessions/{session}/close", b'{"reward":1.0}', timeout_s=30.0)
    if (answer.status, closed.status) != (200, 200):
        raise RuntimeError(f"{answer.status} {answer.body[:200]!r}, {closed.status} {closed.body[:200]!r}")


def _at_most(name: str, value: float, most: float) -> Record:
    return Record(name=name, value=value, unit="", bar=f"<= {most:,}", holds=value <= most)


def main() -> int:
    options = arguments(__doc__ or "")
    records = [*sizes(), *tests_per_kernel()]
    if not options.quick:
        records += [*overrides(), *loan(), *asyncio.run(completion())]
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())

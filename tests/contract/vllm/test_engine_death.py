"""How a vLLM engine ended, from what vLLM knows of its process and from the log that both write to."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.verl_adapter.vllm import engine_death
from seamless_verl.verl_adapter.vllm.engine_death import EngineNotStarted, engine_died, last_words

LOG = """\
(EngineCore pid=7) INFO 11-23 22:42:00 [block_pool.py:685] Successfully reset prefix cache
(EngineCore pid=7) ERROR 11-23 22:42:01 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 22:42:01 [core.py:1100]     raise ValueError(f"no room [{needed}] left")
(EngineCore pid=7) ERROR 11-23 22:42:01 [core.py:1100] ValueError: no room [4] left
ERROR 11-23 22:42:01 [async_llm.py:700] AsyncLLM output_handler failed.
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace for the root cause.
"""


def server(*exit_codes: int | None, errored: bool = True) -> Any:
    manager = SimpleNamespace(processes=[SimpleNamespace(exitcode=code) for code in exit_codes])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    return SimpleNamespace(engine=SimpleNamespace(errored=errored, engine_core=core))


def test_the_last_words_are_the_engines_and_not_what_the_server_says_of_it() -> None:
    assert last_words(LOG) == "ValueError: no room [4] left"
    assert last_words("(EngineCore pid=7) torch.OutOfMemoryError: HIP") == "torch.OutOfMemoryError: HIP"
    assert last_words("(EngineCore pid=7) INFO 11-23 [core.py:1] fine") is None


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ((1, None, -15), "exit code 1; its last words: ValueError: no room [4] left"),
        ((-6,), "killed by SIGABRT; its last words: ValueError: no room [4] left"),
        ((-9,), "killed by SIGKILL, as by the kernel where memory runs out (see `dmesg`)"),
        ((137,), "killed by SIGKILL, as by the kernel where memory runs out (see `dmesg`)"),
        ((), "it is gone; its last words: ValueError: no room [4] left"),
    ],
    ids=str,
)
def test_an_engine_ended_as_its_process_did(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int | None, ...], told: str
) -> None:
    monkeypatch.setattr(engine_death, "_tail", lambda descriptor: LOG if descriptor == 2 else "")
    assert engine_died(server(*codes)) == told
    assert engine_died(server(*codes, errored=False)) is None
    assert engine_died(object()) is None, "an engine that does not say"


def test_the_log_is_read_from_its_end_and_a_pipe_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_death, "_TAIL_BYTES", 4)
    path = tmp_path / "worker.err"
    path.write_text("first last")
    with path.open("a") as log:
        assert engine_death._tail(log.fileno()) == "last"
    reading, writing = os.pipe()
    assert engine_death._tail(writing) == ""
    os.close(reading)
    os.close(writing)


FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): "
USAGE = "usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --max-num-sequs 4\n"


@pytest.mark.parametrize(
    ("error", "log", "told"),
    [
        (RuntimeError(FAILED + "{'EngineCore_DP0': 1}"), LOG, "ValueError: no room [4] left"),
        (RuntimeError(FAILED + "{'EngineCore_DP0': -9}"), LOG, "killed by SIGKILL"),
        (RuntimeError(FAILED + "{'EngineCore_DP0': 1, 'EngineCore_DP1': 137}"), LOG, "killed by SIGKILL"),
        (RuntimeError(FAILED + "{}"), "", "See root cause above"),
        (SystemExit(2), USAGE, "unrecognized arguments: --max-num-sequs 4"),
        (SystemExit(2), "", "exit code 2"),
        (ValueError("no such quantization"), LOG, "ValueError: no such quantization"),
    ],
    ids=["error", "killed", "one-killed", "silent", "option", "exit", "server"],
)
def test_an_engine_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, log: str, told: str
) -> None:
    monkeypatch.setattr(engine_death, "_tail", lambda descriptor: log if descriptor == 2 else "")
    said = str(EngineNotStarted.because(error, replica=3))
    assert said.startswith("vLLM's engine did not start (rollout replica 3): ")
    assert told in said
    assert "Fix: " in said
    again = pickle.loads(pickle.dumps(EngineNotStarted(said)))
    assert str(again) == said, "it comes from another process"


@pytest.mark.parametrize("is_kept", [True, False], ids=["own cluster", "joined"])
def test_where_more_is_to_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_kept: bool) -> None:
    """What Ray's processes write is copied into the run folder where the run has started Ray."""
    monkeypatch.setattr(os.path, "realpath", lambda path: str(tmp_path / "worker-1.err") if "fd" in path else path)
    monkeypatch.setattr(engine_death, "_tail", lambda descriptor: "")
    if is_kept:
        monkeypatch.setenv("SEAMLESS_RAY_DIR", str(tmp_path))
    else:
        monkeypatch.delenv("SEAMLESS_RAY_DIR", raising=False)
    said = str(EngineNotStarted.because(ValueError(), replica=3))
    place = "logs/worker-1.err" if is_kept else f"{tmp_path}/worker-1.err on {socket.gethostname()}"
    assert said.endswith(f"more: {place}")

"""``seamless-verl try`` on the folder that ``new`` writes; the vLLM server is the only part that is not real."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from benchmarks.traffic import model_folder
from examples.my_task.data import rows
from seamless_verl.cli import main
from seamless_verl.run import try_command
from seamless_verl.run.new_command import write
from tests.standalone import ROOT, Mock

# Its answers have 256 tokens, whatever they are asked for.
LONG = ["data.max_response_length=2048", "seamless.agent.max_tokens_per_turn=null"]
LONG += ["actor_rollout_ref.rollout.max_model_len=4096"]
FEW = ["data.train_batch_size=2"]


@pytest.fixture
async def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Path, list[str]]]:
    """A folder with ``my_task``, and the options that try it."""
    write("my_task", tmp_path)
    assets = tmp_path / "assets"
    mock = Mock(model_folder(assets / "model"))
    (assets / "model" / "config.json").write_text("{}")
    parquet.write_table(pa.Table.from_pylist(rows([(7, 5), (1, 2)], "train")), assets / "train.parquet")
    parquet.write_table(pa.Table.from_pylist(rows([(7, 5)], "val")), assets / "val.parquet")
    url = await mock.start()
    yield tmp_path, ["my_task", "--engine", url, "--served-model", "mock", f"seamless.assets.dir={assets}", *LONG, *FEW]
    mock.stop()


async def command(folder: Path, *options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "seamless_verl.cli",
        "try",
        *options,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode()


async def test_it_shows_the_conversation_the_reward_and_the_rows(tried: tuple[Path, list[str]]) -> None:
    folder, options = tried
    code, said = await command(folder, *options, "--task", "1")
    assert code == 0, said
    assert 'task train/1: {"question": " 1+ 2", "remainder": 0, "answer": "3"}' in said
    assert "turn 2: " in said
    assert said.count("  <  1+ 2<|im_end|>") == 2
    assert "reward 0  passed 0  (the agent finished after " in said
    assert "row 1 of 1: " in said
    assert " 512 of them trained (mask 1)" in said
    assert "    1 x 256 " in said


async def test_the_session_is_told_before_the_attempt_and_a_killed_command_leaves_nothing(
    tried: tuple[Path, list[str]],
) -> None:
    folder, options = tried
    agent = folder / "my_task" / "agent.py"
    agent.write_text(agent.read_text().replace("turns += 1\n", "__import__('time').sleep(600)\n"))
    (temporary := folder / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "seamless_verl.cli", "try", *options),
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while not (told := (await process.stdout.readline()).decode()).startswith("session: "):
        assert told, "it ended without the line"
    assert re.fullmatch(r"session: base_url=http://127\.0\.0\.1:\d+/\S*v1 api_key=\S+\n", told), told
    assert list(temporary.iterdir())
    process.terminate()
    await asyncio.wait_for(process.communicate(), 60)
    assert not list(temporary.iterdir())


async def test_it_renders_as_a_run_does_and_keeps_to_its_lengths(tried: tuple[Path, list[str]]) -> None:
    folder, options = tried
    (folder / "assets" / "model" / "chat_template.jinja").unlink()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}{{ mark }}{% endif %}"
    options += [f"actor_rollout_ref.model.custom_chat_template='{template}'"]
    options += ["+data.apply_chat_template_kwargs.mark=MARKED"]
    code, said = await command(folder, *options)
    assert code == 0, said
    assert "  < user:  7+ 5<|im_end|>MARKED" in said
    code, said = await command(folder, *options, "actor_rollout_ref.rollout.max_model_len=8")
    assert code == 1, said
    assert "maximum context length is 8 tokens" in said


@pytest.mark.parametrize(("validation", "temperature"), [(False, 1.0), (True, 0.6)])
def test_a_validations_temperature_is_the_one_of_its_key_as_in_a_run(validation: bool, temperature: float) -> None:
    sampled = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "do_sample": False}  # which verl's V1 trainer ignores
    rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "do_sample": True, "val_kwargs": sampled}
    found = try_command._sampling({"actor_rollout_ref": {"rollout": rollout}}, validation)
    assert found["temperature"] == temperature


async def test_an_agent_that_raises_is_told_with_its_line(tried: tuple[Path, list[str]]) -> None:
    folder, options = tried
    agent = folder / "my_task" / "agent.py"
    agent.write_text(agent.read_text().replace("turns += 1\n", "turns += task['size']\n"))
    code, said = await command(folder, *options)
    assert code == 1, said
    line = agent.read_text().splitlines().index("        turns += task['size']") + 1
    assert "(the agent failed after " in said
    assert f"KeyError: 'size' in {agent}:{line} in converse: turns += task['size']" in said
    assert "Traceback" not in said


async def test_what_an_agent_says_does_not_speak_to_the_terminal(tried: tuple[Path, list[str]]) -> None:
    folder, options = tried
    agent = folder / "my_task" / "agent.py"
    agent.write_text(agent.read_text().replace("turns += 1\n", r"raise ValueError('\ud83d\x1b]0;t\x07')" + "\n"))
    code, said = await command(folder, *options)
    assert code == 1, said
    assert r"ValueError: \ud83d\x1b]0;t\x07" in said
    assert "Traceback" not in said


def test_vllm_is_started_as_the_runs_engines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    @contextmanager
    def server(model: str, flags: Sequence[str], **_: Any) -> Iterator[str]:
        asked.append(flags)
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(try_command, "model_server", server)
    rollout = {"max_model_len": 32768, "tensor_model_parallel_size": 4, "dtype": "bfloat16", "enforce_eager": False}
    model = {"path": "Qwen/Qwen3-32B", "trust_remote_code": True}
    config = {"actor_rollout_ref": {"rollout": rollout, "model": model}, "trainer": {"device": "cuda"}}
    with try_command._engine(argparse.Namespace(engine=None), config, tmp_path):
        flags = " ".join(asked[0])
    assert flags == "--max-model-len 32768 --dtype bfloat16 --tensor-parallel-size 4 --trust-remote-code"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--task", "-1"], "--task=-1: is no row of the data. Fix: write 0"),
        (["--engine", "localhost:8000"], "--engine=localhost:8000: is no URL. Fix: write http://localhost:8000."),
        (
            ["--served-model", "qwen"],
            "--served-model=qwen: is what a server of yours calls the model. Fix: add --engine",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_composed_or_built(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delattr(try_command, "_composed")
    assert main(["try", "my_task", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")

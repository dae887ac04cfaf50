"""What the benchmarks of the proxy share: a tokenizer made on the spot, servers on cores of their own, agents.

"rl" traffic: sessions of eight turns; each request carries the whole conversation (14 KB on average, about 4,096
prompt tokens), each answer has 256 tokens with log-probs. The first prompt of a session is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.http_pool import HttpPool
from seamless_verl.agents.ties import die_with_parent

Child = contextlib.AbstractContextManager[subprocess.Popen[bytes]]
TURNS = 8
FIRST_BYTES, NEXT_BYTES = 6_800, 1_100
_TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_folder(folder: Path) -> Path:
    """A byte-level BPE tokenizer (16,000 entries) trained on Python's own sources, with a chat template."""
    if (folder / "words.txt").exists():
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    words = sorted({word for text in texts for word in text.split() if word.isascii() and word.isalpha()})
    (folder / "words.txt").write_text("\n".join(words))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(
    command: Sequence[str], *, core: int | None, log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A child on one core, ended with the block, or with this process, however that ends."""
    pinned = ["taskset", "-c", str(core), *command] if core is not None else list(command)
    with log.open("ab") as out:
        child = subprocess.Popen(
            pinned,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


async def until_up(url: str, path: str = "/healthz", *, timeout_s: float = 90.0) -> None:
    """Returns once the server answers a GET at all."""
    pool = HttpPool(url)
    limit = time.monotonic() + timeout_s
    while True:
        try:
            await pool.request("GET", path, timeout_s=2.0)
            pool.close()
            return
        except Exception as error:
            if time.monotonic() > limit:
                raise RuntimeError(f"{url} did not come up: {error}") from error
            await asyncio.sleep(0.1)


def mock_engine(port: int, folder: Path, *, core: int | None, log: Path, latency_s: float = 0.0) -> Child:
    command = [sys.executable, "-m", "benchmarks.mock_engine", str(port), str(folder), str(latency_s)]
    return process(command, core=core, log=log)


def our_proxy(
    port: int, engine: int, folder: Path, record: Path | None, *options: str, core: int | None, log: Path
) -> Child:
    """The stand-alone proxy as a user starts it; its admin key is ``KEY``."""
    key = folder / "admin.key"
    key.write_text(KEY)
    command = [sys.executable, "-m", "seamless_verl.cli", "proxy", "--engine", f"http://127.0.0.1:{engine}"]
    command += ["--model", str(folder), "--served-model", "mock", "--port", str(port), "--admin-key-file", str(key)]
    if record is not None:
        command += ["--record", str(record)]
    return process([*command, *options], core=core, log=log)


KEY = "benchmark-admin-key"


class _Said(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Said


class Completion(msgspec.Struct):
    """What an agent reads of an answer."""

    choices: list[_Choice]

    @property
    def text(self) -> str:
        return self.choices[0].message.content


_completion = msgspec.json.Decoder(Completion)


class Opened(msgspec.Struct):
    id: str
    api_key: str


class Writer:
    """Texts for one agent; ``rng`` decides them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._words = (folder / "words.txt").read_text().split()
        self._rng = random.Random(seed)

    def text(self, num_bytes: int) -> str:
        words: list[str] = []
        size = 0
        while size < num_bytes:
            words.append(self._rng.choice(self._words))
            size += len(words[-1]) + 1
        return " ".join(words)


def message(role: str, content: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": content})


def body_of(messages: Sequence[bytes]) -> bytes:
    return b'{"model":"mock","temperature":1.0,"messages":[' + b",".join(messages) + b"]}"


@dataclass(slots=True)
class Tally:
    """What a run of traffic saw; turns that began before ``counts_from`` (`time.perf_counter`) are only counted."""

    counts_from: float = 0.0
    early: int = 0
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    sessions: int = 0

    def quantile(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def converse(
    url: str, headers: dict[str, str], path: str, first: bytes, nexts: Sequence[bytes], tally: Tally, until: float
) -> None:
    """One session's turns on one connection, each with the whole history."""
    pool = HttpPool(url, headers)
    history = [first]
    try:
        for number in range(len(nexts) + 1):
            begun = time.perf_counter()
            if begun > until:
                return
            answer = await pool.request("POST", path, body_of(history), timeout_s=60.0)
            if answer.status != 200:
                tally.errors.append(f"{answer.status}: {answer.body[:200]!r}")
                return
            if begun >= tally.counts_from:
                tally.latencies_s.append(time.perf_counter() - begun)
            else:
                tally.early += 1
            if number < len(nexts):
                history += [message("assistant", _completion.decode(answer.body).text), nexts[number]]
    finally:
        pool.close()


async def open_ours(pool: HttpPool, **options: object) -> Opened:
    answer = await pool.request("POST", "/sessions", msgspec.json.encode(options), timeout_s=60.0)
    if answer.status != 201:
        raise RuntimeError(f"opening a session: {answer.status}: {answer.body[:300]!r}")
    return msgspec.json.decode(answer.body, type=Opened)


def admin_pool(port: int) -> HttpPool:
    return HttpPool(f"http://127.0.0.1:{port}", {"authorization": f"Bearer {KEY}"})

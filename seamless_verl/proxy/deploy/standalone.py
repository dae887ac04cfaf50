"""A proxy of its own in front of a vLLM server: no trainer, no Ray, no torch.

    agents ──▶ this process ──token ids──▶ vLLM
                   │ journal.sqlite   every answered turn, before the answer leaves
                   └ rows/, images/   one file per closed session, and one per picture

Composition root of one process; :mod:`seamless_verl.proxy.deploy.proxy_command` reads its options.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.machine import shared_file_system
from seamless_verl.proxy.calls import OnUnsupported
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.engine import Ability, Gate
from seamless_verl.proxy.engines.vllm_http import VllmHttpEngine
from seamless_verl.proxy.engines.vllm_pictures import NoPictures
from seamless_verl.proxy.engines.vllm_probe import ABILITIES, continues_grammars, served_model, show_pictures
from seamless_verl.proxy.http.app import ProxyDeps, make_app
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.handover import FolderSink, HandOver
from seamless_verl.proxy.session.journal import Journal, NullJournal
from seamless_verl.proxy.session.store import SessionStore
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.proxy.text.parsing import AnswerParser, TagParser, keeps_special_tokens
from seamless_verl.proxy.text.pictures import TEXT_ONLY, ImageReader
from seamless_verl.proxy.text.steadiness import moving_note
from seamless_verl.proxy.text.tokenizer import FolderTokenizer, open_tokenizer

_log = logging.getLogger(__name__)

_TOKENIZER_FILE, _VERSION_FILE = "tokenizer_ids", "weight_version"


ParserOf = Callable[[str], AnswerParser]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneConfig:
    """Options of one stand-alone proxy.

    Attributes:
        engine: address of the vLLM server.
        model: the name that it serves.
        tokenizer: folder, or name on the Hub, whose tokenizer and chat template are used.
        record: folder of the journal and the rows; None records nothing.
        admin_key: opens and closes sessions.
        engine_key: the server's own key, "" for none.
        version: weight version that answers are stamped with, until ``POST /resume`` tells another; where a higher one
            was told to an earlier process on this folder, or to a shard beside it, that one.
        parquet: rows as Parquet instead of JSON lines.
        durable: the journal also survives the loss of power.
        think_tags: opening and closing tag of reasoning; None for a model that does not reason aloud.
        parser: from ``tokenizer`` to a parser of calls and reasoning; None for Hermes-style calls and ``think_tags``.
        chat_template: instead of the tokenizer's own.
        template_args: extra arguments of the chat template.
        drain_s: how long answers under way may take after SIGTERM.
        on_unsupported: what becomes of preferences that nobody here can honour.
        base_url: how agents reach this proxy; "" for "as the opener of a session did".
        prefix: begins the id of every session and every key; tells shards apart.
        ends_with_stdin: end when standard input closes, i.e. when whoever started this process is gone.
    """

    engine: str
    model: str
    tokenizer: str
    record: Path | None
    host: str
    port: int
    admin_key: str
    engine_key: str = ""
    version: int = 0
    parquet: bool = False
    durable: bool = False
    think_tags: tuple[str, str] | None = None
    parser: ParserOf | None = None
    chat_template: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    drain_s: float = 30.0
    base_url: str = ""
    on_unsupported: OnUnsupported = OnUnsupported.ACCEPT
    prefix: str = ""
    ends_with_stdin: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What is printed once the proxy takes requests.

    Attributes:
        found: sessions that an earlier process left.
        no_images_reason: why pictures are refused although the model has a token for them; else "".
    """

    base_url: str
    found: int
    max_model_len: int
    no_images_reason: str


def stopped_by_signal() -> asyncio.Event:
    """Set on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve(config: StandaloneConfig, *, stop: asyncio.Event, ready: Callable[[Ready], None]) -> None:
    """Serve until ``stop`` is set; then finish what is under way and return.

    Args:
        ready: called once requests are taken.

    Raises:
        ConfigError: an option that cannot work, by name.
    """
    if config.ends_with_stdin:
        _watch_stdin(asyncio.get_running_loop(), stop)
    tokenizer = open_tokenizer(config.tokenizer, config.chat_template)
    engine = VllmHttpEngine(config.engine, config.model, api_key=config.engine_key, banned=tokenizer.placeholders)
    try:
        looking, stopped = asyncio.create_task(_deps(config, engine, tokenizer)), asyncio.create_task(stop.wait())
        await asyncio.wait({looking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if looking.done():
            await _serve(config, *looking.result(), stop, ready)
        looking.cancel()
    finally:
        await engine.close()


async def _serve(
    config: StandaloneConfig, deps: ProxyDeps, reason: str, stop: asyncio.Event, ready: Callable[[Ready], None]
) -> None:
    app = make_app(deps)
    server = ProxyServer(app, config.host, config.port, drain_s=config.drain_s)
    try:
        base_url = await server.start()
        handover: HandOver = app.state.handover
        resumed = asyncio.create_task(handover.resume())
        max_model_len, found = deps.limits.max_model_len, len(deps.sessions)
        ready(Ready(base_url=base_url, found=found, max_model_len=max_model_len, no_images_reason=reason))
        await stop.wait()
        resumed.cancel()
    finally:
        await server.stop()
        if isinstance(deps.journal, SqliteJournal):
            await deps.journal.close()


async def _deps(config: StandaloneConfig, engine: VllmHttpEngine, tokenizer: FolderTokenizer) -> tuple[ProxyDeps, str]:
    """What the proxy is made of, after a look at the server; and why pictures are refused (`Ready`)."""
    parser = TagParser(config.think_tags) if config.parser is None else config.parser(config.tokenizer)
    renderer = TokenizerRenderer(
        tokenizer,
        template_args=config.template_args,
        stop_token_ids=tokenizer.stop_token_ids,
        keep_special_tokens=keeps_special_tokens(parser, tokenizer),
        placeholder=tokenizer.image_token_id,
        others=tokenizer.placeholders,
    )
    if note := moving_note(renderer):
        _log.warning("%s: %s", config.tokenizer, note)
    paused = _paused(config)
    served = await served_model(engine, is_paused=paused is not None and paused.exists())
    limits = config.limits
    images, reason = await _image_reader(engine, tokenizer.image_token_id, limits)
    continues = await continues_grammars(engine, renderer.decode)
    if served.max_model_len is not None:
        limits = replace(limits, max_model_len=min(limits.max_model_len, served.max_model_len))
    sessions = SessionStore(prefix=config.prefix, on_drop=engine.forget)
    journal, sink = _journal(config), _sink(config)
    counters = Counters()
    if isinstance(journal, SqliteJournal):
        journal.resume(sessions)
        _check_ids(config, tokenizer, len(sessions))
        counters.num_sessions = len(sessions)
    # Last: while we waited for the server, the shards beside us may have been resumed, with a new version.
    engine.stamp(max(config.version, _last_version(config)))
    deps = ProxyDeps(
        engine=engine,
        renderer=renderer,
        admin_key=config.admin_key,
        model=config.model,
        journal=journal,
        limits=limits,
        counters=counters,
        sessions=sessions,
        sink=sink,
        parser=parser,
        images=images,
        no_images_reason=reason or TEXT_ONLY,
        abilities=ABILITIES | {Ability.CONTINUED_GRAMMARS} if continues else ABILITIES,
        gate=_gate(engine, config),
        base_url=config.base_url,
        on_unsupported=config.on_unsupported,
    )
    return deps, reason


async def _image_reader(engine: VllmHttpEngine, token: int | None, limits: Limits) -> tuple[ImageReader | None, str]:
    """The reader of pictures; None where the model takes none or the server cannot read them, with the reason."""
    if token is None:
        return None, ""
    try:
        return await show_pictures(engine, token, max_pixels=limits.max_image_pixels), ""
    except NoPictures as error:
        return None, str(error)


def _paused(config: StandaloneConfig) -> Path | None:
    """The file that is there while this proxy is paused, and the shards beside it."""
    record = config.record
    return record and (record.parent if config.prefix else record) / "paused"


def _gate(engine: VllmHttpEngine, config: StandaloneConfig) -> Gate:
    """What it is told is written down first: a process started after us has to know, and a shard added beside us."""
    record, paused = config.record, _paused(config)
    if record is None or paused is None:
        return Gate(engine.stamp)
    if paused.exists():
        _log.warning("%s: an earlier process was paused, so requests wait for POST /resume", paused)

    def stamp(version: int) -> None:
        _write_whole(record / _VERSION_FILE, f"{version}\n")
        engine.stamp(version)

    return Gate(stamp, paused)


def _check_ids(config: StandaloneConfig, tokenizer: FolderTokenizer, found: int) -> None:
    """Sessions that an earlier process left hold its tokenizer's ids, which would be other words in another's."""
    file = config.record / _TOKENIZER_FILE if config.record else None
    if file is None:
        return
    ids = sorted(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).items())  # saved anew, a file differs
    digest = hashlib.sha256(repr(ids).encode()).hexdigest()
    known = file.read_text(encoding="ascii") if file.exists() else ""
    if found and known and known != digest:
        fix = "start with the model that they were opened with, or record into another folder"
        raise ConfigError("--record", config.record, f"holds {found} open sessions of another tokenizer", fix)
    if known != digest:
        _write_whole(file, digest)


def _write_whole(file: Path, text: str) -> None:
    """Half of it would be read as something else after a kill."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="ascii")
    part.replace(file)


def _last_version(config: StandaloneConfig) -> int:
    """The newest that this proxy, or a shard beside it, was told: a shard that was not there was told nothing."""
    if config.record is None:
        return 0
    folders = config.record.parent.glob("shard-*") if config.prefix else (config.record,)
    files = [file for folder in folders if (file := folder / _VERSION_FILE).exists()]
    if not files:
        return 0
    file = max(files, key=lambda each: each.stat().st_mtime_ns)  # not the highest: trainers go back to a checkpoint
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        fix = "write the served weights' version into it, or remove it"
        raise ConfigError("--record", file, f"holds no weight version: {error}", fix) from error


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, read)


def _journal(config: StandaloneConfig) -> Journal:
    if config.record is None:
        return NullJournal()
    _lock(config.record)
    if kind := shared_file_system(config.record):
        _log.warning("%s is on %s: SQLite keeps its log safely on a node's own disk only", config.record, kind)
    return SqliteJournal(config.record / "journal.sqlite", durable=config.durable)


def _sink(config: StandaloneConfig) -> FolderSink | None:
    if config.record is None:
        return None
    try:
        if config.parquet:
            import pyarrow.parquet  # noqa: F401 - no row could be written, and sessions would pile up
        return FolderSink(config.record, parquet=config.parquet)
    except ImportError as error:
        raise ConfigError("--rows", "parquet", f"needs pyarrow: {error}", "pip install pyarrow, or jsonl") from error
    except OSError as error:
        raise ConfigError("--record", config.record, f"cannot be written: {error}", "name another folder") from error


def _lock(folder: Path) -> None:
    """One process per folder, held until the process ends, however it ends.

    Raises:
        ConfigError: the folder cannot be written or locked, or another process records there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("--record", folder, f"cannot be written: {error}", "name another folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        problem, fix = f"cannot be locked: {error}", "name a folder on this node's own disk"
        if isinstance(error, BlockingIOError):
            problem, fix = "another process records there", "stop that process, or name another folder"
        raise ConfigError("--record", folder, problem, fix) from error


def read_key(option: str, file: Path, *, make: bool) -> str:
    """Reads a key from a file; with ``make``, creates one (mode 0600) where there is no file yet.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    try:
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(secrets.token_urlsafe(32) + "\n")
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(option, file, f"cannot be read: {error}", "name a file that holds the key") from error
    if len(key) < 8 or not key.isascii() or any(letter.isspace() for letter in key):
        raise ConfigError(option, file, "holds no key of at least 8 plain characters", "write the key into it")
    return key

"""``seamless-verl proxy``: options, help and messages of the stand-alone proxy."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.proxy.calls import OnUnsupported
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.address_book import prefix_of

if TYPE_CHECKING:  # the help is printed without loading what serves
    from seamless_verl.proxy.deploy.shards import Launcher
    from seamless_verl.proxy.deploy.standalone import ParserOf, StandaloneConfig

DESCRIPTION = """\
A trajectory proxy in front of a vLLM server. Agents talk to it as if it were OpenAI or Anthropic; it keeps the exact
tokens of every session, merges its turns into one token stream, and writes rows ready for training. No trainer, no
Ray, no GPU is needed beside it.
"""
EPILOG = """\
example:
  vllm serve Qwen/Qwen3-8B --port 8000
  seamless-verl proxy --engine http://127.0.0.1:8000 --model Qwen/Qwen3-8B --record runs/recorded

  K=$(cat runs/recorded/admin.key)
  curl -s -H "Authorization: Bearer $K" -d '{"group": "task-7", "sampling": {"temperature": 1.0}}' \\
       http://127.0.0.1:8650/sessions            # {"id": …, "api_key": …, "base_url": …}: for one attempt of an agent
  OPENAI_BASE_URL=… OPENAI_API_KEY=… my-agent    # the two values just given
  curl -s -H "Authorization: Bearer $K" -d '{"reward": 1.0}' http://127.0.0.1:8650/sessions/ID/close

in the recorded folder:
  rows/ID.jsonl    one line per row: token_ids, mask (1 = trained), log_probs, version_spans, turns, reward
  images/DIGEST    pictures, as sent; rows that show some name them in "images"
  journal.sqlite   open sessions; each answer is in it before it leaves. Start again on the same folder after a crash:
                   agents go on where they were, with the same keys.

limits (--limit NAME=VALUE, repeatable):
"""


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    ray_launcher: Callable[[StandaloneConfig, str], Launcher],
    vllm_parser: Callable[[str | None, str | None], ParserOf],
) -> None:
    """Add the options of this command to a parser.

    Args:
        ray_launcher: starts shards on the Ray cluster with this address; only the composition root may know Ray.
        vllm_parser: vLLM's parsers of tool calls and reasoning by their names, likewise.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, EPILOG + _limits_help()
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="the vLLM server (0.24 or later), as http://host:port")
    add("--model", required=True, help="model that it serves: a name on the Hugging Face Hub, or a folder")
    add("--served-model", metavar="NAME", help="name under which it is served, where that differs from --model")
    add("--tokenizer", metavar="FOLDER", help="tokenizer and chat template, where they are not the model's")
    add("--record", type=Path, metavar="DIR", help="record to this folder; without it, nothing outlives the process")
    add("--rows", choices=("jsonl", "parquet"), default="jsonl", help="form of the rows (default: jsonl)")
    add("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8650, help="port to bind, 0 for any free one (default: 8650)")
    add("--base-url", default="", metavar="URL", help="how agents reach this proxy, where that is not how you do")
    add("--admin-key-file", type=Path, metavar="FILE", help="key that opens sessions; made if missing (DIR/admin.key)")
    add("--engine-key-file", type=Path, metavar="FILE", help="the vLLM server's own key (its --api-key)")
    add("--think-tags", nargs=2, metavar=("OPEN", "CLOSE"), help="tags of reasoning, e.g. '<think>' '</think>'")
    add("--tool-parser", metavar="NAME", help="vLLM's parser of tool calls (its --tool-call-parser); needs vLLM here")
    add("--reasoning-parser", metavar="NAME", help="vLLM's parser of reasoning, likewise, in place of --think-tags")
    add(
        "--on-unsupported",
        choices=[way.value for way in OnUnsupported],
        default=OnUnsupported.ACCEPT.value,
        help="preferences that nobody here can honour (penalties, effort, …): ignored, and told (accept), or 400",
    )
    add("--weight-version", type=int, default=0, metavar="N", help="version of the served weights, stamped on tokens")
    add("--durable", action="store_true", help="survive the loss of power too: fsync before every group of answers")
    add("--drain", type=float, default=30.0, metavar="S", help="seconds for answers under way after SIGTERM (30)")
    add("--shards", type=int, default=1, metavar="N", help="processes to spread the sessions over (needs --record)")
    add(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="shards as actors on the nodes of this Ray cluster (auto: the one that this machine belongs to)",
    )
    add("--shard", type=int, help=argparse.SUPPRESS)  # which of them this one is
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help="see below")
    parser.set_defaults(run=run, ray_launcher=ray_launcher, vllm_parser=vllm_parser)


def run(options: argparse.Namespace) -> int:
    """Serve; 0 after a clean stop, 2 when an option cannot work."""
    try:
        if (options.shards != 1 or options.ray is not None) and options.shard is None:
            return _run_shards(options)
        return _run_alone(options)
    except SeamlessError as error:
        print(f"seamless-verl proxy: {error}", file=sys.stderr)
        return 2


def _run_alone(options: argparse.Namespace) -> int:
    from seamless_verl.proxy.deploy.http_server import keep_one_heap, search_garbage_rarely
    from seamless_verl.proxy.deploy.standalone import Ready, serve, stopped_by_signal

    if options.shard is None and options.record is not None and (table := options.record / "shards.json").exists():
        from seamless_verl.proxy.deploy.shards import known_places

        num = len(known_places(table))
        fix = f"write --shards {num} (with --ray, if it had that), or name another --record"
        raise ConfigError("--shards", options.shards, f"the sessions in {options.record} belong to {num} shards", fix)
    keep_one_heap()
    said = sys.stdout
    if options.shard is not None:  # the front reads one line; what else is printed (vLLM's log) would fill the pipe
        said = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    key_file = _admin_key_file(options)
    config = _config(options, key_file)

    def ready(state: Ready) -> None:
        search_garbage_rarely()
        where = f"recording to {config.record}" if config.record else "recording nothing (no --record)"
        found = f", {state.found} sessions found there" if state.found else ""
        pictures = f"; no pictures: {state.no_images_reason}" if state.no_images_reason else ""
        print(
            f"proxy {state.base_url} -> {config.engine} ({config.model}, {state.max_model_len} tokens); "
            f"{where}{found}{pictures}; admin key in {key_file}; ready in {time.time() - _born():.1f} s",
            file=said,
            flush=True,
        )

    async def main() -> None:
        await serve(config, stop=stopped_by_signal(), ready=ready)

    _run(main())
    return 0


def _admin_key_file(options: argparse.Namespace) -> Path:
    if options.admin_key_file:
        return Path(options.admin_key_file)
    if options.record is None:
        return Path("admin.key")
    try:
        options.record.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--record", options.record, f"cannot be made: {error}", "name another folder") from error
    return Path(options.record) / "admin.key"


def _config(options: argparse.Namespace, key_file: Path) -> StandaloneConfig:
    from seamless_verl.proxy.deploy.standalone import StandaloneConfig, read_key

    has_parser = options.tool_parser or options.reasoning_parser
    if options.think_tags and has_parser:
        fix = "name vLLM's --reasoning-parser instead, or drop the parsers"
        raise ConfigError("--think-tags", " ".join(options.think_tags), "does not go with vLLM's parsers", fix)
    return StandaloneConfig(
        engine=options.engine,
        model=options.served_model or options.model,
        tokenizer=options.tokenizer or options.model,
        record=options.record,
        host=options.host,
        port=options.port,
        admin_key=read_key("--admin-key-file", key_file, make=True),
        engine_key=read_key("--engine-key-file", options.engine_key_file, make=False)
        if options.engine_key_file
        else "",
        version=options.weight_version,
        parquet=options.rows == "parquet",
        durable=options.durable,
        think_tags=tuple(options.think_tags) if options.think_tags else None,
        parser=options.vllm_parser(options.tool_parser, options.reasoning_parser) if has_parser else None,
        drain_s=options.drain,
        on_unsupported=OnUnsupported(options.on_unsupported),
        base_url=options.base_url.rstrip("/"),
        prefix=prefix_of(options.shard) if options.shard is not None else "",
        ends_with_stdin=options.shard is not None,
        limits=_limits(options.limit),
    )


def _run_shards(options: argparse.Namespace) -> int:
    from seamless_verl.proxy.deploy.shards import LocalShards, serve_shards

    if not 1 <= options.shards <= 256:
        raise ConfigError("--shards", options.shards, "must be 1 to 256", "write --shards 4")
    if options.record is None:
        raise ConfigError("--shards", options.shards, "needs a folder for the shards' journals", "add --record DIR")
    if (options.record / "journal.sqlite").exists() and not (options.record / "shards.json").exists():
        fix = "leave out --shards and --ray, or name another --record"
        raise ConfigError("--shards", options.shards, f"the sessions in {options.record} belong to no shard", fix)
    key_file = _admin_key_file(options)
    config = _config(options, key_file)
    launcher: Launcher
    if options.ray is not None:
        launcher = options.ray_launcher(config, options.ray)
    else:
        arguments = [*options.command_line, "--admin-key-file", str(key_file)]
        launcher = LocalShards(arguments, record=options.record, host=options.host, port=options.port)

    def ready(base_url: str, num: int) -> None:
        told = f"{num} shards, recording to {config.record}; admin key in {key_file}"
        print(f"proxy {base_url} -> {options.engine}; {told}; ready in {time.time() - _born():.1f} s", flush=True)

    _run(serve_shards(config, options.shards, launcher, ready=ready))
    return 0


def _born() -> float:
    import psutil

    return float(psutil.Process().create_time())


def _run(main: Any) -> None:
    """On uvloop where it is installed (vLLM brings it): a third less time per turn."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _limits(settings: list[str]) -> Limits:
    known = {spec.name: spec for spec in fields(Limits)}
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError("--limit", setting, "is no known limit", f"did you mean {near}=…?")
        kind = int if isinstance(known[name].default, int) else float
        try:
            values[name] = kind(text)
        except ValueError:
            raise ConfigError("--limit", setting, f"needs a number ({kind.__name__})", f"write {name}=100") from None
        if not 0 < values[name] < 1 << 62:
            raise ConfigError("--limit", setting, "must be above 0", f"write {name}=100")
    return Limits(**values)


def _limits_help() -> str:
    return "".join(f"  {spec.name}: {spec.metadata['help']} Default: {spec.default}\n" for spec in fields(Limits))

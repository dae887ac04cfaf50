"""``seamless-verl try RECIPE``: one attempt at one task, without a trainer; shows the conversation, reward and rows.

::

    row N of the data ─► session of a stand-alone proxy ─► the recipe's AgentRunner ──HTTP──► proxy ─► vLLM

The server is the user's (``--engine``), or vLLM over the recipe's model, started for this and ended afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.agents.contract import (
    RUNNER_DEADLINES,
    AgentJob,
    AgentReport,
    AgentStatus,
    checked_report,
    runner_class,
)
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.machine import survey
from seamless_verl.observe.reporter import tell
from seamless_verl.places import error_in_words, places_of, places_of_coroutine
from seamless_verl.proxy.calls import OnUnsupported
from seamless_verl.proxy.client import ProxyAdmin, SessionResult
from seamless_verl.proxy.deploy.standalone import StandaloneConfig, serve
from seamless_verl.proxy.text.tokenizer import open_tokenizer
from seamless_verl.run import check_machine, compose
from seamless_verl.run.capacity import session_spec
from seamless_verl.run.check_references import task_at
from seamless_verl.run.model_server import SERVED, model_server
from seamless_verl.run.recipe_assets import find_or_build, plain
from seamless_verl.trajectory.rows import Row
from seamless_verl.watch import readers, transcript

if TYPE_CHECKING:
    from seamless_verl.proxy.deploy.standalone import ParserOf

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of the attempt.

    Attributes:
        report: the runner's; None where it raised or did not return, of which ``failure`` tells.
        turns: as `transcript.conversation` makes them.
    """

    report: AgentReport | None
    failure: str
    seconds: float
    turns: list[dict[str, Any]]
    result: SessionResult


def add_arguments(
    command: argparse.ArgumentParser, *, vllm_parser: Callable[[str | None, str | None], ParserOf]
) -> None:
    """Add the options of this command to a parser.

    Args:
        vllm_parser: vLLM's parsers of tool calls and reasoning by their names; only the composition root may know vLLM.
    """
    add = command.add_argument
    add("recipe", metavar="RECIPE", help="a recipe of yours or ours, as in +recipe=RECIPE")
    add("overrides", metavar="KEY=VALUE", nargs="*", help="overrides, as for python -m seamless_verl.main")
    add("--config-dir", type=Path, metavar="DIR", help="holds recipe/RECIPE.yaml (default: RECIPE/, if it does)")
    add("--task", type=int, default=0, metavar="N", help="which row of the data, from 0 (default: 0)")
    add("--validation", action="store_true", help="of the validation's data, sampled as there")
    add("--engine", metavar="URL", help="a vLLM server (0.24 or later); without it one is started over the model")
    add("--served-model", metavar="NAME", help="the name that it serves, where that is not the model's path")
    add("--tokens", action="store_true", help="show each token of the rows: id, mask, log-prob, text")
    command.set_defaults(run=run, vllm_parser=vllm_parser)


def run(parsed: argparse.Namespace) -> int:
    """0: the attempt finished and left something to train; 1: it did not; 2: it could not be begun."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.path.insert(0, os.getcwd())  # modules of the user's are found as by `python -m seamless_verl.main`
    try:
        _check_options(parsed)
        with tempfile.TemporaryDirectory(prefix="sv-try-") as scratch:
            return _run(parsed, Path(scratch))
    except (SeamlessError, HydraException, OmegaConfBaseException) as error:
        keys = compose.known_keys() if isinstance(error, HydraException) else []
        print(f"error: {compose.explain(error, keys)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing is left running", file=sys.stderr)
        return 130


def _check_options(parsed: argparse.Namespace) -> None:
    """Those that can be refused before a model is built."""
    if parsed.task < 0:
        raise ConfigError("--task", parsed.task, "is no row of the data", "write 0 for the first one")
    if parsed.engine is None and parsed.served_model is not None:
        fix = "add --engine URL, or leave it out"
        raise ConfigError("--served-model", parsed.served_model, "is what a server of yours calls the model", fix)
    if parsed.engine is not None and not re.match(r"https?://.", parsed.engine):
        raise ConfigError("--engine", parsed.engine, "is no URL", f"write http://{parsed.engine.rpartition('//')[2]}")


def _run(parsed: argparse.Namespace, scratch: Path) -> int:
    config = _composed(parsed, scratch)
    compose.check_packages(config, {"recipe": parsed.recipe})
    section: Any = OmegaConf.to_container(config.seamless, resolve=True)
    seamless = SeamlessConfig.from_mapping(section)
    if seamless.agent.runner is None:
        problem = "is not set in this recipe: verl's own agent loops need its trainer"
        raise ConfigError("seamless.agent.runner", None, problem, "name an AgentRunner (docs/your-agent.md)")
    find_or_build(config, seamless)
    values = plain(config)
    name, task = task_at(values, parsed.task, validation=parsed.validation)
    tell(sys.stdout, f"task {name}: {json.dumps(task, ensure_ascii=False, default=str)[:2000]}")
    with _engine(parsed, values, scratch) as (url, served):
        proxy = _proxy_config(parsed, values, seamless, url, served, scratch / "recorded")
        tried = asyncio.run(_try(proxy, seamless, task, _sampling(values, parsed.validation), values, scratch))
    for line in _lines(tried, _decode(proxy), every_token=parsed.tokens):
        tell(sys.stdout, line)
    finished = tried.report is not None and tried.report.status is AgentStatus.FINISHED
    return 0 if finished and any(row.num_trained for row in tried.result.rows) else 1


def _composed(parsed: argparse.Namespace, scratch: Path) -> DictConfig:
    recipe, overrides = parsed.recipe.rstrip("/"), parsed.overrides
    folder = parsed.config_dir or (Path(recipe) if (Path(recipe) / "recipe" / f"{recipe}.yaml").is_file() else None)
    if folder is not None and not folder.is_dir():
        raise ConfigError("--config-dir", folder, "is no folder", f"name the one that holds recipe/{recipe}.yaml")
    platform = check_machine.platform_of(survey(Path.cwd()), overrides)
    ours = []
    if folder is not None:
        ours.append(f"hydra.searchpath=[{compose.quoted(f'file://{folder.absolute()}')}]")
    ours += ["+seamless=default", f"seamless.run_dir={compose.quoted(scratch)}"]
    if not any(word.lstrip("+").startswith("platform=") for word in overrides):
        ours.append(f"+platform={platform}")
    compose.register_ours()
    with hydra.initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        return hydra.compose("ppo_trainer", overrides=[*ours, f"+recipe={recipe}", *overrides])


@contextmanager
def _engine(parsed: argparse.Namespace, config: Mapping[str, Any], scratch: Path) -> Iterator[tuple[str, str]]:
    """Address of a vLLM server and the name that it serves."""
    model = str(config["actor_rollout_ref"]["model"]["path"])
    if parsed.engine is not None:
        yield parsed.engine, parsed.served_model or model
        return
    rollout, started = config["actor_rollout_ref"]["rollout"], time.monotonic()
    flags = ["--max-model-len", str(_length(rollout)), "--dtype", str(rollout["dtype"])]
    flags += ["--tensor-parallel-size", str(rollout["tensor_model_parallel_size"])]
    flags += ["--enforce-eager"] if rollout["enforce_eager"] else []
    flags += ["--trust-remote-code"] if config["actor_rollout_ref"]["model"]["trust_remote_code"] else []
    print(f"starting vLLM over {model} (--engine URL takes a server of yours)", flush=True)
    on_cpu = config["trainer"]["device"] == "cpu"
    with model_server(model, flags, on_cpu=on_cpu, log=scratch / "vllm.log") as url:
        print(f"it answers after {time.monotonic() - started:.0f} s; the attempt begins", flush=True)
        yield url, SERVED


def _length(rollout: Mapping[str, Any]) -> int:
    """Prompt and answer together, in tokens, as a run takes it."""
    return int(rollout["max_model_len"] or rollout["prompt_length"] + rollout["response_length"])


def _proxy_config(
    parsed: argparse.Namespace, config: Mapping[str, Any], seamless: SeamlessConfig, url: str, served: str, record: Path
) -> StandaloneConfig:
    model, parsers = config["actor_rollout_ref"]["model"], (seamless.proxy.tool_parser, seamless.proxy.reasoning_parser)
    return StandaloneConfig(
        engine=url,
        model=served,
        tokenizer=str(model.get("tokenizer_path") or model["path"]),
        record=record,
        host=_HOST,
        port=0,
        admin_key=secrets.token_urlsafe(32),
        drain_s=1.0,
        parser=parsed.vllm_parser(*parsers) if any(parsers) else None,
        chat_template=model["custom_chat_template"],
        template_args=dict(config["data"]["apply_chat_template_kwargs"] or {}),
        on_unsupported=OnUnsupported(seamless.proxy.on_unsupported),
    )


def _sampling(config: Mapping[str, Any], validation: bool) -> Mapping[str, Any]:
    """The section that says how; verl 0.9.1's V1 trainer does not read ``do_sample``."""
    rollout: Mapping[str, Any] = config["actor_rollout_ref"]["rollout"]
    return rollout["val_kwargs"] if validation else rollout


async def _try(
    proxy: StandaloneConfig,
    seamless: SeamlessConfig,
    task: Mapping[str, Any],
    sampling: Mapping[str, Any],
    config: Mapping[str, Any],
    scratch: Path,
) -> Tried:
    agent, rollout = seamless.agent, config["actor_rollout_ref"]["rollout"]
    spec = session_spec(agent, sampling, rollout["response_length"], group="try", max_model_len=_length(rollout))
    async with _serving(proxy) as base_url:
        admin = ProxyAdmin(base_url, proxy.admin_key)
        session = await admin.open_session(spec)
        job = AgentJob(
            task=task,
            base_url=session.base_url,
            api_key=session.api_key,
            model=str(config["actor_rollout_ref"]["model"]["path"]),
            deadline_s=agent.deadline_s,
        )
        tell(sys.stdout, f"session: base_url={job.base_url} api_key={job.api_key}")
        started = time.monotonic()
        report, failure = await _report(seamless, job)
        seconds = time.monotonic() - started
        turns = _turns(proxy, session.id, scratch)
        result = await admin.close_session(session.id, *((report.reward, report.rewards) if report else ()))
        await admin.close()
    return Tried(report=report, failure=failure, seconds=seconds, turns=turns, result=result)


async def _report(seamless: SeamlessConfig, job: AgentJob) -> tuple[AgentReport | None, str]:
    """What the recipe's runner makes of the job, or why it makes nothing of it, with the user's lines."""
    runner = runner_class(str(seamless.agent.runner))(**seamless.agent.kwargs)
    running = asyncio.ensure_future(runner.run(job))
    try:
        await asyncio.wait([running], timeout=RUNNER_DEADLINES * job.deadline_s)
        if running.done():
            return checked_report(running.result()), ""
        places = places_of_coroutine(running.get_coro())  # type: ignore[arg-type]
        running.cancel()
        late = f"the runner had not returned after {RUNNER_DEADLINES:g} x seamless.agent.deadline_s; it waits in:"
        return None, "\n    ".join([late, *places])
    except Exception as error:  # noqa: BLE001 - it is what the user wants to see
        lines = places_of(error, only_own=isinstance(error, SeamlessError))
        return None, "\n    ".join([error_in_words(error), *lines])
    finally:
        await runner.close()


@asynccontextmanager
async def _serving(config: StandaloneConfig) -> AsyncIterator[str]:
    """A stand-alone proxy in this event loop; its address."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(config, stop=stop, ready=ready.set_result))
    try:
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            yield ready.result().base_url
    finally:
        stop.set()
        await serving


def _turns(proxy: StandaloneConfig, session_id: str, scratch: Path) -> list[dict[str, Any]]:
    assert proxy.record is not None
    decode = transcript.with_pictures(_decode(proxy))
    with readers.journal(proxy.record / "journal.sqlite", scratch) as db:
        whole = readers.whole_session(db, session_id)
    return transcript.conversation(*whole, decode) if whole is not None else []


def _decode(proxy: StandaloneConfig) -> transcript.Decode:
    return open_tokenizer(proxy.tokenizer, proxy.chat_template).decode


# ---------------------------------------------------------------- what is shown of it

_INDENT = "    "
_ENDED = {"finished": "finished", "timed_out": "ran out of time", "failed": "failed"}


def _lines(tried: Tried, decode: transcript.Decode, *, every_token: bool) -> Iterator[str]:
    """``every_token``: a line per token instead of one per stretch of equal mask."""
    for turn in tried.turns:
        yield from _turn(turn)
    yield ""
    yield _outcome(tried)
    rows = tried.result.rows
    if not any(row.num_trained for row in rows):
        yield "nothing to train: no answer of the model. The agent must send its requests to the base URL it is given"
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {len(rows)}: {len(row.token_ids)} tokens, {sum(row.mask)} of them trained (mask 1)"
        yield from _tokens(row, decode) if every_token else _stretches(row, decode)


def _turn(turn: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"turn {turn['ordinal'] + 1}: {turn['prompt_tokens']} tokens of prompt, {turn['generated_tokens']} generated, "
        f"ended by {turn['finish_reason']}"
    )
    if turn["kind"] == "fork" and turn["ordinal"]:
        reasons = ", ".join(reason["name"] for reason in turn["reasons"]) or "it continues no earlier turn"
        yield f"  begins a row of its own ({reasons})"
    yield from (f"  < {line}" for line in turn["given"].splitlines())
    yield from (f"  > {line}" for line in turn["text"].splitlines() or [""])
    answer = turn["answer"]
    for call in answer["tool_calls"] if answer else ():
        yield f"  as a tool call: {call['name']}({call['arguments']})"
    if answer and answer["overrides"]:
        yield f"  decided by the trainer, not by the agent: {', '.join(answer['overrides'])}"


def _outcome(tried: Tried) -> str:
    report, seconds = tried.report, tried.seconds
    if report is None:
        return f"no reward after {seconds:.1f} s: {tried.failure}"
    parts = [f"reward {report.reward:g}", *(f"{name} {value:g}" for name, value in report.rewards.items())]
    detail = f": {report.detail}" if report.detail else ""
    return f"{'  '.join(parts)}  (the agent {_ENDED[report.status.value]} after {seconds:.1f} s{detail})"


def _stretches(row: Row, decode: transcript.Decode) -> Iterator[str]:
    for mask, pairs in groupby(zip(row.mask, row.token_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in pairs]
        yield f"{_INDENT}{mask} x {len(ids):<5} {decode(ids)!r}"


def _tokens(row: Row, decode: transcript.Decode) -> Iterator[str]:
    yield f"{_INDENT}{'at':>6} {'id':>7} mask  log-prob  text"
    for at, (token, mask, log_prob) in enumerate(zip(row.token_ids, row.mask, row.log_probs, strict=True)):
        value = f"{log_prob:9.4f}" if mask else " " * 9
        yield f"{_INDENT}{at:>6} {token:>7} {mask:>4} {value}  {decode([token])!r}"

"""Process of one agent: mini-swe-agent, with its commands in a sandbox. ``python -m … RESULT < REQUEST``.

::

    event loop (main thread)                    agent (daemon thread)
      start_workspace
      run_agent ─────────────────────────────►  DefaultAgent.run: model call, command, model call, …
      sandbox.run  ◄── SandboxEnvironment ────    env.execute
      deadline or end: take the diff, stop the sandbox

The agent is a thread because mini-swe-agent is synchronous; a thread that hangs in a model call does not keep the
process: the diff is taken without it.

Invariant: this process has never seen a test or a solution (`HarnessRequest` has no place for one).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from seamless_verl.errors import MachineError
from seamless_verl.recipes.swe.real import protocol
from seamless_verl.recipes.swe.real.patches import looks_like_patch
from seamless_verl.recipes.swe.real.protocol import HarnessRequest, HarnessResult
from seamless_verl.recipes.swe.real.sandbox import INSTALL, CommandResult, Sandbox, SandboxError
from seamless_verl.recipes.swe.real.workspace import DiffError, start_workspace, worktree_diff

_SUBMIT_LINE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_DIFF_RESERVE_S = 15.0
# An installation that lacks a module says nothing about the agent.
_BROKEN = frozenset({"ImportError", "ModuleNotFoundError"})
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


class SandboxEnvironment:
    """mini-swe-agent's environment protocol (``config``, ``execute``, ``get_template_vars``, ``serialize``).

    Args:
        sandbox: started, at the repository.
        loop: the loop that owns it; `execute` is called from the agent's thread.
        timeout_s: limit of one command.
        deadline: `time.monotonic` value after which no command starts.
    """

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop, *, timeout_s: float, deadline: float) -> None:
        self._sandbox = sandbox
        self._loop = loop
        self._timeout_s = timeout_s
        self._deadline = deadline
        self.config = {"cwd": sandbox.cwd, "timeout": timeout_s}

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run one action. ``cwd`` is part of the protocol and not used by the agent.

        Raises:
            minisweagent.exceptions.Submitted: the command printed the line that ends the task.
            SandboxError: the sandbox went away; ends the attempt.
        """
        from minisweagent.exceptions import Submitted

        seconds = min(self._timeout_s, self._deadline - time.monotonic())
        if seconds <= 0:
            raise SandboxError("no time left for another command")
        call = self._sandbox.run(str(action.get("command", "")), timeout_s=seconds)
        result = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        lines = result.output.lstrip().splitlines(keepends=True)
        if result.exit_code == 0 and lines and lines[0].strip() == _SUBMIT_LINE:
            text = "".join(lines[1:])
            raise Submitted(
                {"role": "exit", "content": text, "extra": {"exit_status": "Submitted", "submission": text}}
            )
        return {
            "output": result.output,
            "returncode": result.exit_code,
            "exception_info": _timeout_note(result, seconds),
        }

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Values for the harness's prompt templates."""
        return {**self.config, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """What goes into the saved trajectory."""
        return {"info": {"config": {"environment": self.config, "environment_type": type(self).__qualname__}}}


async def main(raw: bytes) -> HarnessResult:
    """Start the sandbox, run the agent until it ends or the time is up, return its patch."""
    request = protocol.load_harness_request(raw)
    deadline = time.monotonic() + request.limit_s
    config = load_config(request)
    sandbox = Sandbox(request.settings.sandbox, image=request.view.image, token=request.token)
    try:
        await start_workspace(sandbox, request.view, request.settings.sandbox, limit_s=request.limit_s)
        protocol.mark_ready()
        result = await _run_agent(sandbox, request, config, deadline=deadline)
    finally:
        unclean = await sandbox.stop()
    return dataclasses.replace(result, unclean=unclean)


def load_config(request: HarnessRequest) -> dict[str, Any]:
    """The harness's own configuration with the session, the limits and the repository's place filled in.

    Raises:
        MachineError: mini-swe-agent is not installed.
    """
    try:
        from minisweagent.config import get_config_from_spec
    except ImportError as error:
        raise MachineError("mini-swe-agent", f"not installed ({error})", INSTALL) from error
    settings = request.settings
    config: dict[str, Any] = get_config_from_spec(settings.config_name)
    agent, model = dict(config.get("agent", {})), dict(config.get("model", {}))
    agent.update(step_limit=settings.step_limit, cost_limit=0.0, output_path=request.trajectory or None)
    text = settings.action_format == "text"
    model.update(
        model_class="litellm_textbased" if text else "litellm",
        model_name=f"openai/{request.model}",
        cost_tracking="ignore_errors",
        model_kwargs={
            **model.get("model_kwargs", {}),
            **settings.model_kwargs,
            "api_base": request.base_url,
            "timeout": request.limit_s,
        },
    )
    return {"agent": agent, "model": model}


def plain_openai(model: Any) -> Any:
    """Make mini-swe-agent's model send only OpenAI's own message fields.

    litellm 1.83 puts ``provider_specific_fields`` into every answer, and mini-swe-agent sends answers back as it got
    them; servers that refuse unknown fields end the attempt at its second turn. Remove when litellm leaves it out.
    """
    prepare = model._prepare_messages_for_api

    def prepared(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in message.items() if key in _FIELDS} for message in prepare(messages)]

    model._prepare_messages_for_api = prepared
    return model


def reach_directly(url: str) -> None:
    """Have clients of this process ask no HTTP proxy for a URL: one of the machine's knows nothing of loopback."""
    known = (os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), urlsplit(url).hostname)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, known))


async def _run_agent(
    sandbox: Sandbox, request: HarnessRequest, config: dict[str, Any], *, deadline: float
) -> HarnessResult:
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models import get_model

    # Not among the model's settings: those are written into the trajectory file. Not in the environment: the agent's
    # commands would inherit it in a local sandbox.
    litellm.api_key = request.api_key
    reach_directly(request.base_url)
    loop = asyncio.get_running_loop()
    stop_at = deadline - min(_DIFF_RESERVE_S, request.limit_s / 4)
    settings = config["agent"]
    # The harness's prompts name the folder of the SWE-bench images.
    settings["instance_template"] = settings["instance_template"].replace("/testbed", sandbox.cwd)
    environment = SandboxEnvironment(
        sandbox, loop, timeout_s=request.settings.sandbox.command_timeout_s, deadline=stop_at
    )
    agent = DefaultAgent(plain_openai(get_model(config=config["model"])), environment, **settings)
    ended: asyncio.Future[tuple[str, str, str]] = loop.create_future()
    threading.Thread(target=_agent_thread, args=(agent, request, loop, ended), daemon=True).start()
    try:
        status, submission, detail = await asyncio.wait_for(ended, timeout=max(0.0, stop_at - time.monotonic()))
    except asyncio.TimeoutError:
        status, submission, detail = "TimedOut", "", f"stopped after {request.limit_s:.0f} s"
    if status in _BROKEN:
        raise MachineError("mini-swe-agent", f"cannot be used ({detail})", INSTALL)
    try:
        patch = submission if looks_like_patch(submission) else await worktree_diff(sandbox)
    except DiffError as error:
        patch, detail = "", "; ".join(filter(None, (detail, str(error))))
    except SandboxError as error:
        if not await sandbox.ended():
            raise
        patch, detail = "", f"the agent ended its sandbox: {error}"
    return HarnessResult(ended=status, patch=patch, detail=detail)


def _agent_thread(
    agent: Any,
    request: HarnessRequest,
    loop: asyncio.AbstractEventLoop,
    ended: asyncio.Future[tuple[str, str, str]],
) -> None:
    try:
        extra = agent.run(request.view.problem_statement)
        outcome = (str(extra.get("exit_status", "")), str(extra.get("submission", "")), "")
    except Exception as error:  # noqa: BLE001 - whatever ends the agent is its result, and its diff still counts
        outcome = (type(error).__name__, "", " ".join(str(error).split())[:500])
    # The loop may be gone when the deadline came first; nobody waits for the outcome then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, ended, outcome)


def _settle(ended: asyncio.Future[tuple[str, str, str]], outcome: tuple[str, str, str]) -> None:
    if not ended.done():
        ended.set_result(outcome)


def _timeout_note(result: CommandResult, seconds: float) -> str:
    return f"the command was stopped after {seconds:.0f} s" if result.timed_out else ""


if __name__ == "__main__":
    raise SystemExit(protocol.serve(main))

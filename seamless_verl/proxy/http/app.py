"""The HTTP surface: routes, keys, bodies. Everything else is in the modules it calls.

========================================  ===========================  ============================
route                                     key                          body
========================================  ===========================  ============================
``POST /sessions``                        admin                        :class:`~.openapi.OpenBody`
``GET /sessions/{id}``                    admin, or the session's own
``POST /sessions/{id}/reward``, ``close`` admin                        :class:`~.openapi.RewardBody`
``DELETE /sessions/{id}``                 admin
``GET /stats``                            admin
``POST /pause``, ``/resume``              admin                        :class:`~.openapi.PauseBody`, `ResumeBody`
``POST [/sessions/{id}]`` + `DIALECTS`    the session's own            the dialect's
``POST … /v1/messages/count_tokens``      the session's own            :class:`~.messages.CountRequest`
``GET [/sessions/{id}]/v1/models[/NAME]`` the session's own
``GET /healthz``, ``/metrics``            none
``HEAD`` of base URLs                     none
``GET /openapi.json``                     none
========================================  ===========================  ============================
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from seamless_verl.proxy.attempt.service import AttemptService
from seamless_verl.proxy.calls import ApiError, Call, OnUnsupported, encoded
from seamless_verl.proxy.dialects.anthropic import parse_count, parse_messages
from seamless_verl.proxy.dialects.chat import parse_chat
from seamless_verl.proxy.dialects.completions import parse_completion
from seamless_verl.proxy.dialects.responses import parse_responses
from seamless_verl.proxy.dialects.shared import refused_preference, validated
from seamless_verl.proxy.engine import Ability, Engine, Gate, GatedEngine
from seamless_verl.proxy.http.openapi import OpenBody, PauseBody, ResumeBody, RewardBody, describe
from seamless_verl.proxy.http.requests import BodyIntake, ClientGone, Reply, StreamTiming, api_key_of, retry_count_of
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.attempts import Attempt, State
from seamless_verl.proxy.session.handover import FolderSink, HandOver
from seamless_verl.proxy.session.journal import Journal, JournalFailed, NullJournal
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.proxy.session.store import Residency, SessionStore, key_digest
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.proxy.text.parsing import AnswerParser, TagParser, preferences_against, refuse_unable
from seamless_verl.proxy.text.pictures import TEXT_ONLY, ImageIntake, ImageReader

_log = logging.getLogger(__name__)
_CLIENT_CLOSED = 499
_EPOCH = "1970-01-01T00:00:00Z"
DIALECTS: dict[str, Callable[[bytes], Call]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_responses,
    "/v1/messages": parse_messages,
}
_WHAT_EXISTS = (
    f"Agents have POST {', '.join(DIALECTS)} and /v1/messages/count_tokens, and GET /v1/models, also behind "
    "/sessions/ID; GET /openapi.json describes every route."
)
_JUDGED = ("metadata", "reward", "rewards")  # which may hold what a task's answer should be: not for its agent
_BASES = ("/", "/v1", "/sessions/{session_id}", "/sessions/{session_id}/v1")
_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyDeps:
    """What a proxy is made of; built in the composition root.

    Attributes:
        admin_key: opens and closes sessions.
        model: name that ``GET /v1/models`` shows; any other name is accepted and echoed, since the session decides.
        gate: holds requests back while weights change; None where the engine does that itself, as under the trainer.
        parser: finds reasoning and tool calls in the model's text.
        abilities: what the engine can do beyond plain generation; what it cannot is refused.
        sink: takes the rows of closed sessions; None: they are returned to the caller that closes.
        images: reads pictures for the model; None where the model, or the engine, takes text only.
        no_images_reason: told to a client that sends a picture although ``images`` is None.
        on_unsupported: what happens to preferences that this proxy cannot honour.
        base_url: how agents reach this proxy, without a path; "" for "as the opener of a session did".
    """

    engine: Engine
    renderer: TokenizerRenderer
    admin_key: str
    model: str
    journal: Journal = field(default_factory=NullJournal)
    limits: Limits = field(default_factory=Limits)
    counters: Counters = field(default_factory=Counters)
    sessions: SessionStore = field(default_factory=SessionStore)
    gate: Gate | None = None
    parser: AnswerParser = field(default_factory=TagParser)
    abilities: frozenset[Ability] = frozenset()
    timing: StreamTiming = field(default_factory=StreamTiming)
    sink: FolderSink | None = None
    images: ImageReader | None = None
    no_images_reason: str = TEXT_ONLY
    base_url: str = ""
    on_unsupported: OnUnsupported = OnUnsupported.ACCEPT


class Proxy:
    """Handlers of one proxy; :func:`make_app` gives them their routes."""

    def __init__(self, deps: ProxyDeps) -> None:
        self._deps = deps
        self._admin_digest = key_digest(deps.admin_key)
        self._residency = Residency(
            journal=deps.journal, counters=deps.counters, max_resident_bytes=deps.limits.max_resident_bytes
        )
        self.handover = HandOver(
            sessions=deps.sessions,
            journal=deps.journal,
            residency=self._residency,
            limits=deps.limits,
            counters=deps.counters,
            sink=deps.sink,
        )
        engine = deps.engine
        if deps.gate is not None:
            moves_grammars = Ability.CONTINUED_GRAMMARS in deps.abilities
            engine = GatedEngine(engine, deps.gate, deps.renderer.decode, moves_grammars=moves_grammars)
        self._attempts = AttemptService(
            engine=engine,
            renderer=deps.renderer,
            parser=deps.parser,
            journal=deps.journal,
            limits=deps.limits,
            counters=deps.counters,
        )
        self._intake = BodyIntake(deps.limits)
        self._images = ImageIntake(deps.images, deps.limits, deps.no_images_reason)

    async def open_session(self, request: Request) -> Response:
        self._require_admin(request)
        await self.handover.reap()
        if len(self._deps.sessions) >= self._deps.limits.max_sessions:
            story = f"The proxy holds {len(self._deps.sessions)} sessions, which is its limit."
            raise ApiError(429, "too_many_sessions", story, retry_after_s=5.0)
        spec = (await self._body(OpenBody, request)).spec()
        session, api_key = self._deps.sessions.open(spec, now=time.time())
        try:
            await self._deps.journal.opened(session)
        except JournalFailed:
            self._deps.sessions.drop(session)
            raise
        counters = self._deps.counters
        counters.sessions_opened += 1
        counters.num_sessions = len(self._deps.sessions)
        root = self._deps.base_url or str(request.base_url).rstrip("/")
        return _json({"id": session.id, "api_key": api_key, "base_url": f"{root}/sessions/{session.id}/v1"}, status=201)

    async def view_session(self, request: Request) -> Response:
        is_admin, wanted = self._is_admin(request), request.path_params["session_id"]
        session = self._deps.sessions.by_id(wanted) if is_admin else self._session_of(request)
        session.state_at(time.time())
        async with self._residency.hold(session):
            view = session.view()
        return _json({name: value for name, value in view.items() if is_admin or name not in _JUDGED})

    async def reward_session(self, request: Request) -> Response:
        self._require_admin(request)
        outcome = await self._body(RewardBody, request)
        session = await self.handover.reward(request.path_params["session_id"], outcome.reward, outcome.rewards)
        return _json({"reward": session.reward, "rewards": session.rewards})

    async def close_session(self, request: Request) -> Response:
        """End a session and answer its rows; asked again, the same, until they are acknowledged."""
        self._require_admin(request)
        outcome = await self._body(RewardBody, request)
        body = await self.handover.close(request.path_params["session_id"], outcome.reward, outcome.rewards)
        return Response(body, media_type="application/json")

    async def delete_session(self, request: Request) -> Response:
        """Forget a session whose rows have arrived or are not wanted."""
        self._require_admin(request)
        await self.handover.acknowledge(request.path_params["session_id"])
        return Response(status_code=204)

    async def answer(self, request: Request, parse: Callable[[bytes], Call]) -> Response:
        """One request of any dialect; what is returned runs for as long as its client waits."""
        session = self._session_of(request)
        call = self._agreed(session, parse(await self._intake.read(request, session)))
        return Reply(
            request,
            call,
            self._attempt(session, call, retry_count_of(request)),
            timing=self._deps.timing,
            orphan_grace_s=self._deps.limits.orphan_grace_s,
            delivered=lambda attempt: session.board.record(attempt, State.DELIVERED),
            failed=self.count_refusal,
        )

    def _agreed(self, session: Session, call: Call) -> Call:
        """The request as it is answered: preferences that this proxy cannot honour are noted, or refused.

        Raises:
            ApiError: 400, naming the field.
        """
        refuse_unable(call, self._deps.parser, self._deps.abilities)
        ignored = preferences_against(call, self._deps.parser)
        if ignored and self._deps.on_unsupported is OnUnsupported.REFUSE:
            raise refused_preference(ignored[0])
        session.ignored.update(ignored)
        self._deps.counters.ignored.update(ignored)
        return replace(call, preferences=ignored)

    @asynccontextmanager
    async def _attempt(self, session: Session, call: Call, retry_count: int | None) -> AsyncIterator[Attempt]:
        """The attempt at a request; its session stays in memory until the block ends."""
        async with self._residency.hold(session):
            call = await self._with_images(session, call.continued(session.continuations))
            attempt = self._attempts.begin(session, call, retry_count=retry_count)
            if call.conversation is not None:
                session.continuations.asked(attempt, call.conversation)
            yield attempt

    async def _body(self, model: type[_Body], request: Request) -> _Body:
        """A control body; none at all stands for one without fields."""
        async with self._intake.held(request) as body:
            return validated(model, body or b"{}")

    async def _with_images(self, session: Session, call: Call) -> Call:
        return await self._images.take(session.id, session.images, self._deps.journal, call)

    def count_refusal(self, error: ApiError) -> None:
        self._deps.counters.refusals[error.code] += 1

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's count of a prompt, as this session would send it to the engine."""
        session = self._session_of(request)
        call = parse_count(await self._intake.read(request, session))
        async with self._residency.hold(session):
            call = await self._with_images(session, call)
            return _json({"input_tokens": await self._attempts.count_prompt(session, call)})

    async def models(self, request: Request) -> Response:
        """The one model, in the words of the SDK that asks; by its name, also that one alone."""
        self._session_of(request)
        speaks_anthropic = "anthropic-version" in request.headers
        model: dict[str, Any] = {"id": self._deps.model, "object": "model", "created": 0, "owned_by": "seamless_verl"}
        if speaks_anthropic:
            model = {"type": "model", "id": self._deps.model, "display_name": self._deps.model, "created_at": _EPOCH}
        wanted = request.path_params.get("model")
        if wanted == self._deps.model:
            return _json(model)
        if wanted is not None:
            raise ApiError(404, "model_not_found", f"There is one model here, {self._deps.model!r}.", param="model")
        if speaks_anthropic:
            ends = {"first_id": self._deps.model, "last_id": self._deps.model, "has_more": False}
            return _json({"data": [model], **ends})
        return _json({"object": "list", "data": [model]})

    async def stats(self, request: Request) -> Response:
        self._require_admin(request)
        return _json(self._deps.counters.snapshot(time.monotonic()))

    async def pause(self, request: Request) -> Response:
        """Hold requests back; answers when the engine has nothing to do any more, or after ``timeout_s``."""
        gate = self._require_gate(request)
        body = await self._body(PauseBody, request)
        try:
            is_quiet = await gate.close(body.timeout_s)
        except OSError as error:
            story = f"The pause could not be recorded, so the gate stays open: {error}."
            raise ApiError(503, "pause_not_recorded", story, retry_after_s=5.0) from None
        return _json({"quiet": is_quiet, "at_engine": gate.num_inside})

    async def resume(self, request: Request) -> Response:
        gate = self._require_gate(request)
        body = await self._body(ResumeBody, request)
        try:
            gate.open(body.version)
        except OSError as error:
            story = f"The weight version could not be recorded, so the gate stays closed: {error}."
            raise ApiError(503, "version_not_recorded", story, retry_after_s=5.0) from None
        return Response(status_code=204)

    def _require_gate(self, request: Request) -> Gate:
        self._require_admin(request)
        if self._deps.gate is None:
            raise ApiError(404, "no_gate", "This proxy has no gate; its engine holds requests back by itself.")
        return self._deps.gate

    async def reached(self, request: Request) -> Response:
        """Clients try whether a base URL answers at all, some of them without its key."""
        return Response()

    async def healthz(self, request: Request) -> Response:
        return _json({"status": "ok", "sessions": len(self._deps.sessions)})

    async def openapi(self, request: Request) -> Response:
        return _json(describe())

    async def metrics(self, request: Request) -> Response:
        text = self._deps.counters.prometheus_text(time.monotonic())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _is_admin(self, request: Request) -> bool:
        return hmac.compare_digest(key_digest(api_key_of(request)), self._admin_digest)

    def _require_admin(self, request: Request) -> None:
        if not self._is_admin(request):
            raise ApiError(403, "admin_only", "This route needs the admin key.")

    def _session_of(self, request: Request) -> Session:
        """The session of the request's key, which must be the one in its path if there is one."""
        session = self._deps.sessions.by_key(api_key_of(request))
        wanted = request.path_params.get("session_id", session.id)
        if wanted != session.id:
            raise ApiError(403, "wrong_session", "This API key belongs to another session.")
        return session


def make_app(deps: ProxyDeps) -> FastAPI:
    """A proxy as an ASGI application; it keeps no state outside ``deps``."""
    proxy = Proxy(deps)
    app = FastAPI(title="seamless_verl proxy", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.handover = proxy.handover
    # The router tries them in this order, so the busiest come first.
    for path, parse in DIALECTS.items():
        for prefix in ("", "/sessions/{session_id}"):
            app.router.add_route(prefix + path, partial(proxy.answer, parse=parse), methods=["POST"])
    for method, path, handler in _other_routes(proxy):
        app.router.add_route(path, handler, methods=[method])

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        proxy.count_refusal(error)
        return _json(error.body(request.url.path), status=error.status, headers=dict(error.headers()))

    async def refuse_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "method_not_allowed" if error.status_code == 405 else "unknown_path"
        story = f"There is no {request.method} {request.url.path[:200]}. {_WHAT_EXISTS}"
        return await refuse(request, ApiError(error.status_code, code, story))

    async def nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    async def fail(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await refuse(request, ApiError(500, "internal_error", f"{type(error).__name__} inside the proxy."))

    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(HTTPException, refuse_path)
    app.add_exception_handler(ClientGone, nobody)
    app.add_exception_handler(Exception, fail)
    return app


def _other_routes(proxy: Proxy) -> tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...]:
    """What is asked rarely: method, path, who answers."""
    return (
        *(("HEAD", path, proxy.reached) for path in _BASES),
        ("GET", "/v1/models", proxy.models),
        ("GET", "/sessions/{session_id}/v1/models", proxy.models),
        ("GET", "/v1/models/{model:path}", proxy.models),
        ("GET", "/sessions/{session_id}/v1/models/{model:path}", proxy.models),
        ("POST", "/v1/messages/count_tokens", proxy.count_tokens),
        ("POST", "/sessions/{session_id}/v1/messages/count_tokens", proxy.count_tokens),
        ("POST", "/sessions", proxy.open_session),
        ("GET", "/sessions/{session_id}", proxy.view_session),
        ("DELETE", "/sessions/{session_id}", proxy.delete_session),
        ("POST", "/sessions/{session_id}/reward", proxy.reward_session),
        ("POST", "/sessions/{session_id}/close", proxy.close_session),
        ("GET", "/stats", proxy.stats),
        ("POST", "/pause", proxy.pause),
        ("POST", "/resume", proxy.resume),
        ("GET", "/healthz", proxy.healthz),
        ("GET", "/metrics", proxy.metrics),
        ("GET", "/openapi.json", proxy.openapi),
    )


def _json(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(content), status_code=status, headers=headers, media_type="application/json")

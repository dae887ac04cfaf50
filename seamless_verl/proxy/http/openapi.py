"""The bodies of the control routes, and all routes as an OpenAPI description from the models that check the bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

import seamless_verl
from seamless_verl.proxy.dialects.anthropic_body import CountRequest, MessagesRequest
from seamless_verl.proxy.dialects.chat import ChatRequest
from seamless_verl.proxy.dialects.completions import CompletionRequest
from seamless_verl.proxy.dialects.responses_body import ResponsesRequest
from seamless_verl.proxy.dialects.shared import Strict
from seamless_verl.proxy.session.sessions import SessionSpec


class SamplingBody(Strict):
    """Sampling that the trainer decides."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)


class OpenBody(Strict):
    """Body of ``POST /sessions``; what is left out keeps the default of :class:`SessionSpec`."""

    group: str = Field(default="", max_length=256)
    index: int = Field(default=0, ge=0, lt=2**31)
    deadline_s: float = Field(default=3600.0, gt=0, le=30 * 86400)
    max_turns: int = Field(default=1000, ge=1, lt=2**31)
    max_tokens: int = Field(default=1 << 30, ge=1, lt=2**31)
    max_model_len: int | None = Field(default=None, ge=1, lt=2**31)
    max_parallel: int = Field(default=16, ge=1, lt=2**31)
    sampling: SamplingBody = Field(default_factory=SamplingBody)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def spec(self) -> SessionSpec:
        return SessionSpec(**{**dict(self), "sampling": self.sampling.model_dump(exclude_none=True)})


class RewardBody(Strict):
    """Body of ``POST /sessions/{id}/reward`` and of ``…/close``."""

    reward: float | None = None
    rewards: dict[str, float] = Field(default_factory=dict, max_length=256)


class PauseBody(Strict):
    """Body of ``POST /pause``; ``timeout_s`` is how long to wait for what is under way."""

    timeout_s: float = Field(default=60.0, ge=0, le=3600)


class ResumeBody(Strict):
    """Body of ``POST /resume``; ``version`` of the weights that are served now, where they changed."""

    version: int | None = Field(default=None, ge=0, lt=2**31)


_AGENT: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
}
_ID = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_REFUSAL = {"4XX": {"description": "refused; the body says why"}, "503": {"description": "no engine, for now"}}


def describe() -> dict[str, Any]:
    """The description, as ``GET /openapi.json`` answers it."""
    models: list[type[BaseModel]] = [*_AGENT.values(), OpenBody, RewardBody, PauseBody, ResumeBody]
    _, shared = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for path, model in _AGENT.items():
        for prefix, parameters in (("", []), ("/sessions/{session_id}", [_ID])):
            paths[prefix + path] = {"post": _operation("the session's own", parameters, model)}
    for prefix, parameters in (("", []), ("/sessions/{session_id}", [_ID])):
        paths[f"{prefix}/v1/models"] = {"get": _operation("the session's own", parameters)}
        paths[f"{prefix}/v1/models/{{model}}"] = {"get": _operation("the session's own", [*parameters, _MODEL])}
    paths["/sessions"] = {"post": _operation("admin", [], OpenBody)}
    paths["/sessions/{session_id}"] = {
        "get": _operation("admin, or the session's own", [_ID]),
        "delete": _operation("admin", [_ID]),
    }
    for name in ("reward", "close"):
        paths[f"/sessions/{{session_id}}/{name}"] = {"post": _operation("admin", [_ID], RewardBody)}
    for path, body in (("/pause", PauseBody), ("/resume", ResumeBody)):
        paths[path] = {"post": _operation("admin", [], body)}
    paths["/stats"] = {"get": _operation("admin", [])}
    for path in ("/healthz", "/metrics", "/openapi.json"):
        paths[path] = {"get": {"responses": {"200": {"description": "no key is needed"}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "seamless_verl proxy", "version": seamless_verl.__version__},
        "paths": paths,
        "components": {
            "schemas": shared.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def describe_front() -> dict[str, Any]:
    """The same of the front of several shards: it holds nothing back by itself, and has the list of shards."""
    told = describe()
    shards = {"/shards": {method: _operation("admin", []) for method in ("get", "post")}}
    of_each = {path: methods for path, methods in told["paths"].items() if path not in ("/pause", "/resume")}
    return {**told, "paths": of_each | shards}


def _operation(key: str, parameters: list[Any], body: type[BaseModel] | None = None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": f"key: {key}",
        "parameters": parameters,
        "security": [{"bearer": []}, {"x-api-key": []}],
        "responses": {"2XX": {"description": "done"}, **_REFUSAL},
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation

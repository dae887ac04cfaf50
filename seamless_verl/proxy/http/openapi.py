"""The proxy's routes as an OpenAPI description, from the same models that check the bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from seamless_verl import __version__
from seamless_verl.proxy.dialects.anthropic import CountRequest, MessagesRequest
from seamless_verl.proxy.dialects.chat import ChatRequest
from seamless_verl.proxy.dialects.completions import CompletionRequest
from seamless_verl.proxy.dialects.responses import ResponsesRequest
from seamless_verl.proxy.http.requests import OpenBody, PauseBody, ResumeBody, RewardBody

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
        "info": {"title": "seamless_verl proxy", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": shared.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


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

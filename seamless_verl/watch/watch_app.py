"""The pages over HTTP: files of ours, and JSON. Every address begins with the token.

    GET /TOKEN/                             the page        /TOKEN/static/…  its scripts and styles
    GET /TOKEN/api/runs                     all places
    GET /TOKEN/api/run/ID/page              the report's page, as the Run view takes it apart
    GET /TOKEN/api/run/ID/steps, groups, partings, attempt, text, tokens, times, search; figures, for comparing

Who may read is decided before any route: the token in constant time; only the names under which this server was bound
(another name is a page elsewhere that had its own name point here); no other origin. Answers may be neither framed, nor
kept, nor run scripts but ours. Strings of agents are JSON here and text in the page, never HTML.
"""

from __future__ import annotations

import hmac
import json
import sqlite3
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from seamless_verl.errors import SeamlessError
from seamless_verl.observe import page as report_page
from seamless_verl.watch.watched import NotThere, Watched

HEADERS = {
    # Bars and strips set their own width in an attribute; styles cannot run anything.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_WATCH, _REPORT = Path(__file__).parent / "site", Path(report_page.__file__).parent
_OURS = {
    file.name: file
    for file in (_REPORT / "page.css", _REPORT / "lanes.js", *_WATCH.iterdir())
    if file.suffix in (".css", ".js")
}


class Places(Protocol):
    """What there is to watch."""

    def all(self) -> Iterable[Watched]:
        """What is there now; looks anew."""
        ...

    def find(self, place_id: str) -> Watched | None: ...


class Guard:
    """Lets through who knows the token, takes it off the path, and seals every answer.

    Args:
        allowed: whether a ``Host`` is a name of this server.
    """

    def __init__(self, app: ASGIApp, token: str, allowed: Callable[[str], bool]) -> None:
        self._app = app
        self._token = token.encode()
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")

        async def sealed(message: Any) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *ours]}
            await send(message)

        first, _, rest = scope["path"].lstrip("/").partition("/")
        answer = self._refused(scope, first)
        if answer is None and scope["path"] == f"/{first}":  # what the page asks for is named from its folder
            answer = Response(status_code=307, headers={"location": f"{first}/"})
        if answer is not None:
            await answer(scope, receive, sealed)
            return
        path = f"/{rest}"
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, sealed)

    def _refused(self, scope: Scope, token: str) -> Response | None:
        said = partial(_refusal, in_page="/api/" in scope["path"])
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        hosts, origins = headers.get("host", []), headers.get("origin", [])
        if len(hosts) != 1 or not self._allowed(hosts[0]):
            return said(421, "This server does not go by that name. Open the address that seamless-verl watch printed.")
        if any(urlsplit(origin).netloc != hosts[0] for origin in origins):
            return said(403, "Pages of other origins get nothing here.")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return said(403, "The token is missing or wrong. Open the address that seamless-verl watch printed.")
        if scope["method"] not in ("GET", "HEAD"):
            return said(405, "Nothing can be changed here.")
        return None


def _refusal(status: int, text: str, *, in_page: bool) -> Response:
    if in_page:  # a page of before this server began
        return _json({"error": text}, status)
    return Response(f"{text}\n", status, media_type="text/plain")


def make_app(places: Places, *, token: str, allowed: Callable[[str], bool]) -> ASGIApp:
    """The application, guarded."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _serve_files(app)
    _serve_runs(app, places)
    _serve_attempts(app, places)

    @app.exception_handler(NotThere)
    async def not_there(_: Request, error: NotThere) -> Response:
        return _json({"error": str(error)}, 404)

    async def unreadable(_: Request, error: Exception) -> Response:
        return _json({"error": f"{type(error).__name__}: {error}"}, 500)

    for kind in (SeamlessError, OSError, sqlite3.Error, ValueError):
        app.add_exception_handler(kind, unreadable)
    return Guard(app, token, allowed)


def _json(content: Any, status: int = 200) -> Response:
    try:
        body = msgspec.json.encode(content)
    except UnicodeEncodeError:  # half a character, as an agent may send it
        printable = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
        body = msgspec.json.encode(json.loads(printable))  # and what is no number is null
    return Response(body, status, media_type="application/json")


def _unless_seen(content: dict[str, Any] | None) -> Response:
    return Response(status_code=204) if content is None else _json(content)


def _serve_files(app: FastAPI) -> None:
    @app.get("/")
    def shell() -> Response:
        return _file(_WATCH / "shell.html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in _OURS:
            raise NotThere(f"there is no {name}")
        return _file(_OURS[name])


def _file(file: Path) -> Response:
    return Response(file.read_text(encoding="utf-8"), media_type=_KINDS[file.suffix])


def _run_of(places: Places, run: str) -> Watched:
    watched = places.find(run)
    if watched is None:
        raise NotThere("this run is not there (any more)")
    return watched


def _standing_of(watched: Watched) -> dict[str, Any]:
    """A run's line in the list; one that cannot be read has a line that says so, and does not hide the others."""
    try:
        return watched.run_summary()
    except OSError as error:
        place, state = watched.place, f"cannot be read: {error}"
        summary = {"id": place.id, "name": place.name, "style": "bad", "state": state}
        return summary | dict.fromkeys(("step", "total_steps", "reward", "step_s", "changed"))


def _serve_runs(app: FastAPI, places: Places) -> None:
    run_of = partial(_run_of, places)

    @app.get("/api/runs")
    def runs() -> Response:
        return _json({"runs": [_standing_of(watched) for watched in places.all()]})

    @app.get("/api/run/{run}/page")
    def page(run: str, seen: str = "") -> Response:
        watched = run_of(run)
        report = watched.report()
        mark = blake2b(report.name.encode(), digest_size=8).hexdigest()
        if seen == mark:
            return Response(status_code=204)
        return Response(
            report.page, media_type="text/plain", headers={"x-page": mark, "x-run": quote(watched.place.name)}
        )

    @app.get("/api/run/{run}/figures")
    def figures(run: str) -> Response:
        return _json(run_of(run).figures())

    @app.get("/api/run/{run}/times")
    def times(run: str, key: str = "", step: str = "") -> Response:
        return _json(run_of(run).times(key, step))

    @app.get("/api/run/{run}/search")
    def search(run: str, text: str, start: int = 0) -> Response:
        return _json(run_of(run).search(text, max(0, start)))

    @app.get("/api/run/{run}/steps")
    def steps(run: str) -> Response:
        return _json(run_of(run).steps())


def _serve_attempts(app: FastAPI, places: Places) -> None:
    run_of = partial(_run_of, places)

    @app.get("/api/run/{run}/groups")
    def groups(run: str, step: str, sort: str = "as begun", flag: str = "", text: str = "", start: int = 0) -> Response:
        return _json(run_of(run).groups(step, sort, flag, text, max(0, start)))

    @app.get("/api/run/{run}/attempt")
    def attempt(run: str, key: str, seen: str = "") -> Response:
        return _unless_seen(run_of(run).attempt(key, seen))

    @app.get("/api/run/{run}/partings")
    def partings(run: str, group: str) -> Response:
        return _json(run_of(run).partings(group))

    @app.get("/api/run/{run}/text")
    def text(run: str, key: str, at: str) -> Response:
        return _json(run_of(run).text(key, at))

    @app.get("/api/run/{run}/tokens")
    def tokens(run: str, key: str, row: int = 0, seen: str = "") -> Response:
        return _unless_seen(run_of(run).tokens(key, row, seen))

"""``seamless-verl watch [RUN | FOLDER OF RUNS]``: serves the pages until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterable
from pathlib import Path

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.watch.run_places import places
from seamless_verl.watch.watch_app import make_app
from seamless_verl.watch.watched import Watched

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_DRAIN_S = 1.0
_FIRST_PORT = 8660


def add_arguments(command: argparse.ArgumentParser, *, is_alive: Callable[[Path], bool]) -> None:
    """Add the options of this command to a parser; ``is_alive`` says whether the process of a run lives."""
    command.add_argument(
        "folder",
        metavar="RUN | FOLDER",
        type=Path,
        nargs="?",
        help="a run, a recording of the proxy, or a folder of them; without it runs/ (or $SEAMLESS_RUNS)",
    )
    command.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=None, help=f"default: {_FIRST_PORT}, or any where that is taken")
    command.add_argument(
        "--allow", action="store_true", help="bind an address that other machines reach: no TLS, the token is all"
    )
    command.add_argument("--tokenizer", type=Path, help="model folder to decode with, where the run does not name one")
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    # Started by a run (seamless.watch), and ends with it: then nobody holds the other end of standard input any more.
    command.add_argument("--of-run", action="store_true", help=argparse.SUPPRESS)
    command.set_defaults(run=watch, is_alive=is_alive)


class Root:
    """All places below a folder, each watched from when it was first seen."""

    def __init__(self, folder: Path, tokenizer: Path | None, is_alive: Callable[[Path], bool]) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._is_alive = is_alive
        self._known: dict[str, Watched] = {}

    def all(self) -> Iterable[Watched]:
        found = []
        for place in places(self.folder):
            if place.id not in self._known:
                self._known[place.id] = Watched(place, self._tokenizer, self._is_alive)
            found.append(self._known[place.id])
        return found

    def find(self, place_id: str) -> Watched | None:
        known = self._known.get(place_id) or next((one for one in self.all() if one.place.id == place_id), None)
        return known if known is not None and known.place.path.is_dir() else None

    def close(self) -> None:
        for watched in self._known.values():
            watched.close()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(host: str) -> Callable[[str], bool]:
    """Which ``Host`` headers mean a server that is bound to ``host``, whatever the port (tunnels change it).

    A name that somebody else chose and had point here is none of them; where the server is open to other machines, any
    address and this machine's own names are.
    """
    known = {*_LOOPBACK_NAMES, f"[{host}]" if ":" in host else host}
    wide = not is_loopback(host)
    if wide:
        known |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def allowed(header: str) -> bool:
        name, _, port = header.rpartition(":") if not header.endswith("]") and ":" in header else (header, "", "0")
        if not port.isdigit():
            return False
        return name.lower() in known or (wide and _is_address(name.strip("[]")))

    return allowed


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def watch(parsed: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; 2 when it cannot."""
    try:
        folder = parsed.folder or Path(os.environ.get("SEAMLESS_RUNS", "runs"))
        _check(folder, parsed)
        root = Root(folder, parsed.tokenizer, parsed.is_alive)
        try:
            asyncio.run(_serve(root, parsed))
        finally:
            root.close()
    except SeamlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(folder: Path, parsed: argparse.Namespace) -> None:
    if not folder.is_dir():
        problem = "does not exist" if not folder.exists() else "is no folder"
        raise ConfigError("RUN", folder, problem, "name a run folder, or start where runs/ is")
    if parsed.tokenizer is not None and not (parsed.tokenizer / "tokenizer.json").is_file():
        raise ConfigError("--tokenizer", parsed.tokenizer, "holds no tokenizer.json", "name the model's folder")
    if not is_loopback(parsed.host) and not parsed.allow:
        problem = "other machines would reach this page, which shows what agents wrote, and there is no TLS"
        fix = "leave --host out and use an SSH tunnel (ssh -L 8660:127.0.0.1:8660 …), or add --allow"
        raise ConfigError("--host", parsed.host, problem, fix)


async def _serve(root: Root, parsed: argparse.Namespace) -> None:
    token = secrets.token_urlsafe(24)
    app = make_app(root, token=token, allowed=names_of(parsed.host))
    server = await _started(app, parsed)
    try:
        url = f"{server.base_url}/{token}/"
        print(_greeting(root, parsed, url), flush=True)
        if parsed.open and not webbrowser.open(url):
            print("no browser was found; open the address yourself", file=sys.stderr)
        await _until_ended(of_run=parsed.of_run)
    finally:
        await server.stop()


def _greeting(root: Root, parsed: argparse.Namespace, url: str) -> str:
    if parsed.of_run:
        return f"watch this run: {url}"
    num = sum(1 for _ in root.all())
    found = "1 run" if num == 1 else f"{num} runs" if num else "no run yet; the page shows those that come"
    return f"watching {root.folder.absolute()} ({found}): {url}\nCtrl-C ends it; the run goes on"


async def _until_ended(*, of_run: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if of_run:
        loop.add_reader(sys.stdin.fileno(), stop.set)  # nothing is ever written there
    await stop.wait()


async def _started(app: object, parsed: argparse.Namespace) -> ProxyServer:
    """On the port that was asked for, or on the usual one, or on any."""
    for port in (parsed.port,) if parsed.port is not None else (_FIRST_PORT, 0):
        server = ProxyServer(app, parsed.host, port, drain_s=_DRAIN_S)  # type: ignore[arg-type]
        try:
            await server.start()
            return server
        except ConfigError:
            if port == 0 or parsed.port is not None:
                raise
    raise AssertionError("unreachable: port 0 is served or refused")

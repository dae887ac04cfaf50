"""Where the proxy listens, what it tells agents, and whose fault it is when it cannot: over real sockets."""

from __future__ import annotations

import socket

import httpx
import pytest
from fastapi import FastAPI

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.deploy.http_server import ProxyServer, base_url_of, free_port_after, listen_on

ELSEWHERE = "203.0.113.7"  # kept for documentation: no machine has it


def _app() -> FastAPI:
    app = FastAPI()
    app.add_api_route("/here", lambda: "yes")
    return app


async def _answer(listener: socket.socket, base_url: str) -> object:
    server = ProxyServer(_app(), listener=listener)
    await server.start()
    async with httpx.AsyncClient(trust_env=False) as client:
        answer: object = (await client.get(f"{base_url}/here")).json()
    await server.stop()
    return answer


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_all_addresses_of_a_machine_are_told_as_its_own(host: str) -> None:
    try:
        listener = listen_on(host, 0)
    except ConfigError:
        assert host == "::", "every machine has IPv4"
        pytest.skip("no IPv6 here")
    # Any address of 127.0.0.0/8 is this machine's, and this one is not what a loopback listener would be at.
    base_url = base_url_of(listener, node_ip="127.0.0.77")
    assert base_url == f"http://127.0.0.77:{listener.getsockname()[1]}"
    assert await _answer(listener, base_url) == "yes"


async def test_an_address_of_its_own_is_told_as_it_is() -> None:
    listener = listen_on("127.0.0.1", 0)
    base_url = base_url_of(listener, node_ip="127.0.0.77")
    assert base_url == f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert await _answer(listener, base_url) == "yes"


def test_an_ipv6_address_is_told_in_brackets() -> None:
    listener = listen_on("0.0.0.0", 0)
    assert base_url_of(listener, node_ip="fd00::2") == f"http://[fd00::2]:{listener.getsockname()[1]}"
    listener.close()


@pytest.mark.parametrize("host", [ELSEWHERE, "no-such-host.invalid"])
def test_a_wrong_host_is_no_port_in_use(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        listen_on(host, 0)
    assert (refused.value.key, refused.value.value) == ("seamless.proxy.host", host)
    assert str(refused.value.__cause__) in refused.value.problem
    assert "0.0.0.0" in refused.value.fix
    with pytest.raises(ConfigError) as refused:
        free_port_after(host, 8650, 1, ())
    assert refused.value.key == "--host"


def test_a_port_in_use_is_no_wrong_host() -> None:
    listener = listen_on("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match="in use") as refused:
        listen_on("127.0.0.1", port)
    assert (refused.value.key, refused.value.value) == ("seamless.proxy.port", port)
    assert free_port_after("127.0.0.1", port - 1, 1, ()) != port
    listener.close()

"""Which names mean this server: a page elsewhere may have its own name point at loopback."""

from __future__ import annotations

import socket

import pytest

from seamless_verl.watch.watch_command import is_loopback, names_of


@pytest.mark.parametrize("header", ["127.0.0.1:8660", "localhost:9", "localhost", "[::1]:8660", "[::1]", "LOCALHOST:1"])
def test_loopback_goes_by_its_names(header: str) -> None:
    assert names_of("127.0.0.1")(header)


@pytest.mark.parametrize(
    "header", ["evil.example:8660", "127.0.0.1.evil.example", "10.0.0.5:8660", "", "localhost:x", "[::1", "::1"]
)
def test_on_loopback_no_other_name_is_taken(header: str) -> None:
    assert not names_of("127.0.0.1")(header)


def test_opened_to_a_network_addresses_and_own_names_are_taken_others_not() -> None:
    allowed = names_of("0.0.0.0")
    assert allowed("10.0.0.5:8660")
    assert allowed("[fe80::1]:8660")
    assert allowed(f"{socket.gethostname()}:8660".lower())
    assert not allowed("evil.example:8660")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.0.0.5", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.1.2.3", False), ("evil.example", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected

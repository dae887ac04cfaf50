"""Sessions over shards: who has which, and that adding one moves nobody."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.proxy.session.address_book import KEY_PREFIX, AddressBook, prefix_of

TOKENS = [f"t{number}" for number in range(3000)]


@settings(deadline=None)
@given(st.integers(1, 12))
def test_a_further_shard_takes_an_even_share_and_nothing_else_changes(num: int) -> None:
    before = AddressBook(addresses={shard: f"u{shard}" for shard in range(num)})
    after = before.with_shard(num, "new")
    moved = [token for token in TOKENS if before.place(token) != after.place(token)]
    assert {after.place(token) for token in moved} <= {num}
    assert abs(len(moved) / len(TOKENS) - 1 / (num + 1)) < 0.05
    for shard in range(num):
        assert after.owner(f"{prefix_of(shard)}abc") == before.owner(f"{prefix_of(shard)}abc") == shard


@settings(deadline=None)
@given(st.integers(0, 20), st.text())
def test_the_owner_is_in_the_name(shard: int, rest: str) -> None:
    book = AddressBook(addresses=dict.fromkeys(range(21), "u"))
    assert book.owner(prefix_of(shard) + rest) == shard
    assert book.owner(KEY_PREFIX + prefix_of(shard) + rest) == shard
    assert AddressBook(addresses={}).owner(prefix_of(shard) + rest) is None


@pytest.mark.parametrize("name", ["", "x", "-1-a", "9-a", "1", f"{KEY_PREFIX}abc", "99999999999-a", "٣-a"])
def test_names_of_nobody(name: str) -> None:
    assert AddressBook(addresses={0: "u", 1: "v"}).owner(name) is None


def test_a_retired_shard_keeps_its_sessions_and_takes_no_new_ones() -> None:
    book = AddressBook(addresses={0: "u", 1: "v"}, retired=frozenset({1}))
    assert {book.place(token) for token in TOKENS} == {0}
    assert book.owner("1-a") == 1
    with pytest.raises(LookupError):
        AddressBook(addresses={0: "u"}, retired=frozenset({0})).place("t")

"""Accounts of slices: what is charged is what a ledger shows, weighted by devices; nothing is charged twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.simulation.books import IDLE, Account, Ledger, Use, ledger, snapshot

CHARGES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Use), st.floats(0, 1000)), max_size=40)


def accounts() -> list[Account]:
    return [
        Account(name="a", gpus=4, trainable=True),
        Account(name="b", gpus=1, trainable=True),
        Account(name="c", gpus=2, trainable=False),
    ]


def charge(to: list[Account], charges: list[tuple[int, Use, float]]) -> None:
    for number, use, seconds in charges:
        to[number].charge(use, seconds)


@given(CHARGES, CHARGES)
def test_a_ledger_holds_what_was_charged_between_the_two_looks_and_nothing_else(
    before: list[tuple[int, Use, float]], between: list[tuple[int, Use, float]]
) -> None:
    books = accounts()
    charge(books, before)
    first = snapshot(books)
    charge(books, between)
    found = ledger(first, snapshot(books), wall_s=10.0)
    charge(books, before)  # a later charge changes no look that was taken
    weights = [account.gpus for account in books]
    for use in Use:
        told = sum(weights[number] * seconds for number, spent, seconds in between if spent is use)
        assert found.gpu_seconds[use] == pytest.approx(told, abs=1e-6)
        told = sum(weights[n] * seconds for n, spent, seconds in between if spent is use and books[n].trainable)
        assert found.trainable_gpu_seconds[use] == pytest.approx(told, abs=1e-6)
    assert found.gpus == 7


def half_idle() -> Ledger:
    """Ten seconds: the trainers train 6 and starve 4, the others generate 5, prefill 2 and have no work for 3."""
    books = accounts()
    before = snapshot(books)
    charge(books, [(0, Use.TRAIN, 6.0), (0, Use.WAIT_DATA, 4.0), (1, Use.TRAIN, 6.0), (1, Use.WAIT_DATA, 4.0)])
    charge(books, [(2, Use.GENERATE, 5.0), (2, Use.PREFILL, 2.0), (2, Use.WAIT_WORK, 3.0)])
    return ledger(before, snapshot(books), wall_s=10.0)


def test_shares_by_hand() -> None:
    found = half_idle()
    assert found.balance == pytest.approx(1.0)
    assert found.share(Use.TRAIN) == pytest.approx(30 / 70)
    assert found.share(Use.GENERATE, Use.PREFILL) == pytest.approx(14 / 70)
    assert found.idle_share == pytest.approx((20 + 6) / 70)
    assert found.trainable_idle_share == pytest.approx(20 / 50)
    assert found.share(*Use) == pytest.approx(1.0)


def test_waiting_is_idle_and_nothing_else_is() -> None:
    assert {Use.WAIT_DATA, Use.WAIT_WORK} == IDLE


def test_books_of_which_a_second_is_missing_do_not_balance() -> None:
    books = accounts()
    before = snapshot(books)
    for account in books:
        account.charge(Use.GENERATE, 9.0)
    assert ledger(before, snapshot(books), wall_s=10.0).balance == pytest.approx(0.9)


def test_without_slices_that_can_train_none_of_them_idles() -> None:
    books = accounts()[2:]
    before = snapshot(books)
    books[0].charge(Use.WAIT_WORK, 1.0)
    assert ledger(before, snapshot(books), wall_s=1.0).trainable_idle_share == 0.0


def test_looks_at_unlike_slices_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ledger(snapshot(accounts()), snapshot(accounts()[:1]), wall_s=1.0)

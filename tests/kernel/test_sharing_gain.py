"""What sharing is worth: multiply-adds against the definition, and a price that is measured."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.token_trie import Price, Shape, Trie, Work, work
from tests.kernel.test_token_trie import families

UNITS = Shape(token=1_000_000.0, pair=1_000.0, position=1.0)  # so that the sum tells them apart


@given(families(), st.data())
def test_a_trie_costs_its_distinct_tokens_their_keys_and_what_is_asked(
    rows: list[np.ndarray], data: st.DataObject
) -> None:
    prompts = [data.draw(st.integers(1, len(row))) for row in rows]
    trie = Trie(rows)
    pairs = sum((b - a) * (b - a + 1) // 2 + (end - b) * (b - a) for a, b, end in trie.stretches)
    found = work(rows, prompts, [list(range(len(rows)))], UNITS)
    assert (found.tokens, found.computed) == (trie.num_tokens, len(trie))
    assert found.trie // 1_000 == len(trie) * 1_000 + pairs
    asked = {tuple(row[: at + 1]) for row, prompt in zip(rows, prompts, strict=True) for at in range(prompt, len(row))}
    assert found.trie % 1_000 <= len(asked)  # what is another row's prompt is not counted
    alone = work(rows, prompts, [[row] for row in range(len(rows))], UNITS)
    assert (alone.computed, alone.rows) == (trie.num_tokens, found.rows)
    assert found.trie <= alone.trie <= alone.rows


def test_padding_is_work_and_so_is_the_head_on_prompts() -> None:
    rows = [np.arange(4), np.arange(4, 6)]
    one_each = Shape(token=0.0, pair=0.0, position=1.0)
    found = work(rows, [3, 1], [[0, 1]], one_each)
    assert (found.rows, found.trie) == (6, 2)
    assert work(rows, [3, 1], [[0, 1]], one_each, padded=True).rows == 8


def test_the_shape_of_a_model_is_read_from_its_configuration() -> None:
    text = SimpleNamespace(
        hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=3, intermediate_size=16,
        num_hidden_layers=2, vocab_size=50,
    )  # fmt: skip
    # Per layer: queries and output 8 x 12 each, keys and values 8 x 6 each, the three of the MLP 8 x 16 each.
    dense = Shape.of(text)
    assert dense == Shape(token=2 * (2 * 96 + 2 * 48 + 3 * 128), pair=2 * 2 * 12, position=8 * 50)
    assert Shape.of(text, values=True).position == 8
    text.num_experts_per_tok, text.moe_intermediate_size = 2, 5
    assert Shape.of(text).token == 2 * (2 * 96 + 2 * 48 + 2 * 3 * 8 * 5)


def test_the_price_is_that_of_the_middle_comparison_and_says_what_was_saved() -> None:
    price, half = Price(), Work(rows=10.0, trie=5.0, tokens=10, computed=5)
    assert price.now == pytest.approx(1.02)
    for trie_s in (0.5, 0.75, 9.0):  # one that somebody disturbed
        price.compared(half, trie_s, 1.0)
    assert price.now == pytest.approx(1.5)
    assert price.saved(half, 3.0) == pytest.approx(1.0)  # 3 s for half the work at 1.5: 4 s row by row
    price.compared(half, 1.0, 0.0)  # a clock that did not move says nothing
    assert price.now == pytest.approx(1.5)
    for _ in range(5):
        price.compared(half, 0.5, 1.0)
    assert price.now == pytest.approx(1.0)

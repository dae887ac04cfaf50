"""The trie of a micro-batch's rows, against the definition: a prefix is one node, and sees what it begins with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.token_trie import Trie, deal, in_order, micro_batches


@st.composite
def families(draw: st.DrawFn) -> list[np.ndarray]:
    """Rows that branch from others anywhere; some unshared, equal, or the beginning of another."""
    rows = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 6))):
        stem = draw(st.sampled_from(rows))
        keep = draw(st.integers(1, len(stem)))
        rows.append(stem[:keep] + draw(st.lists(st.integers(0, 3), max_size=8)))
    return [np.array(row, np.int64) for row in draw(st.permutations(rows))]


@given(families())
def test_every_prefix_is_one_node_and_every_row_finds_its_own(rows: list[np.ndarray]) -> None:
    trie = Trie(rows)
    prefixes = {tuple(row[:size].tolist()) for row in rows for size in range(1, len(row) + 1)}
    assert len(trie) == len(prefixes)
    assert trie.num_tokens == sum(map(len, rows))
    for row, nodes in zip(rows, trie.nodes_of_row, strict=True):
        assert trie.tokens[nodes].tolist() == row.tolist()
        assert trie.depth[nodes].tolist() == list(range(len(row)))
        assert trie.parent[nodes].tolist() == [-1, *nodes[:-1].tolist()]


@given(families())
def test_a_query_meets_its_own_row_once_and_nothing_else(rows: list[np.ndarray]) -> None:
    trie = Trie(rows)
    seen = np.zeros((len(trie), len(trie)), int)  # how often the blocks of attention pair query and key
    for start, stop, end in trie.stretches:
        seen[start:stop, start:stop] += np.tri(stop - start, dtype=int)
        seen[stop:end, start:stop] += 1
    wanted = np.zeros_like(seen)
    for nodes in trie.nodes_of_row:
        for position, node in enumerate(nodes):
            wanted[node, nodes[: position + 1]] = 1
    assert (seen == wanted).all()


@given(families(), st.data())
def test_what_a_row_asks_for_it_gets_and_nothing_is_computed_twice(rows: list[np.ndarray], data: st.DataObject) -> None:
    trie = Trie(rows)
    begins = [data.draw(st.integers(0, len(row) - 1)) for row in rows]
    kinds = data.draw(st.none() | st.lists(st.sampled_from([0.7, 1.0]), min_size=len(rows), max_size=len(rows)))
    wanted = [np.arange(begin, len(row) - 1) for begin, row in zip(begins, rows, strict=True)]
    asked = trie.predictions(wanted, kinds)
    offset, expected = 0, set()
    for index, (row, positions) in enumerate(zip(rows, wanted, strict=True)):
        for position in range(len(row)):
            which = asked.of_token[offset + position]
            if position not in positions:
                assert which == len(asked.label)
                continue
            assert asked.label[which] == row[position + 1]
            assert asked.node[which] == trie.nodes_of_row[index][position]
            assert kinds is None or kinds[asked.row[which]] == kinds[index]
            expected.add((tuple(row[: position + 2].tolist()), kinds and kinds[index]))
        offset += len(row)
    assert len(asked.label) == len(asked.node) == len(asked.row) == len(expected)


@given(families(), st.integers(0, 30))
def test_micro_batches_hold_every_row_once_within_the_budget(rows: list[np.ndarray], spare: int) -> None:
    budget = max(map(len, rows)) + spare
    parts = micro_batches(rows, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert all(len(Trie([rows[row] for row in part])) <= budget for part in parts)


def test_rows_that_share_stay_together() -> None:
    rows = [np.array([family] * 10 + [row]) for row in range(4) for family in range(2)]
    assert sorted(sorted(part) for part in micro_batches(rows, 14)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_all_ranks_make_equally_many_groups() -> None:
    rows = [np.full(4, row) for row in range(5)]
    assert len(micro_batches(rows, 100, lambda groups, count: (3, count))) == 3


def test_what_cannot_be_grouped_is_refused_with_figures() -> None:
    rows = [np.full(4, row) for row in range(2)]
    with pytest.raises(ValueError, match="a row of 4 tokens exceeds the 3 of a micro-batch"):
        micro_batches(rows, 3)
    with pytest.raises(ValueError, match="3 micro-batches are needed on one rank, and another has 2 rows"):
        micro_batches(rows, 100, lambda groups, count: (3, count))


def test_neighbours_in_order_share_the_most() -> None:
    rows = [np.array(row) for row in ([1, 2, 3], [5], [1, 2, 4, 4], [1, 2, 3])]
    assert in_order(rows) == [(0, 0), (3, 3), (2, 2), (1, 0)]


@st.composite
def dealings(draw: st.DrawFn) -> tuple[list[str], list[int], list[int], int]:
    ranks = draw(st.integers(1, 4))
    count = ranks * draw(st.integers(1, 8))
    groups = draw(st.lists(st.sampled_from("abcde"), min_size=count, max_size=count))
    prompts = {group: draw(st.integers(1, 50)) for group in "abcde"}
    shared = [prompts[group] for group in groups]
    return groups, shared, [size + draw(st.integers(1, 50)) for size in shared], ranks


@given(dealings())
def test_every_row_is_dealt_once_and_every_rank_gets_equally_many(
    case: tuple[list[str], list[int], list[int], int],
) -> None:
    groups, shared, lengths, ranks = case
    dealt = deal(groups, shared, lengths, ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(groups)))
    assert {len(rows) for rows in dealt} == {len(groups) // ranks}
    for rows in dealt:
        changes = sum(groups[a] != groups[b] for a, b in itertools.pairwise(rows))
        assert changes == len({groups[row] for row in rows}) - 1, "rows of a group follow each other"


def test_groups_stay_whole_and_ranks_even_in_distinct_tokens() -> None:
    groups = list("abcdabcdabcdabcd")
    shared = [{"a": 400, "b": 300, "c": 200, "d": 100}[group] for group in groups]
    dealt = deal(groups, shared, [size + 10 for size in shared], 2)
    assert [{groups[row] for row in rows} for rows in dealt] == [{"a", "d"}, {"b", "c"}]


def test_ranks_are_even_in_attention_too() -> None:
    lengths = [60_000, 40_000, 30_000, 20_000, 10_000, 5_000]  # in tokens alone the first would be with the fourth
    assert deal(list("abcdef"), [1] * 6, lengths, 2) == [[0, 4, 5], [1, 2, 3]]


def test_a_group_is_parted_only_where_no_rank_has_room() -> None:
    dealt = deal(list("aaab"), [9, 9, 9, 1], [10, 11, 12, 2], 2)
    assert sorted(map(sorted, dealt)) == [[0, 1], [2, 3]]

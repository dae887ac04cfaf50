"""Every token has the version that its engine had when the token was made, whatever happens in between."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from seamless_verl.trajectory.seams import Seams

# What an engine does: a request comes ("begin"), makes tokens, ends and is told a little later, or the weights change.
STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "enter", "tokens", "end", "tell", "cut"]), st.integers(0, 3)), max_size=60
)


@given(STEPS)
def test_spans_are_what_the_engine_did(steps: list[tuple[str, int]]) -> None:
    seams, version = Seams(), 1
    made: dict[str, list[int]] = {}  # request -> the version of each of its tokens
    coming, running, ended = set[str](), set[str](), set[str]()
    for what, number in steps:
        name = f"r{number}"
        if what == "begin" and name not in made:
            seams.begin(name)
            made[name] = []
            coming.add(name)
        elif what == "enter" and name in coming:
            coming.discard(name)
            running.add(name)
        elif what == "tokens" and name in running:
            made[name] += [version] * 3
        elif what == "end" and name in running:
            running.discard(name)
            ended.add(name)
        elif what == "tell" and name in ended:
            ended.discard(name)
            _is_told(seams, name, made.pop(name), version)
        elif what == "cut":
            seams.cut(version, {each: len(made[each]) for each in running}, frozenset(coming))
            version += 1
    for name in list(made):
        _is_told(seams, name, made[name], version)


def _is_told(seams: Seams, name: str, tokens: list[int], version: int) -> None:
    middle = len(tokens) // 2
    halves = seams.spans(name, 0, middle, version) + seams.spans(name, middle, len(tokens), version)
    assert [made_by for made_by, count in halves for _ in range(count)] == tokens
    spans = seams.end(name, len(tokens), version)
    assert [made_by for made_by, count in spans for _ in range(count)] == tokens
    assert all(count > 0 for _, count in spans)


def test_a_stop_string_takes_tokens_back() -> None:
    """The engine counted 10 when the weights changed; the answer was cut to 8 of them."""
    seams = Seams()
    seams.begin("r")
    seams.cut(1, {"r": 10})
    assert seams.end("r", 8, 2) == [(1, 8)]


def test_what_failed_is_forgotten() -> None:
    seams = Seams()
    seams.begin("r")
    seams.cut(1, {"r": 5})
    seams.forget("r")
    assert seams.end("r", 5, 2) == [(2, 5)]

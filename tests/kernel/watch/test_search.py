"""What is found in conversations and dumps, and when an answer stops looking."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.watch.text_search import LOOK_S, MOST, Search, excerpt


def _turn(number: int, given: str, text: str, tool: str = "") -> dict[str, Any]:
    calls = [{"name": tool, "arguments": "{}"}] if tool else []
    return {"ordinal": number, "given": given, "text": text, "answer": {"tool_calls": calls}}


TURNS = {"s": [_turn(0, "Fix the Parser", "I look"), _turn(1, "ls", "done", tool="run_tests")]}


def _found(text: str) -> list[tuple[Any, ...]]:
    search = Search(text, TURNS.__getitem__, lambda: 0.0)
    assert search.look(["s"], 0) is None
    return [(find["turn"], find["where"], find["found"]) for find in search.finds]


def test_prompts_answers_and_tools_in_either_case() -> None:
    assert _found("PARSER") == [(0, "given", "Parser")]
    assert _found("i look") == [(0, "answer", "I look")]
    assert _found("run_tests") == [(1, "tool called", "run_tests")]
    assert _found("nowhere") == []


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", ['größe "x"\n', "naïve 猫", "a\\b", "É"])
def test_text_of_a_dump_however_json_spells_it(tmp_path: Path, text: str, ascii_only: bool) -> None:
    file = tmp_path / "3.jsonl"
    lines = [{"input": "q", "output": said, "score": 1.0, "step": 3, "uid": f"task_{i}_0"} for i, said in enumerate(["no", f"so {text} it is"])]  # fmt: skip  # noqa: E501
    file.write_text("".join(json.dumps(line, ensure_ascii=ascii_only) + "\n" for line in lines), encoding="utf-8")
    search = Search(text.swapcase().replace("SS", "ß"), TURNS.__getitem__, lambda: 0.0)
    search.look([file], 0)
    (find,) = search.finds
    assert (find["group"], find["index"], find["where"], find["found"]) == ("task", 1, "output", text)
    assert (find["before"], find["after"]) == ("so ", " it is")


def test_it_stops_when_the_time_is_up_and_says_where_to_go_on() -> None:
    clock = itertools.count(0.0, LOOK_S / 2)
    search = Search("look", lambda session: TURNS["s"], lambda: next(clock))
    onward = search.look(["s"] * 10, 4)
    assert onward == 6
    assert len(search.finds) == 2
    once = Search("look", lambda session: TURNS["s"], itertools.count(0.0, 2 * LOOK_S).__next__)
    assert once.look(["s"] * 3, 2) is None  # one place at least, or nobody gets on


def test_it_stops_when_there_is_enough() -> None:
    search = Search("look", lambda session: TURNS["s"], lambda: 0.0)
    assert search.look(["s"] * (MOST + 5), 0) == MOST


def test_an_excerpt_shows_what_stands_around() -> None:
    assert excerpt("x" * 100 + "FIND" + "y" * 100, "find") == {
        "before": "…" + "x" * 80, "found": "FIND", "after": "y" * 80 + "…",
    }  # fmt: skip
    assert excerpt("nothing", "find") is None

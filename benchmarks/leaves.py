"""Turns whose prompt extends a recorded leaf token by token, and that begin another row all the same.

    python -m benchmarks.leaves [--quick] [--json FILE]

Random agents that branch, compact, edit and respell what was said, retry and sample twice play sessions of 40 turns
over the kernel, with a toy template that also drops stop tokens and refuses to continue. Few words, so that
conversations meet. The judge keeps every conversation as a flat list of ids and knows nothing of trees. No GPU, no
engine, no HTTP.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.records import Record, arguments, report
from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
from seamless_verl.trajectory.matching import ExtensionRefused, Rendering
from seamless_verl.trajectory.messages import Message, Role, transcript_of
from seamless_verl.trajectory.rows import build_rows
from seamless_verl.trajectory.tokens import TurnRecord, path_to
from seamless_verl.trajectory.tree import SessionTree

_TURNS = 40  # of a session
_WORDS = ("a", "b", "ab", "ba", "a ")
_STOP = 9
_HEADERS = {Role.SYSTEM: 5, Role.USER: 6, Role.ASSISTANT: 7, Role.TOOL: 8}


class ToyTemplate:
    """One id per character and per header; an answer ends with a stop token, or with the next header instead."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def render_initial(self, messages: Sequence[Message], tools: Sequence[str]) -> Sequence[int]:
        return [token for message in messages for token in _written(message)] + [_HEADERS[Role.ASSISTANT]]

    def render_extension(
        self,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[str],
        known_ids: Sequence[int],
    ) -> Rendering:
        """Now and then refuses, drops the end of the answer, or writes it anew."""
        way = self._rng.choice(("append", "append", "append", "refuse", "drop", "drop"))
        if way == "refuse":
            raise ExtensionRefused("the toy template would not")
        added = self.render_initial(new_messages, tools)
        return Rendering(token_ids=added, num_dropped=1 if way == "drop" else 0)


def _written(message: Message) -> list[int]:
    stop = [_STOP] if message.role is Role.ASSISTANT else []
    return [_HEADERS[message.role], *(1 + ord(letter) % 4 for letter in message.content.strip()), *stop]


class NastyAgent:
    """Plays one session.

    ``hidden`` counts the turns that extend a leaf and do not continue one, ``changed`` the prompts that are not what
    the template gave.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._template = ToyTemplate(self._rng)
        self.tree = SessionTree()
        self.records: list[TurnRecord] = []
        self._histories: list[list[Message]] = []
        self._paths: dict[str, list[int]] = {}  # every answer's ids from the first one on
        self._continued: set[str] = set()
        self.counts: Counter[str] = Counter()

    def turn(self) -> None:
        """Ask, and be answered once or twice."""
        messages = self._request()
        match = self.tree.match(transcript_of(tuple(messages)))
        rendering = match.render(self._template)
        pending = self.tree.prepare(match, rendering)
        known = [] if rendering.fresh or match.known is None else list(match.known.path)
        prompt = [*known[: len(known) - rendering.num_dropped], *rendering.token_ids]
        self.counts["changed"] += prompt != list(pending.prompt_ids)
        extended = [name for name, ids in self._paths.items() if self._is_leaf(name) and prompt[: len(ids)] == ids]
        for number in range(self._rng.choice((1, 1, 1, 2))):
            answer = Message(role=Role.ASSISTANT, content=self._rng.choice(_WORDS))
            ids = _written(answer)[1:] if self._rng.random() < 0.7 else [self._rng.choice((1, 2, 3, 9))]
            above = self._commit(
                pending.seal(generation_id=f"g{len(self.records)}", generation=_generation(ids), answer=answer),
                [*prompt, *ids],
            )
            self._histories.append([*messages, answer])
            self.counts["turns"] += 1
            if number == 0 and extended:
                self.counts["extending"] += 1
                self.counts["hidden"] += not above & set(extended)

    def _commit(self, record: TurnRecord, path: list[int]) -> set[str]:
        """The answers that stand in full before this one in its row."""
        parts = path_to(self.tree.commit(record))
        self.records.append(record)
        self._paths[record.generation_id] = path
        above = {
            part.turn.generation_id
            for part, length in parts[:-1]
            if part.turn is not None and length == len(part.tokens)
        }
        self._continued |= above
        return above

    def _is_leaf(self, name: str) -> bool:
        return name not in self._continued

    def _request(self) -> list[Message]:
        rng = self._rng
        news = [Message(role=Role.USER, content=rng.choice(_WORDS)) for _ in range(rng.choice((0, 1, 1, 2)))]
        if not self._histories or rng.random() < 0.1:
            return [Message(role=Role.SYSTEM, content=rng.choice("ab")), *news]
        history = rng.choice(self._histories)
        move = rng.choice(("extend", "extend", "retry", "rewind", "compact", "edit", "respell"))
        if move == "retry":
            return history[:-1]
        if move == "compact":
            return [history[0], Message(role=Role.USER, content="ab"), *news]
        if move == "rewind":
            history = history[: rng.randint(1, len(history))]
        if move in ("edit", "respell"):
            at = rng.randrange(len(history))
            content = rng.choice(_WORDS) if move == "edit" else f" {history[at].content}\n"
            history = [*history[:at], replace(history[at], content=content), *history[at + 1 :]]
        return [*history, *news]


def _generation(ids: list[int]) -> Generation:
    return Generation(
        token_ids=tuple(ids),
        log_probs=(-1.0,) * len(ids),
        version_spans=(VersionSpan(version=0, num_tokens=len(ids)),),
        finish_reason=FinishReason.STOP,
    )


def restored(agent: NastyAgent) -> bool:
    """Whether a tree made of the records alone has the same rows."""
    tree = SessionTree()
    for record in agent.records:
        tree.commit(record)
    return build_rows(tree) == build_rows(agent.tree)


def measured(num_turns: int) -> Iterator[Record]:
    counts: Counter[str] = Counter()
    others = seed = 0
    while counts["turns"] < num_turns:
        agent = NastyAgent(seed)
        for _ in range(_TURNS):
            agent.turn()
        counts += agent.counts
        others += not restored(agent)
        seed += 1
    hidden = counts["hidden"]
    yield Record(name="leaves: turns of nasty agents", value=counts["turns"], unit="turns")
    yield Record(name="leaves: their prompt extends a leaf", value=counts["extending"], unit="turns")
    yield Record(name="leaves: and continues none", value=hidden, unit="turns", bar="0", holds=hidden == 0)
    changed = counts["changed"]
    yield Record(name="leaves: prompts changed", value=changed, unit="turns", bar="0", holds=changed == 0)
    yield Record(
        name="leaves: other rows after a restart", value=others, unit=f"of {seed} sessions", bar="0", holds=not others
    )


def main() -> int:
    options = arguments(__doc__ or "")
    return report(list(measured(4_000 if options.quick else 200_000)), options.json)


if __name__ == "__main__":
    sys.exit(main())

"""What a session has said, for clients of the responses dialect that refer to it instead of sending it again.

What was said is known of every answer, also after a restart: answers are in the journal. What was asked is not, and is
kept for the last few responses only; a client goes on from one of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.session.attempts import Attempt
from seamless_verl.trajectory.messages import Message

_NUM_ASKED = 4  # as many as `RecentTranscripts` keeps, whose messages they share


class Continuations:
    """An `Earlier` of `seamless_verl.proxy.calls`.

    Attributes:
        said: what each answer said, by the id of its generation.
        num_chars: of all that was said.
        stopped: what answers said that a stop string ended, and that string, by both together.
    """

    def __init__(self, answers: Iterable[Answer] = ()) -> None:
        self.said: dict[str, Message] = {}
        self.num_chars = 0
        self.stopped: dict[str, tuple[str, str]] = {}
        self._asked: deque[tuple[Attempt, Sequence[Mapping[str, Any]]]] = deque(maxlen=_NUM_ASKED)
        for answer in answers:
            self.answered(answer)

    def answered(self, answer: Answer) -> None:
        """An answer was recorded."""
        said = answer.message
        self.said[answer.id] = said
        if answer.stop_text:
            self.stopped[f"{said.content}{answer.stop_text}".strip()] = said.content, answer.stop_text
        self.num_chars += len(said.content) + len(said.reasoning) + sum(len(call.arguments) for call in said.tool_calls)

    def without_addition(self, message: Message) -> tuple[Message, str]:
        """An assistant's message as its answer was told, and what its agent wrote behind it.

        Agents put the stop string back that ended an answer, and may write more behind it (smolagents does both). The
        model did write the string; alone it is no addition.
        """
        text = message.content.strip()
        whole = max((known for known in self.stopped if text.startswith(known)), key=len, default="")
        if not whole:
            return message, ""
        content, stop = self.stopped[whole]
        if text == whole:
            return replace(message, content=content), ""
        if message.tool_calls or not whole.endswith(stop):  # calls stand behind the text; white space tells nothing
            return message, ""
        return replace(message, content=content), text[len(whole) - len(stop) :]

    def asked(self, attempt: Attempt, conversation: Sequence[Mapping[str, Any]]) -> None:
        """``attempt`` answers this conversation; its id is known later."""
        self._asked.append((attempt, conversation))

    def conversation(self, answer_id: str) -> Sequence[Mapping[str, Any]] | None:
        """What an answer was given to; None: it is not known, or no longer."""
        asked = ((attempt.answers[:1], conversation) for attempt, conversation in self._asked)
        return next((found for answers, found in asked if answers and answers[0].id == answer_id), None)

"""The mock engine with a book of every prompt and answer that crossed its wire, to hold rows against."""

from __future__ import annotations

from array import array

import msgspec

from benchmarks.mock_engine import Connection, PreparedAnswers


class Book:
    """What crossed the engine's wire: answers by prompt. The engine is a function of the prompt, so one is enough."""

    def __init__(self, answers: PreparedAnswers) -> None:
        self._ids = [array("i", ids) for ids in answers.ids]
        self._by_prompt: dict[bytes, array[int]] = {}

    def note(self, prompt: bytes, number: int) -> None:
        self._by_prompt[array("i", msgspec.json.decode(prompt)).tobytes()] = self._ids[number]

    def answer_to(self, prompt: list[int]) -> array[int] | None:
        return self._by_prompt.get(array("i", prompt).tobytes())


class NotedConnection(Connection):
    """The mock engine with a book."""

    def __init__(self, answers: PreparedAnswers, book: Book) -> None:
        super().__init__(answers, lambda: 0.004)
        self._book = book

    def _answered(self, prompt: bytes, number: int) -> None:
        self._book.note(prompt, number)

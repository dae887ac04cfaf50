"""One answer of a stream while it is generated: tokens in, settled text out."""

from __future__ import annotations

from collections.abc import Sequence

from seamless_verl.proxy.calls import ApiError, Delta, Token
from seamless_verl.proxy.engine import TokenChunk
from seamless_verl.proxy.session.attempts import Attempt
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.proxy.text.parsing import Settler, StopCutter
from seamless_verl.proxy.text.tokenizer import UNDECODED, TextDecoder
from seamless_verl.trajectory.generation import Generation
from seamless_verl.trajectory.messages import Message


class Draft:
    """Makes deltas of an answer's tokens. Invariant: what is shown is a prefix of what the answer says in the end.

    Args:
        attempt: takes the settled text as its ``deltas``.
        number: of the answer.
        settler: None for plain text.
        stops: stop strings; the text ends before the first of them.
        show_tokens: whether the client asked for log-probs.
    """

    def __init__(
        self,
        attempt: Attempt,
        number: int,
        renderer: TokenizerRenderer,
        settler: Settler | None,
        stops: Sequence[str],
        *,
        show_tokens: bool,
    ) -> None:
        self._attempt = attempt
        self._number = number
        self._renderer = renderer
        self._settler = settler
        self._decoder = TextDecoder(renderer.decode, renderer.open_ids)
        self._cutter = StopCutter(stops)
        # Which tokens a stop string takes with it is only known at the end.
        self._show_tokens = show_tokens and not stops
        self._has_stops = bool(stops)
        self._ids: list[int] = []

    def feed(self, chunk: TokenChunk) -> None:
        """Take tokens as the engine makes them."""
        self._ids.extend(chunk.token_ids)
        kept = [at for at, token in enumerate(chunk.token_ids) if token not in self._renderer.stop_token_ids]
        text = self._cutter.feed(self._decoder.feed([chunk.token_ids[at] for at in kept]))
        reasoning, content = self._settler.feed(text) if self._settler is not None else ("", text)
        tokens = tuple(tokens_of(chunk, kept, self._renderer)) if self._show_tokens else ()
        if reasoning or content or tokens:
            self._attempt.deltas.append(Delta(index=self._number, reasoning=reasoning, content=content, tokens=tokens))
            self._attempt.tell()

    def check(self, generation: Generation, message: Message) -> None:
        """Refuse an answer that takes back what was shown.

        Raises:
            ApiError: 502.
        """
        num = len(generation.token_ids)
        # A stop string across an interruption ends the answer before tokens that were streamed; its text was held back.
        is_cut = num < len(self._ids) and self._has_stops
        if list(generation.token_ids[: len(self._ids)]) != (self._ids[:num] if is_cut else self._ids):
            raise ApiError(502, "engine_error", "The engine took back tokens that it had streamed.")
        shown = [delta for delta in self._attempt.deltas if delta.index == self._number]
        reasoning = "".join(delta.reasoning for delta in shown)
        if not message.reasoning.startswith(reasoning) or not message.content.startswith(
            "".join(delta.content for delta in shown)
        ):
            raise ApiError(502, "stream_differs", "The whole answer reads differently from what was streamed of it.")


def tokens_of(chunk: TokenChunk | Generation, places: Sequence[int], renderer: TokenizerRenderer) -> list[Token]:
    """Tokens as clients see them; ``places`` are those to show."""
    shown = []
    for at in places:
        others = chunk.alternatives[at] if chunk.alternatives else ()
        ids = (chunk.token_ids[at], *(token for token, _ in others))
        text, *texts = (renderer.decode([token]) for token in ids)
        alternatives = tuple((other, float(value)) for other, (_, value) in zip(texts, others, strict=True))
        partial = any(UNDECODED in one for one in (text, *texts))
        raws = tuple(renderer.bytes_of(token) for token in ids) if partial else ()
        shown.append(Token(text, float(chunk.log_probs[at]), alternatives, raws))
    return shown

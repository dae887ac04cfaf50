"""Stand-ins, each named with the boundary it stands at. Everything else in the tests is the real thing.

In files of their own, since a replica's processes load them: `tests.scheduled_ahead` stands for CUDA's streams, and
``tests/gpu_runner`` for Triton's compiler, pinned memory and two of the kernels of vLLM's model runner of GPUs.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import httpx

from seamless_verl.memory.book import Held
from seamless_verl.proxy.client import ProxyAdmin, SessionHandle
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.engine import GenerationRequest, TokenChunk
from seamless_verl.proxy.http.app import ProxyDeps, make_app
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.trajectory.generation import FinishReason, Generation, PartialGeneration, VersionSpan
from seamless_verl.trajectory.matching import ExtensionRefused, Renderer, Rendering
from seamless_verl.trajectory.messages import Message, Role, ToolCall, Transcript, transcript_of
from seamless_verl.trajectory.rows import LedgerEntry, Row, audit_rows, build_rows, ledger_entry
from seamless_verl.trajectory.tokens import Segment, TurnRecord
from seamless_verl.trajectory.tree import PendingTurn, SessionTree

if TYPE_CHECKING:
    import anthropic
    import openai

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache(maxsize=16)
def small_tokenizer(template: str = CHATML, *, special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Any:
    """A real byte-level BPE tokenizer with merges, made on the spot; ``special[-1]`` ends turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the user says hello", "assistant system tool answer", "\n\nthe quick brown fox\n", "arguments name value"]
        * 4,
        trainer,
    )
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token=special[-1])
    fast.chat_template = template
    return fast


class ScriptedEngine:
    """Stands at the engine boundary: answers prompts from a script instead of a model.

    Args:
        tokenizer: writes the scripted texts as token ids, stop token included.
        script: from the prompt's text to the answer's text.
        delay_s: time a generation takes.
        num_versions: the tokens of one answer are spread over this many weight versions.
        streams: whether tokens are told one by one as they come.

    Attributes:
        permits: where there is one, each token that is streamed needs a permit first.
        after_tokens: fail once this many tokens were streamed.
        keeps: how many tokens of an answer it reports as progress, before the rest takes its time. A request that
            resumes from them gets the rest under another weight version.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Callable[[str], str] = lambda prompt: "ok",
        *,
        delay_s: float = 0.0,
        num_versions: int = 1,
        streams: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.delay_s = delay_s
        self.num_versions = num_versions
        self.requests: list[GenerationRequest] = []
        self.started = asyncio.Event()
        self.num_cancelled = 0
        self.failure: Exception | None = None
        self.streams = streams
        self.permits: asyncio.Semaphore | None = None
        self.after_tokens: int | None = None
        self.keeps = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(replace(request, on_progress=None))  # which holds the session
        if self.keeps and request.on_progress is not None and request.resume_from is None:
            request.on_progress(scripted_generation(self._ids(request)[: self.keeps], finish=FinishReason.ABORTED))
        self.started.set()
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.failure is not None and not self.streams:
            raise self.failure
        ids = self._ids(request)
        if request.resume_from is not None:
            return self._continued(request.resume_from, ids)
        max_tokens = request.sampling["max_tokens"]
        finish = FinishReason.STOP if len(ids) <= max_tokens else FinishReason.LENGTH
        generation = scripted_generation(
            ids[:max_tokens],
            finish=finish,
            num_versions=self.num_versions,
            num_alternatives=request.sampling.get("logprobs", 0),
        )
        await self._stream(generation, request)
        return generation

    def _ids(self, request: GenerationRequest) -> list[int]:
        text = self.script(self.tokenizer.decode(list(request.prompt_ids)))
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return ids[: self._end_of_stop(ids, request.sampling.get("stop") or ())]

    def _continued(self, earlier: Generation, ids: list[int]) -> Generation:
        whole = PartialGeneration({}, None)
        if whole.resume(earlier):
            return whole.generation()
        whole.add(scripted_generation(ids[len(earlier.token_ids) :], first_version=9))
        return whole.generation()

    def _end_of_stop(self, ids: list[int], stops: Sequence[str]) -> int:
        """Like vLLM's, an answer ends with the token that completes a stop string."""
        lengths = range(len(ids) + 1) if stops else ()
        return next((n for n in lengths if any(stop in self.tokenizer.decode(ids[:n]) for stop in stops)), len(ids))

    async def _stream(self, generation: Generation, request: GenerationRequest) -> None:
        if not self.streams or request.on_tokens is None:
            return
        try:
            for at, token in enumerate(generation.token_ids):
                if self.permits is not None:
                    await self.permits.acquire()
                if self.failure is not None and at == self.after_tokens:
                    raise self.failure
                chosen, others = generation.log_probs[at : at + 1], generation.alternatives[at : at + 1]
                request.on_tokens(TokenChunk(token_ids=(token,), log_probs=chosen, alternatives=others))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def scripted_generation(
    ids: Sequence[int],
    *,
    finish: FinishReason = FinishReason.STOP,
    num_versions: int = 1,
    first_version: int = 3,
    num_alternatives: int = 0,
) -> Generation:
    """A generation with a log-prob of its own for every token."""
    share, rest = divmod(len(ids), min(num_versions, len(ids)))
    lengths = [share + (number < rest) for number in range(min(num_versions, len(ids)))]
    return Generation(
        token_ids=tuple(ids),
        log_probs=tuple(-0.01 * (at + 1) - 0.001 * (token % 7) for at, token in enumerate(ids)),
        version_spans=tuple(
            VersionSpan(version=first_version + number, num_tokens=length) for number, length in enumerate(lengths)
        ),
        finish_reason=finish,
        alternatives=tuple(tuple((10 + n, -1.0 - n) for n in range(num_alternatives)) for _ in ids)
        if num_alternatives
        else (),
    )


class ScriptedRenderer:
    """Stands at the chat-template boundary: messages become numbers without any text.

    A message is ``role, words…, END``; words are numbered as they come up. The answer's END is generated by the model,
    the separator after it is not.
    """

    SEPARATOR = 9
    END = 8
    PROMPT = 7
    ROLES = (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL)

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self.refuses = False

    def word(self, text: str) -> int:
        return self._words.setdefault(text, 10 + len(self._words))

    def answer_ids(self, text: str) -> list[int]:
        """What a model would generate to say ``text``."""
        return [*(self.word(word) for word in text.split()), self.END]

    def _message(self, message: Message) -> list[int]:
        words = [message.reasoning, message.content, *(f"{c.name}({c.arguments})" for c in message.tool_calls)]
        ids = [self.word(word) for text in words for word in text.split()]
        return [1 + self.ROLES.index(message.role), *ids, self.END, self.SEPARATOR]

    def render_initial(self, messages: Sequence[Message], tools: Sequence[str]) -> list[int]:
        ids = [self.word(tool) for tool in tools]
        for message in messages:
            ids.extend(self._message(message))
        return [*ids, 3, self.PROMPT]

    def render_extension(
        self,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[str],
        known_ids: Sequence[int],
    ) -> Rendering:
        if self.refuses:
            raise ExtensionRefused("told to refuse")
        closing = [self.SEPARATOR] if known_ids[-1] == self.END else [self.END, self.SEPARATOR]
        new = [token for message in new_messages for token in self._message(message)]
        return Rendering(token_ids=[*closing, *new, 3, self.PROMPT])


def by_purpose(holdings: Iterable[Held]) -> dict[str, int]:
    """Bytes per purpose."""
    found: dict[str, int] = {}
    for held in holdings:
        found[held.what] = found.get(held.what, 0) + held.nbytes
    return found


def prepare_with(tree: SessionTree, renderer: Renderer, transcript: Transcript) -> PendingTurn:
    """Match, render and prepare in one go."""
    match = tree.match(transcript)
    return tree.prepare(match, match.render(renderer))


class ScriptedEdge:
    """Stands where the HTTP edge stands: takes requests through a tree and keeps the engine's ledger."""

    def __init__(self, renderer: Renderer | None = None) -> None:
        self.renderer = renderer or ScriptedRenderer()
        self.tree = SessionTree()
        self.ledger: list[LedgerEntry] = []

    def ask(
        self,
        messages: Sequence[Message],
        answer: Message | str,
        *,
        ids: Sequence[int] | None = None,
        tools: Sequence[str] = (),
        finish: FinishReason = FinishReason.STOP,
    ) -> Segment:
        """One request with its answer; ``ids`` are what the engine generated, by default the answer's words."""
        pending = prepare_with(self.tree, self.renderer, transcript_of(tuple(messages), tuple(tools)))
        return self.tree.commit(self.seal(pending, answer, ids=ids, finish=finish))

    def seal(
        self,
        pending: PendingTurn,
        answer: Message | str,
        *,
        ids: Sequence[int] | None = None,
        finish: FinishReason = FinishReason.STOP,
    ) -> TurnRecord:
        """The record of an answer to a prepared request; the engine's side of it is in the ledger."""
        message = answer if isinstance(answer, Message) else Message(role=Role.ASSISTANT, content=answer)
        if ids is None:
            assert isinstance(self.renderer, ScriptedRenderer)
            words = [message.reasoning, message.content, *(call.name for call in message.tool_calls)]
            ids = self.renderer.answer_ids(" ".join(words))
        generation = scripted_generation(ids, finish=finish, num_versions=1 + len(ids) % 3)
        generation_id = f"g{len(self.ledger)}"
        digest = blake2b(array("i", pending.prompt_ids), digest_size=16).digest()
        entry = ledger_entry(
            generation_id=generation_id,
            prompt_digest=digest,
            prompt_len=len(pending.prompt_ids),
            generation=generation,
        )
        self.ledger.append(entry)
        return pending.seal(generation_id=generation_id, generation=generation, answer=message)

    def rows(self) -> tuple[Row, ...]:
        """The session's rows, audited."""
        rows = build_rows(self.tree)
        report = audit_rows(rows, self.ledger)
        assert report.is_clean, report.violations
        return rows


def system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def assistant(content: str, *calls: ToolCall, reasoning: str = "") -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)


def tool(content: str, call_id: str = "") -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id=call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A real proxy on loopback over a scripted engine; only the engine is not real."""

    engine: ScriptedEngine
    deps: ProxyDeps
    server: ProxyServer
    admin: ProxyAdmin
    http: httpx.AsyncClient

    async def open(self, **options: Any) -> SessionHandle:
        return await self.admin.open_session(SessionSpec(**options))

    def sdk(self, handle: SessionHandle, **options: Any) -> openai.AsyncOpenAI:
        """The real OpenAI client, as an agent would make it."""
        import openai

        return openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, **options)

    def claude(self, handle: SessionHandle, **options: Any) -> anthropic.AsyncAnthropic:
        """The real Anthropic client; it puts ``/v1`` before its paths itself."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=handle.base_url.removesuffix("/v1"), api_key=handle.api_key, **options)

    async def post(
        self, handle: SessionHandle, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> httpx.Response:
        """One request, a chat completion by default, without any SDK around it."""
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {handle.api_key}", **headers})


@asynccontextmanager
async def serving(
    script: Callable[[str], str] = lambda prompt: "ok",
    *,
    delay_s: float = 0.0,
    template: str = CHATML,
    streams: bool = False,
    sees: bool = False,
    **options: Any,
) -> AsyncIterator[Served]:
    """Start a proxy, stop it at the end; ``options`` go to :class:`ProxyDeps`. ``sees``: the model takes pictures."""
    if sees:
        from seamless_verl.proxy.text.pictures import ProcessorReader
        from tests.pictures import small_processor

        options["images"] = ProcessorReader(small_processor(), {}, max_pixels=1_000_000)
    tokenizer = small_processor().tokenizer if sees else small_tokenizer(template)
    engine = ScriptedEngine(tokenizer, script, delay_s=delay_s, num_versions=2, streams=streams)
    renderer = TokenizerRenderer(
        tokenizer,
        placeholder=options["images"].placeholder if sees else None,
        others=[small_processor().video_token_id] if sees else (),
    )
    deps = ProxyDeps(engine=engine, renderer=renderer, admin_key="admin-key", model="tiny", **options)
    server = ProxyServer(make_app(deps), drain_s=1.0)
    base_url = await server.start()
    admin = ProxyAdmin(base_url, "admin-key")
    try:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=20) as http:
            yield Served(engine=engine, deps=deps, server=server, admin=admin, http=http)
    finally:
        await admin.close()
        await server.stop()


class ScriptedTransferQueue:
    """TransferQueue's key-value functions over a dict, without Ray; stands at ``transfer_queue.kv_*``."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}
        self.fields: dict[str, dict[str, Any]] = {}

    def install(self, monkeypatch: Any) -> ScriptedTransferQueue:
        import transfer_queue

        for name in ("kv_list", "kv_clear", "kv_batch_get", "kv_batch_put"):
            monkeypatch.setattr(transfer_queue, name, getattr(self, name))
        return self

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return {name: {key: dict(tag) for key, tag in keys.items()} for name, keys in self.tags.items()}

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)
            self.fields.pop(key, None)

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]], fields: Any = None
    ) -> None:
        for number, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            self.tags.setdefault(partition_id, {}).setdefault(key, {}).update(tag)
            if fields is not None:
                self.fields[key] = fields[number]

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        return {name: [self.fields[key][name] for key in keys] for name in select_fields}

"""Pictures of the stand-alone proxy: what a vLLM server is shown, what is recorded, and what it must not generate."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.client import ProxyAdmin, SessionHandle
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.deploy.standalone import Ready, StandaloneConfig, serve
from seamless_verl.proxy.engine import TokenChunk
from seamless_verl.proxy.engines.vllm_http import TOKENS, BadAnswer, EventReader, read_answer
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.pictures import open_image
from seamless_verl.proxy.text.tokenizer import FolderTokenizer
from tests.edge.proxy.test_templates import MOVING_SYSTEM
from tests.picture_server import DEFAULTS, PictureServer, model_folder
from tests.pictures import picture, small_processor
from tests.standalone import KEY, save_tokenizer

pytest.importorskip("PIL")
RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255), (160, 70))
BANNED = ["<|image_pad|>", "<|video_pad|>"]


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(data).decode()}"}}


def _user(*parts: bytes | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [_part(p) if isinstance(p, bytes) else {"type": "text", "text": p} for p in parts],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A stand-alone proxy in front of the server."""

    ready: Ready
    admin: ProxyAdmin
    http: httpx.AsyncClient

    async def open(self, **options: Any) -> SessionHandle:
        return await self.admin.open_session(SessionSpec(**options))

    async def ask(self, handle: SessionHandle, messages: list[Any], **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {handle.api_key}"}
        body = {"model": "m", "messages": messages, **options}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)


@contextlib.asynccontextmanager
async def _proxy(url: str, folder: Path, record: Path | None = None) -> AsyncIterator[Running]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = StandaloneConfig(
        engine=url,
        model="tiny",
        tokenizer=str(folder),
        record=record,
        host="127.0.0.1",
        port=0,
        admin_key=KEY,
        drain_s=1,
    )
    serving = asyncio.create_task(serve(config, stop=stop, ready=ready.set_result))
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    admin = ProxyAdmin(ready.result().base_url, KEY)
    try:
        async with httpx.AsyncClient(base_url=ready.result().base_url, trust_env=False, timeout=20) as http:
            yield Running(ready=ready.result(), admin=admin, http=http)
    finally:
        await admin.close()
        stop.set()
        await serving
        if record is not None:
            (record / "lock").unlink()  # it is held until the process ends, which is this one


@pytest.fixture
async def vllm() -> AsyncIterator[tuple[PictureServer, str]]:
    vllm = PictureServer()
    server = ProxyServer(vllm.app, drain_s=1)
    yield vllm, await server.start()
    await server.stop()


async def test_a_template_that_moves_the_system_message_is_told_once_at_the_start(
    vllm: tuple[PictureServer, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path / "model")
    async with _proxy(vllm[1], folder):
        assert "anew with every turn" not in caplog.text
    (folder / "chat_template.jinja").write_text(MOVING_SYSTEM)
    async with _proxy(vllm[1], folder) as proxy:
        handle = await proxy.open()
        for _ in range(2):
            assert (await proxy.ask(handle, [{"role": "user", "content": "hi"}])).status_code == 200
    assert caplog.text.count("writes conversations with a system message anew with every turn") == 1


async def test_pictures_of_several_turns_stand_where_the_recorded_prompt_has_them(
    vllm: tuple[PictureServer, str], tmp_path: Path
) -> None:
    server, url = vllm
    folder = model_folder(tmp_path / "model")
    history: list[Any] = []
    async with _proxy(url, folder, tmp_path / "record") as proxy:
        assert proxy.ready.no_images_reason == ""
        num_tried, handle = len(server.shown), await proxy.open()
        for turn in (_user("hi"), _user(RED, "what?"), _user("and", BLUE, RED)):
            history.append(turn)
            answer = await proxy.ask(handle, history)
            assert (answer.status_code, answer.headers["x-seamless-match"]) == (200, "clean"), answer.text
            history.append(answer.json()["choices"][0]["message"])
        assert server.shown[num_tried:] == [open_image(data).tobytes() for data in (RED, BLUE)], "read once each"
    async with _proxy(url, folder, tmp_path / "record") as proxy:  # another process: the pictures are read again
        history.append(_user("sure?"))
        answer = await proxy.ask(handle, history)
        assert (answer.status_code, answer.headers["x-seamless-match"]) == (200, "clean"), answer.text
        result = await proxy.admin.close_session(handle.id)
    (row,), (second, third, fourth) = result.rows, _turns(server.asked)
    assert result.audit.is_clean
    assert [result.images[digest] for digest in row.images] == [RED, BLUE, RED]
    for body, files in ((second, [RED]), (third, [RED, BLUE, RED]), (fourth, [RED, BLUE, RED])):
        ids, places = body["token_ids"], body["features"]["mm_placeholders"]["image"]
        assert ids == list(row.token_ids[: len(ids)])
        assert [[ids[p["offset"] - 1], *ids[p["offset"] :][: p["length"] + 1]] for p in places] == [
            _tokens(data) for data in files
        ]
        assert body["features"]["mm_hashes"]["image"] == [
            blake2b(open_image(data).tobytes()).hexdigest() for data in files
        ]
    (alone,) = _turns(server.completed)
    assert alone["prompt"] == list(row.token_ids[: len(alone["prompt"])])
    assert len({row.log_probs[turn.start] for turn in row.turns}) == 3, "of no, one and three pictures"


def _turns(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is tried when a proxy starts."""
    return [body for body in bodies if not body["request_id"].startswith("probe-")]


def _tokens(data: bytes) -> list[int]:
    """A picture between its two borders, as the model's own processor writes it."""
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    ids: list[int] = small_processor()(text=[text], images=[open_image(data)])["input_ids"][0]
    return ids


async def test_the_server_is_shown_the_pixels_that_training_reads(
    vllm: tuple[PictureServer, str], tmp_path: Path
) -> None:
    from PIL import Image

    turned, clear, file = Image.Exif(), Image.new("RGBA", (90, 60), (255, 0, 0, 0)), BytesIO()
    turned[0x0112] = 6  # viewers, and vLLM, turn it by 90 degrees
    clear.putpixel((0, 0), (0, 255, 0, 0))
    clear.save(file, "PNG", exif=turned)
    server, url = vllm
    async with _proxy(url, model_folder(tmp_path / "model")) as proxy:
        assert (await proxy.ask(await proxy.open(), [_user(file.getvalue())])).status_code == 200
    assert server.shown[-1] == open_image(file.getvalue()).tobytes() == bytes([0, 255, 0] + [255, 0, 0] * (90 * 60 - 1))


async def test_placeholders_are_never_generated(vllm: tuple[PictureServer, str], tmp_path: Path) -> None:
    server, url = vllm
    async with _proxy(url, model_folder(tmp_path / "model")) as proxy:
        handle = await proxy.open(sampling={"temperature": 1.0})
        assert (await proxy.ask(handle, [_user("hi")])).status_code == 200
        assert (await proxy.ask(handle, [_user(RED)], top_p=0.9)).status_code == 200
        assert server.completed[-1]["bad_words"] == BANNED
        sampling = server.asked[-1]["sampling_params"]
        assert sampling.pop("max_tokens") > 100
        # The server's defaults hold where nobody says otherwise, as they do for /v1/completions, but for its penalties.
        said = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.0, "min_p": 0.0}
        expected = {**DEFAULTS, **said, "logprobs": 0, "bad_words": BANNED}
        assert {name: server.completed[-1][name] for name in ("repetition_penalty", "min_p")}.items() <= said.items()
        assert sampling == {**expected, "skip_special_tokens": False, "extra_args": {}}
        for token in (small_processor().image_token_id, small_processor().video_token_id):
            server.says = [token, token]  # as a server does that does not know `bad_words`
            for turn in (_user("hi"), _user(RED)):
                answer = await proxy.ask(handle, [turn])
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
                assert "a placeholder" in answer.json()["error"]["message"]
        for text, said in (("<|image_pad|>", "no text may name one"), ("<|video_pad|>", "stands for a video")):
            answer = await proxy.ask(handle, [_user(text)])
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]
        result = await proxy.admin.close_session(handle.id)
        assert (result.audit.is_clean, result.kinds) == (True, {"clean": 1, "fork": 1})


async def test_a_model_without_eyes_is_neither_shown_nor_forbidden_anything(
    vllm: tuple[PictureServer, str], tmp_path: Path
) -> None:
    server, url = vllm
    folder = save_tokenizer(tmp_path / "model", small_processor().tokenizer)
    async with _proxy(url, folder) as proxy:
        handle = await proxy.open()
        assert (await proxy.ask(handle, [_user("hi")])).status_code == 200
        answer = await proxy.ask(handle, [_user(RED)])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_content")
        assert "this model takes text only" in answer.json()["error"]["message"]
    assert proxy.ready.no_images_reason == ""
    assert (server.shown, server.asked) == ([], [])
    assert all("bad_words" not in body for body in server.completed)


def _without(*names: str) -> Any:
    def edit(rendered: dict[str, Any]) -> dict[str, Any]:
        *path, last = names
        inner = rendered
        for name in path:
            inner = inner[name]
        inner[last] = None
        return rendered

    return edit


def _sparse(rendered: dict[str, Any]) -> dict[str, Any]:
    place = rendered["features"]["mm_placeholders"]["image"][0]
    rendered["token_ids"][place["offset"] + 1] = 7  # e.g. the end of a row of patches
    return rendered


def _cached(rendered: dict[str, Any]) -> dict[str, Any]:
    rendered["features"]["kwargs_data"]["image"] = [None]
    return rendered


def _two(rendered: dict[str, Any]) -> dict[str, Any]:
    rendered["features"]["mm_hashes"]["image"] *= 2
    return rendered


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"status": 404}, "no /v1/chat/completions/render; pictures need a vLLM of 0.27 or later"),
        ({"status": 400}, "the model's processor refuses it"),
        ({"status": 500}, "answered 500"),
        ({"is_blind": True}, "does not look at pictures; pictures need a vLLM of 0.27 or later"),
        ({"edit": _without("features")}, "answers no tensors"),
        ({"edit": _without("features", "kwargs_data")}, "answers no tensors"),
        ({"edit": _without("token_ids")}, "answers no token ids"),
        ({"edit": _cached}, "--mm-processor-cache-gb 0"),
        ({"edit": _two}, "something else of one picture"),
        ({"edit": _sparse}, "not a run of its image token"),
    ],
)
async def test_a_server_that_cannot_be_shown_pictures_is_named_at_the_start_and_to_whoever_sends_one(
    vllm: tuple[PictureServer, str], tmp_path: Path, broken: dict[str, Any], why: str
) -> None:
    server, url = vllm
    for name, value in broken.items():
        setattr(server, name, value)
    async with _proxy(url, model_folder(tmp_path / "model")) as proxy:
        assert why in proxy.ready.no_images_reason
        handle = await proxy.open()
        answer = await proxy.ask(handle, [_user("see", RED)])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_content")
        assert answer.json()["error"]["param"] == "messages.0.content.1"
        assert why in answer.json()["error"]["message"]
        assert (await proxy.ask(handle, [_user("hi")])).status_code == 200
        assert server.completed[-1]["bad_words"] == BANNED


async def test_a_picture_that_cannot_be_read_is_refused_or_waits(
    vllm: tuple[PictureServer, str], tmp_path: Path
) -> None:
    server, url = vllm
    folder, history = model_folder(tmp_path / "model"), [_user(RED)]
    async with _proxy(url, folder, tmp_path / "record") as proxy:
        handle = await proxy.open()
        for file, said in ((RED[:50], "cannot be read"), (picture((9, 9, 9), (1, 300)), "aspect ratio")):
            answer = await proxy.ask(handle, [_user(file)])
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
            assert said in answer.json()["error"]["message"]
        server.status = 503
        answer = await proxy.ask(handle, [_user(BLUE)])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"]
        server.status = 200
        answer = await proxy.ask(handle, history)
        history += [answer.json()["choices"][0]["message"], _user("on")]
    server.edit = lambda rendered: _longer(rendered, small_processor().image_token_id)
    async with _proxy(url, folder, tmp_path / "record") as proxy:  # the server was started again, with other settings
        answer = await proxy.ask(handle, history)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "engine_refused")
        assert "with the settings that this session began with" in answer.json()["error"]["message"]
    server.edit, server.is_blind = lambda rendered: rendered, True
    async with _proxy(url, folder, tmp_path / "record") as proxy:  # or by another vLLM
        answer = await proxy.ask(handle, history)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_content")


def _longer(rendered: dict[str, Any], placeholder: int) -> dict[str, Any]:
    place = rendered["features"]["mm_placeholders"]["image"][0]
    rendered["token_ids"].insert(place["offset"], placeholder)
    place["length"] += 1
    return rendered


def test_a_placeholder_that_is_no_token_is_an_error_at_the_start(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"image_token_index": 10**6}))
    tokenizer = FolderTokenizer(folder)
    with pytest.raises(ConfigError, match="no token 1000000, which config.json names"):
        _ = tokenizer.placeholders


def test_the_template_of_a_processor_is_found_in_its_old_place(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "chat_template.jinja").rename(folder / "kept")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "text only"}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": (folder / "kept").read_text()}))
    shown = [{"role": "user", "content": [{"type": "image"}]}]
    text = FolderTokenizer(folder).apply_chat_template(shown, tools=None, tokenize=False, add_generation_prompt=False)
    assert text.count("<|image_pad|>") == 1


# As vLLM 0.27.1 wrote them for ``logprobs: 2`` (fields that nobody reads left out).
EVENTS = [
    '{"request_id":"g","choices":[{"index":0,"logprobs":{"content":[{"token":"token_id:298","logprob":-2.95,"bytes":null,'
    '"top_logprobs":[{"token":"token_id:298","logprob":-2.95,"bytes":null},{"token":"token_id:36","logprob":-1.15,'
    '"bytes":null},{"token":"token_id:9","logprob":-1.5,"bytes":null}]}]},"finish_reason":null,"token_ids":[298],'
    '"routed_experts":null}],"usage":null}',
    '{"request_id":"g","choices":[{"index":0,"logprobs":{"content":[{"token":"token_id:5","logprob":-0.25,"bytes":null,'
    '"top_logprobs":[{"token":"token_id:5","logprob":-0.25,"bytes":null},{"token":"token_id:7","logprob":-3.5,'
    '"bytes":null}]}]},"finish_reason":"stop","token_ids":[5],"routed_experts":null}],"usage":null}',
    "[DONE]",
]


def test_tokens_of_the_generate_route_are_told_as_they_come() -> None:
    chunks: list[TokenChunk] = []
    reader = EventReader(chunks.append, 2, TOKENS)
    for event in EVENTS:
        reader.feed(f"data: {event}\n\n".encode())
    assert [chunk.token_ids for chunk in chunks] == [[298], [5]]
    (token_ids, log_probs, alternatives), finish_reason = reader.answer()
    assert (token_ids, log_probs) == ([298, 5], [-2.95, -0.25])
    assert alternatives == [((36, -1.15), (9, -1.5)), ((5, -0.25), (7, -3.5))]
    assert finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "story"),
    [
        ('{"choices":[{"token_ids":[5],"logprobs":null}]}', "no log-probs"),
        ('{"choices":[{"token_ids":[5],"logprobs":{"content":[{"token":"token_id:6","logprob":-1.0}]}}]}', "not those"),
        ('{"choices":[{"token_ids":[5],"logprobs":{"content":[{"token":"five","logprob":-1.0}]}}]}', "no token ids"),
        ('{"choices":[]}', "out of range"),
        ("[]", "Expected"),
    ],
)
def test_an_answer_that_contradicts_itself_is_none(body: str, story: str) -> None:
    with pytest.raises(BadAnswer, match=story):
        read_answer(body.encode(), 0, TOKENS)


async def test_an_answer_about_a_picture_streams(vllm: tuple[PictureServer, str], tmp_path: Path) -> None:
    server, url = vllm
    async with _proxy(url, model_folder(tmp_path / "model")) as proxy:
        handle = await proxy.open()
        answer = await proxy.ask(handle, [_user(RED)], stream=True, logprobs=True, top_logprobs=20)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        told = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert "".join(told) == "ok"
        assert server.asked[-1]["stream"] is True
        assert server.asked[-1]["sampling_params"]["logprobs"] == 20
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean

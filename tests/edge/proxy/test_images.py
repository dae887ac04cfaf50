"""Pictures through a real Qwen2.5-VL processor: what reaches the engine, the tree and the rows; what is refused."""

from __future__ import annotations

import contextlib
import sqlite3
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.handover import FolderSink
from seamless_verl.proxy.text.pictures import BadImage, open_image
from tests.fakes import Served, serving
from tests.pictures import picture, small_processor

pytest.importorskip("PIL")
ADMIN = {"authorization": "Bearer admin-key"}
RED, BLUE, WIDE = picture((255, 0, 0)), picture((0, 0, 255)), picture((0, 255, 0), (200, 60))


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _url(data), "detail": "high"}}


def _chat(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": list(parts), **more}]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _anthropic(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}}


def _processed(messages: list[dict[str, Any]], *files: bytes) -> list[int]:
    """The prompt as the model's own processor writes it."""
    from PIL import Image

    processor = small_processor()
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = [Image.open(BytesIO(data)) for data in files]
    ids: list[int] = processor(text=[text], images=pictures)["input_ids"][0]
    return ids


async def test_the_engine_gets_what_the_models_own_processor_makes_and_the_row_has_it() -> None:
    async with serving(sees=True) as proxy:
        handle = await proxy.open()
        body = _chat(_text("look:"), _part(RED), _part(WIDE), _text("same?"))
        answer = await proxy.post(handle, body)
        assert answer.status_code == 200, answer.text
        (request,) = proxy.engine.requests
        parts = [_text("look:"), {"type": "image"}, {"type": "image"}, _text("same?")]
        prompt = _processed([{"role": "user", "content": parts}], RED, WIDE)
        assert list(request.prompt_ids) == prompt
        assert list(request.images) == [RED, WIDE]
        result = await proxy.admin.close_session(handle.id)
        (row,) = result.rows
        assert result.audit.is_clean
        assert list(row.token_ids[: row.prompt_len]) == prompt
        assert [result.images[digest] for digest in row.images] == [RED, WIDE]


async def test_a_conversation_about_a_picture_extends_itself() -> None:
    async with serving(sees=True) as proxy:
        handle = await proxy.open()
        history = _chat(_part(RED), _text("what?"))["messages"]
        for more in (_text("and?"), _part(BLUE), _part(RED)):
            answer = await proxy.post(handle, {"model": "m", "messages": history})
            assert answer.headers["x-seamless-match"] == "clean"
            message = answer.json()["choices"][0]["message"]
            history = [*history, message, {"role": "user", "content": [more]}]
        await proxy.post(handle, {"model": "m", "messages": history})
        first, *_, last = proxy.engine.requests
        assert list(last.prompt_ids[: len(first.prompt_ids)]) == list(first.prompt_ids)
        assert list(last.images) == [RED, BLUE, RED]
        result = await proxy.admin.close_session(handle.id)
        (row,) = result.rows
        assert result.audit.is_clean
        assert [result.images[digest] for digest in row.images] == [RED, BLUE, RED]
        assert len(result.images) == 2


async def test_the_same_tokens_with_another_picture_are_another_branch() -> None:
    async with serving(sees=True) as proxy:
        handle = await proxy.open()
        first = await proxy.post(handle, _chat(_part(RED), _text("what?")))
        other = await proxy.post(handle, _chat(_part(BLUE), _text("what?")))
        history = _chat(_part(BLUE), _text("what?"))["messages"]
        history += [other.json()["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        on = await proxy.post(handle, {"model": "m", "messages": history})
        one, two, three = proxy.engine.requests
        assert list(one.prompt_ids) == list(two.prompt_ids)  # to the model's tokens they are the same
        assert [answer.headers["x-seamless-match"] for answer in (first, other, on)] == ["clean", "fork", "clean"]
        assert (list(two.images), list(three.images)) == ([BLUE], [BLUE])
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        shown = {len(row.turns): [result.images[digest] for digest in row.images] for row in result.rows}
        assert shown == {1: [RED], 2: [BLUE]}


async def test_a_repeated_request_with_its_picture_is_a_retry() -> None:
    async with serving(sees=True) as proxy:
        handle = await proxy.open()
        one = await proxy.post(handle, _chat(_part(RED)))
        again = await proxy.post(handle, _chat(_part(RED)), **{"x-stainless-retry-count": "1"})
        other = await proxy.post(handle, _chat(_part(BLUE)), **{"x-stainless-retry-count": "1"})
        assert one.json()["id"] == again.json()["id"] != other.json()["id"]
        assert len(proxy.engine.requests) == 2


async def test_every_dialect_shows_the_same_pictures_at_the_same_places() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    openai = {
        "messages": [
            {"role": "user", "content": [_text("a"), _part(RED)]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [_text("shot"), _part(BLUE)]},
        ]
    }
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [_text("shot"), _anthropic(BLUE)]}
    anthropic = {
        "max_tokens": 20,
        "messages": [
            {"role": "user", "content": [_text("a"), _anthropic(RED)]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }

    def said(text: str) -> dict[str, Any]:
        return {"type": "input_text", "text": text}

    def shown(data: bytes) -> dict[str, Any]:
        return {"type": "input_image", "image_url": _url(data), "detail": "auto"}

    responses = {
        "input": [
            {"role": "user", "content": [said("a"), shown(RED)]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [said("shot"), shown(BLUE)]},
        ]
    }
    bodies = {"chat/completions": openai, "messages": anthropic, "responses": responses}
    async with serving(sees=True) as proxy:
        for path, body in bodies.items():
            answer = await proxy.post(await proxy.open(), {"model": "m", **body}, f"/v1/{path}")
            assert answer.status_code == 200, answer.text
        one, two, three = proxy.engine.requests
        assert list(one.prompt_ids) == list(two.prompt_ids) == list(three.prompt_ids)
        assert list(one.images) == list(two.images) == list(three.images) == [RED, BLUE]
        counted = {key: value for key, value in anthropic.items() if key != "max_tokens"}
        answer = await proxy.post(await proxy.open(), {"model": "m", **counted}, "/v1/messages/count_tokens")
        assert answer.json() == {"input_tokens": len(one.prompt_ids)}


def _far(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (_chat(_far("http://169.254.169.254/latest")), "unsupported_content", "nothing is fetched"),
        (_chat(_far("file:///etc/passwd")), "unsupported_content", "nothing is fetched"),
        (_chat(_far("data:text/plain;base64,aGk=")), "unsupported_content", "data:image"),
        (_chat(_far("data:image/png;base64,???")), "invalid_image", "messages.0.content.0"),
        (_chat(_far("data:image/png;base64,é")), "invalid_image", "base64"),
        (_chat(_text("x"), _far("data:image/png;base64,aGk=")), "invalid_image", "messages.0.content.1"),
        (_chat(_part(RED[:60])), "invalid_image", "cannot be read"),
        (_chat(_part(picture((0, 0, 0), (1001, 1000)))), "invalid_image", "1000000 are the limit"),
        (_chat(_part(picture((0, 0, 0), (900, 1)))), "invalid_image", "processor refuses"),
        (_chat(_far(_url(RED), detail="low")), "unsupported_value", "not low"),
        (_chat(_part(RED), role="system"), "unsupported_content", "user and tool"),
        (_chat(_part(RED), role="assistant"), "unsupported_content", "user and tool"),
        (_chat(_text("<|image_pad|>")), "invalid_value", "1 places for 0 pictures"),
        (_chat(_part(RED), _text("<|image_pad|>")), "invalid_value", "2 places for 1 pictures"),
        (_chat(_part(RED), _text("<|video_pad|>")), "invalid_value", "stands for a video"),
    ],
)
async def test_what_is_no_picture_or_not_here_is_refused_by_name(body: Any, code: str, said: str) -> None:
    async with serving(sees=True) as proxy:
        answer = await proxy.post(await proxy.open(), body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
        assert said in answer.json()["error"]["message"]
        assert proxy.engine.requests == []


@pytest.mark.parametrize("prompt", ["a<|image_pad|>b", [9, small_processor().image_token_id], "<|video_pad|>"])
async def test_a_text_completion_cannot_name_a_picture(prompt: Any) -> None:
    async with serving(sees=True) as proxy:
        answer = await proxy.post(await proxy.open(), {"model": "m", "prompt": prompt}, "/v1/completions")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert "stands for a picture" in answer.json()["error"]["message"]
        assert proxy.engine.requests == []


async def test_pictures_have_caps() -> None:
    limits = Limits(max_image_bytes=len(WIDE) + 1000, max_session_image_bytes=len(RED) + len(BLUE))
    async with serving(sees=True, limits=limits) as proxy:
        handle = await proxy.open()
        noise = b64encode(bytes(len(WIDE) + 1100)).decode()
        large = await proxy.post(handle, _chat(_far(f"data:image/png;base64,{noise}")))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "image_too_large")
        assert (await proxy.post(handle, _chat(_part(RED), _part(BLUE), _part(RED)))).status_code == 200
        full = await proxy.post(handle, _chat(_part(WIDE)))
        assert (full.status_code, full.json()["error"]["code"]) == (413, "too_many_images")
    async with serving(sees=True, limits=Limits(max_session_images=1)) as proxy:
        handle = await proxy.open()
        many = await proxy.post(handle, _chat(_part(RED), _part(BLUE)))
        assert (many.status_code, many.json()["error"]["code"]) == (413, "too_many_images")
        assert (await proxy.post(handle, _chat(_part(RED), _part(RED)))).status_code == 200


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]), st.data())
def test_a_file_that_was_tampered_with_is_a_picture_or_a_refusal(form: str, data: st.DataObject) -> None:
    whole = bytearray(picture((9, 99, 200), (40, 30), form))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(BadImage):
        assert open_image(file, max_pixels=1_000_000).mode == "RGB"


def _result_with(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": list(blocks)}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("chat/completions", _chat(_text("x"), _part(RED)), "messages.0.content.1"),
        (
            "messages",
            {"system": "s", "max_tokens": 9, "messages": [{"role": "user", "content": [_anthropic(RED)]}]},
            "messages.0.content.0",
        ),
        (
            "messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": [_result_with(_text("x"), _anthropic(RED))]}]},
            "messages.0.content.0.content.1",
        ),
        (
            "responses",
            {"instructions": "s", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input.0.content.0",
        ),
    ],
)
async def test_a_model_without_eyes_says_where_the_picture_is(path: str, body: dict[str, Any], place: str) -> None:
    async with serving() as proxy:
        answer = await proxy.post(await proxy.open(), {"model": "m", **body}, f"/v1/{path}")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "unsupported_content"
        assert f"{place} is a picture; this model takes text only" in error["message"]
        assert proxy.engine.requests == []


async def test_pictures_survive_the_process_and_go_with_their_session(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    history: list[Any] = _chat(_part(RED), _text("what?"))["messages"]
    journal = SqliteJournal(path)
    async with serving(sees=True, journal=journal) as proxy:
        handle = await proxy.open()
        history.append((await _ask(proxy, handle, history))["choices"][0]["message"])
        before = list(proxy.engine.requests[0].prompt_ids)
    await journal.close()
    journal = SqliteJournal(path)
    async with serving(sees=True, journal=journal) as proxy:
        journal.resume(proxy.deps.sessions)
        history.append({"role": "user", "content": [_part(BLUE), _part(RED)]})
        await _ask(proxy, handle, history)
        (request,) = proxy.engine.requests
        assert list(request.prompt_ids[: len(before)]) == before
        assert list(request.images) == [RED, BLUE, RED]
        result = await proxy.admin.close_session(handle.id)
        assert (result.audit.is_clean, result.kinds) == (True, {"clean": 2})
        assert set(result.images.values()) == {RED, BLUE}
    await journal.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM images").fetchone() == (0,)
    db.close()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
async def test_pictures_are_recorded_beside_the_rows_and_a_late_close_has_them(tmp_path: Path, form: str) -> None:
    """The answer to a close is lost, the process is started again, the close is repeated, and the journal is empty."""
    journal, sink = SqliteJournal(tmp_path / "j.sqlite"), FolderSink(tmp_path, parquet=form == "parquet")
    bodies = [_chat(_part(RED), _text("what?"), _part(BLUE), _part(RED)), _chat(_text("no picture")), _chat(_part(RED))]
    async with serving(sees=True, journal=journal, sink=sink) as proxy:
        handles = [await proxy.open() for _ in bodies]
        for handle, body in zip(handles, bodies, strict=True):
            assert (await proxy.post(handle, body)).status_code == 200
        told = [await _closed(proxy, handle) for handle in handles]
    await journal.close()
    shown = [[RED, BLUE, RED], [], [RED]]
    for result, files in zip(told, shown, strict=True):
        (row,) = result["rows"]
        assert [(tmp_path / "images" / digest).read_bytes() for digest in row.get("images", ())] == files
    assert len(list((tmp_path / "images").iterdir())) == 2
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(sees=True, journal=journal, sink=sink) as proxy:
        journal.resume(proxy.deps.sessions)
        assert [await _closed(proxy, handle) for handle in handles] == told
        for file in (tmp_path / "images").iterdir():
            file.unlink()
        lost = await proxy.http.post(f"/sessions/{handles[2].id}/close", headers=ADMIN)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "record_failed")
    await journal.close()


async def test_without_its_pictures_no_row_is_written(tmp_path: Path) -> None:
    journal, sink = SqliteJournal(tmp_path / "j.sqlite"), FolderSink(tmp_path)
    async with serving(sees=True, journal=journal, sink=sink) as proxy:
        handle = await proxy.open()
        assert (await proxy.post(handle, _chat(_part(RED)))).status_code == 200
        (tmp_path / "images").rename(tmp_path / "away")
        refused = await proxy.http.post(f"/sessions/{handle.id}/close", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "record_failed")
        assert list((tmp_path / "rows").iterdir()) == []
        (tmp_path / "away").rename(tmp_path / "images")
        result = await _closed(proxy, handle)
        assert [b64decode(text) for text in result["images"].values()] == [RED]
    await journal.close()


async def _closed(proxy: Served, handle: Any) -> Any:
    answer = await proxy.http.post(f"/sessions/{handle.id}/close", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _ask(proxy: Served, handle: Any, messages: list[Any]) -> Any:
    answer = await proxy.post(handle, {"model": "m", "messages": messages})
    assert (answer.status_code, answer.headers["x-seamless-match"]) == (200, "clean"), answer.text
    return answer.json()

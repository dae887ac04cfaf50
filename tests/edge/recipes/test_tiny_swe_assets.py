"""Assets of the tiny recipe: the tokenizer and its chat template, a small real build, and the cache's promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("transformers", reason="the tokenizer and the model need transformers, which comes with verl")
pytest.importorskip("torch", reason="the warm start needs torch, which comes with verl")
import pyarrow.parquet as pq
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from seamless_verl.recipes.swe.tiny import assets, tokenizer
from seamless_verl.recipes.swe.tiny.demonstrations import conversations
from seamless_verl.recipes.swe.tiny.runner import PublicTask

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return tokenizer.train(islice(conversations(0, 1.0), 1500))


def rendered(trained: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(trained.apply_chat_template(messages, tokenize=False, **options))


def test_size_and_fixed_ids(trained: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    for tok in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tok) == tokenizer.VOCABULARY == 1024
        assert (tok.pad_token_id, tok.eos_token_id) == (0, 2)
        assert tok.convert_tokens_to_ids(tokenizer.TURN_START) == 1
        assert tok.chat_template == trained.chat_template


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x", "Grüße, 世界! \t\r\n  ", "a<|im_end|>b", "<tool_call>{}</tool_call>"]
)
def test_text_survives_encoding(trained: PreTrainedTokenizerFast, text: str) -> None:
    ids = trained.encode(text, add_special_tokens=False)
    assert trained.decode(ids, skip_special_tokens=False) == text


def test_tool_marks_are_single_tokens_that_survive_decoding(trained: PreTrainedTokenizerFast) -> None:
    ids = trained.encode("<tool_call>", add_special_tokens=False)
    assert len(ids) == 1
    assert trained.decode([*ids, 2], skip_special_tokens=True) == "<tool_call>"


def test_template_is_what_the_warm_start_renders(trained: PreTrainedTokenizerFast) -> None:
    for texts in islice(conversations(3, 0.3), 50):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        assert rendered(trained, messages) == tokenizer.render(texts, open_turn=False)
        asked = tokenizer.render(texts[:-1], open_turn=True)
        assert rendered(trained, messages[:-1], add_generation_prompt=True) == asked
        ids, mask = tokenizer.encode_conversation(trained, texts)
        assert trained.decode(ids) == tokenizer.render(texts, open_turn=False).removesuffix("\n")
        said = "".join(text + tokenizer.TURN_END for text in texts[1::2])
        assert trained.decode([token for token, flag in zip(ids, mask, strict=True) if flag]) == said


def test_template_is_a_prefix_of_itself_turn_after_turn(trained: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": " as said \n", "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "5 degrees"},
        {"role": "assistant", "content": "Rain."},
    ]  # fmt: skip
    whole = rendered(trained, messages, tools=[WEATHER])
    for count in (2, 3, 5):
        assert whole.startswith(rendered(trained, messages[:count], tools=[WEATHER]))
    assert whole.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(WEATHER["function"]) in whole
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
    assert f"<|im_start|>assistant\n as said \n\n{call}" in whole
    responses = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in ("rain", "5 degrees"))
    assert f"<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\nRain.<|im_end|>\n" in whole
    assert whole.endswith("Rain.<|im_end|>\n")


def test_template_takes_arguments_as_text_and_content_in_parts(trained: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    body = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert rendered(trained, messages) == (
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{body}<|im_end|>\n"
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[assets.Assets, Path, assets.Recipe, list[str]]:
    """A real build, small: the same path as the shipped one with less of everything."""
    cache, said = tmp_path_factory.mktemp("cache"), list[str]()
    recipe = assets.Recipe(train_size=64, held_out_size=16, held_out_templates_size=8, warm_start_share=0.02)
    made = assets.build(cache, recipe=recipe, progress=said.append)
    return made, cache, recipe, said


def test_build_is_whole_and_says_what_it_does(
    built: tuple[assets.Assets, Path, assets.Recipe, list[str]],
) -> None:
    made, cache, recipe, said = built
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == [f"swe-tiny-{recipe.digest()}"]
    assert not list(cache.glob(".*building*"))
    assert any("demonstrations made" in line for line in said)
    config = AutoConfig.from_pretrained(made.model_dir)
    assert len(AutoTokenizer.from_pretrained(made.model_dir)) == config.vocab_size
    assert config.max_position_embeddings >= 2048
    assert str(config.dtype) == "torch.float32"
    assert 900_000 < made.metadata["parameters"] < 950_000


def test_rows_are_what_verl_and_the_runner_read(
    built: tuple[assets.Assets, Path, assets.Recipe, list[str]],
) -> None:
    made, _, recipe, _ = built
    train, val = (pq.read_table(path).to_pylist() for path in (made.train_parquet, made.val_parquet))
    assert len(train) == recipe.train_size
    assert [row["data_source"] for row in val] == ["held_out"] * 16 + ["held_out_templates"] * 8
    assert {row["data_source"] for row in train} == {"swe_tiny"}
    for rows in (train, val):
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert row["agent_name"] == "seamless_agent"
            assert row["reward_model"] == {"style": "rule", "ground_truth": ""}
            task = json.loads(row["extra_info"]["task"])
            assert task["hidden"]["split"] == row["extra_info"]["split"]
            PublicTask.parse(task)
            (message,) = row["prompt"]
            assert message["role"] == "user"
            assert message["content"].startswith(f"1|def {task['hidden']['function']}(")


def test_lengths_stay_within_what_the_recipe_reserves(
    built: tuple[assets.Assets, Path, assets.Recipe, list[str]],
) -> None:
    """Prompt up to 200 tokens, 24 per answer, 3 turns, the whole row within 1,024."""
    made = built[0]
    tok = AutoTokenizer.from_pretrained(made.model_dir)
    assert made.metadata["prompt_tokens_max"] <= 200
    for seed, right in ((1, 0.0), (2, 1.0)):
        for texts in islice(conversations(seed, right), 400):
            ids, mask = tokenizer.encode_conversation(tok, texts)
            assert len(ids) <= 700
            longest = max(len(tok.encode(text)) + 1 for text in texts[1::2])
            assert longest <= 24
            assert sum(mask) <= 72


def test_cached_build_returns_at_once(
    built: tuple[assets.Assets, Path, assets.Recipe, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cache, recipe, _ = built
    monkeypatch.setattr(assets.subprocess, "Popen", lambda *_, **__: pytest.fail("built again"))
    assert assets.build(cache, recipe=recipe) == made


def test_two_builds_at_once_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first under the lock, then takes what is there."""
    building, finish, builds = threading.Event(), threading.Event(), list[Path]()

    def build_into(folder: Path, recipe: assets.Recipe, progress: assets.Progress) -> None:
        builds.append(folder)
        building.set()
        assert finish.wait(30)
        folder.mkdir()
        (folder / "metadata.json").write_text("{}")

    monkeypatch.setattr(assets, "_build_into", build_into)
    waiting = threading.Event()
    first = threading.Thread(target=assets.build, args=(tmp_path,))
    first.start()
    assert building.wait(30)
    second = threading.Thread(target=assets.build, args=(tmp_path,), kwargs={"progress": lambda _: waiting.set()})
    second.start()
    assert waiting.wait(30)
    finish.set()
    first.join(30)
    second.join(30)
    assert len(builds) == 1


def test_failed_build_leaves_the_cache_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "_MODULE", "seamless_verl.no_such_module")
    with pytest.raises(assets.BuildFailed, match="no_such_module"):
        assets.build(tmp_path, progress=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [f".swe-tiny-{assets.Recipe().digest()}.lock"]


def test_digest_follows_parameters() -> None:
    assert assets.Recipe().digest() == assets.Recipe().digest()
    assert assets.Recipe(seed=1).digest() != assets.Recipe().digest()


def test_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEAMLESS_CACHE", str(tmp_path))
    assert assets.default_cache() == tmp_path
    monkeypatch.delenv("SEAMLESS_CACHE")
    assert assets.default_cache() == Path.home() / ".cache" / "seamless_verl"


def test_a_build_that_is_ended_leaves_neither_its_process_nor_half_a_folder(tmp_path: Path) -> None:
    module = "import signal, sys; from pathlib import Path; Path(sys.argv[2]).mkdir(); print('begun', flush=True)"
    (tmp_path / "builds.py").write_text(f"{module}; signal.pause()")
    code = "from seamless_verl.recipes.swe.tiny import assets; assets._MODULE = 'builds'; assets.main()"
    command = [sys.executable, "-c", code, "--cache", str(tmp_path)]
    path = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path) as building:
        assert building.stdout is not None
        assert "begun" in [line.split()[-1] for line in islice(building.stdout, 2)]
        assert list(tmp_path.rglob(".*.building-*"))
        (builder,) = psutil.Process(building.pid).children()
        building.terminate()
        assert building.wait(60) == 143
    try:
        assert not builder.is_running()
    finally:
        with suppress(psutil.NoSuchProcess):
            builder.kill()
    assert not list(tmp_path.rglob(".*.building-*"))

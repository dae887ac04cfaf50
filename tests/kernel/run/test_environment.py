"""What processes of a run on a CPU find in their environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seamless_verl.run.environment import cpu_environment, cpu_settings

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in (*OFFLINE, "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(folder)


def test_the_hub_may_be_asked_for_a_model_that_is_not_here_yet_and_for_no_other(here: str, tmp_path: Path) -> None:
    assert [cpu_settings(here).get(name) for name in OFFLINE] == ["1", "1"]
    assert [cpu_settings(here, "Qwen/Qwen3-0.6B").get(name) for name in OFFLINE] == [None, None]
    snapshot = tmp_path / "hub" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert cpu_settings("Qwen/Qwen3-0.6B").get("HF_HUB_OFFLINE") is None, "its weights are not here"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").touch()
    assert cpu_settings("Qwen/Qwen3-0.6B").get("HF_HUB_OFFLINE") is None, "half of its weights is not here"
    (snapshot / "model-2.safetensors").touch()
    assert [cpu_settings(here, "Qwen/Qwen3-0.6B").get(name) for name in OFFLINE] == ["1", "1"]


def test_a_critics_model_counts_where_there_is_a_critic(here: str, tmp_path: Path) -> None:
    config = {"actor_rollout_ref": {"model": {"path": here}}, "critic": {"model": {"path": "not/here"}}}
    for estimator, offline in (("grpo", "1"), ("gae", None)):
        asked = config | {"algorithm": {"adv_estimator": estimator}}
        assert cpu_environment(asked, (), 2, tmp_path / "book").get("HF_HUB_OFFLINE") == offline

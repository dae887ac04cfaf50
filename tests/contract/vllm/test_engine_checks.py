"""What an engine cannot do under verl is refused before anything starts, on verl's own composed configurations."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import check_engine
from seamless_verl.run.check_references import check_rows
from tests.contract.slices.test_resource_pools import MIXED, adopted

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]
ROLLOUT = "actor_rollout_ref.rollout"
LENDS = [MIXED, "seamless.scheduler.policy=predictive"]
AGENTS = f"{ROLLOUT}.agent.default_agent_loop=seamless_agent"
R3_ON = f"{ROLLOUT}.enable_rollout_routing_replay=true"
R3_MODE = "actor_rollout_ref.actor.megatron.router_replay.mode"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
R2 = ["model_engine=megatron", f"{R3_MODE}=R2"]
BYPASS = "algorithm.rollout_correction.bypass_mode"
A3PO = ["seamless.staleness.correction=a3po", f"{ROLLOUT}.calculate_log_probs=true"]
REFUSED: list[tuple[list[str], str, Any, str]] = [
    ([*LENDS, f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name", "sglang", "scheduler.policy out"),
    ([*LENDS, f"{ROLLOUT}.disaggregation.enabled=true"], f"{ROLLOUT}.disaggregation.enabled", True, "write false"),
    ([*LENDS, f"{ROLLOUT}.data_parallel_size=2"], f"{ROLLOUT}.data_parallel_size", 2, "write 1 and more replicas"),
    (
        [*LENDS, f"+{ROLLOUT}.engine_kwargs.vllm.data_parallel_size=4"],
        f"{ROLLOUT}.engine_kwargs.vllm.data_parallel_size",
        4,
        "write 1 and more replicas",
    ),
    *(
        ([*LENDS, f"{BACKEND}={name}"], BACKEND, name, "write nccl, or leave seamless.scheduler.policy out")
        for name in ("kimi_ckpt_engine", "delta_sharded")
    ),
    (
        [MIXED, "seamless.staleness.stuck=truncate", f"{ROLLOUT}.disaggregation.enabled=true"],
        "seamless.staleness.stuck",
        "truncate",
        "write retry or wait",
    ),
    ([MIXED, AGENTS, R3_ON], f"{ROLLOUT}.enable_rollout_routing_replay", True, "write false"),
    ([MIXED, "model_engine=megatron", AGENTS, f"{R3_MODE}=R3"], R3_MODE, "R3", "write R2 or disabled"),
    ([MIXED, *R2, f"{BYPASS}=true"], R3_MODE, "R2", f"write disabled, or {BYPASS}=false"),
    ([MIXED, *R2, *A3PO], R3_MODE, "R2", "another seamless.staleness.correction than a3po"),
]
ALLOWED = [
    [MIXED, f"{ROLLOUT}.name=sglang"],
    [MIXED, f"{ROLLOUT}.data_parallel_size=2"],
    [*LENDS, f"{ROLLOUT}.name=vllm"],
    [*LENDS, f"{BACKEND}=nixl"],
    [MIXED, f"{BACKEND}=kimi_ckpt_engine"],
    [MIXED, R3_ON],  # verl's own agent loops carry the routes
    [MIXED, *R2, AGENTS],
]


@pytest.mark.parametrize(("overrides", "key", "value", "fix"), REFUSED, ids=[f"{r[1]}={r[2]}: {r[3]}" for r in REFUSED])
def test_what_the_engine_cannot_do_is_refused_by_name(overrides: list[str], key: str, value: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        adopted(f"{ROLLOUT}.name=vllm", *overrides)
    assert (refused.value.key, refused.value.value) == (key, value)
    assert fix in refused.value.fix


@pytest.mark.parametrize("overrides", ALLOWED, ids=str)
def test_what_it_can_do_is_not(overrides: list[str]) -> None:
    adopted(f"{ROLLOUT}.name=vllm", *overrides)


def test_the_command_asks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.run import check_batches, check_combinations, check_machine, preflight

    plain: Any = {"trainer": {"v1": {"trainer_mode": "seamless"}}, "actor_rollout_ref": {"rollout": {"name": "sglang"}}}
    for module, other in (
        (check_machine, "check_devices"),
        (check_combinations, "check_layout"),
        (check_batches, "check_batches"),
        (check_batches, "check_schedules"),
    ):
        monkeypatch.setattr(module, other, lambda *_: [])
    seamless = SeamlessConfig.from_mapping({"scheduler": {"policy": "greedy"}})
    with pytest.raises(ConfigError, match="sglang"):
        preflight.check_settings(plain, seamless, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "is_refused"), [("seamless_agent", True), ("single_turn_agent", False)])
def test_rows_that_ask_for_agents_are_found(tmp_path: Path, name: str, is_refused: bool) -> None:
    import pandas as pd

    file = tmp_path / "train.parquet"
    pd.DataFrame([{"agent_name": "single_turn_agent"}] * 3 + [{"agent_name": name}]).to_parquet(file)
    config: Any = {"actor_rollout_ref": {"rollout": {"enable_rollout_routing_replay": True}}}
    check_engine(config, SeamlessConfig.from_mapping({}))
    if not is_refused:
        check_rows(config, [file])
        return
    with pytest.raises(ConfigError, match="enable_rollout_routing_replay"):
        check_rows(config, [file])


def test_a_worker_whose_rows_turn_out_to_ask_for_agents_refuses_before_it_generates() -> None:
    from seamless_verl.verl_adapter.rollout.proxy_shard import ProxyShard

    rollout = {"enable_rollout_routing_replay": True, "name": "vllm"}
    config = OmegaConf.create({"seamless": {}, "actor_rollout_ref": {"rollout": rollout}})
    with pytest.raises(ConfigError, match=re.escape("do not tell which experts")):
        asyncio.run(ProxyShard._start(SimpleNamespace(config=config, tokenizer=None)))


def test_constrained_decoding_is_offered_with_vllm_only() -> None:
    from seamless_verl.proxy.engine import Ability
    from seamless_verl.verl_adapter.rollout.trainer_engine import abilities_of

    assert abilities_of("vllm") == {Ability.STRUCTURED_OUTPUTS}
    assert abilities_of("sglang") == abilities_of("trtllm") == frozenset()


@pytest.mark.parametrize("constraint", [None, {"regex": "[0-9]"}])
def test_without_vllm_requests_go_through_and_constraints_are_refused(
    monkeypatch: pytest.MonkeyPatch, constraint: Any
) -> None:
    from ray.exceptions import RayTaskError
    from verl.workers.rollout.replica import TokenOutput

    from seamless_verl.proxy.engine import EngineRefused, GenerationRequest
    from seamless_verl.verl_adapter.rollout.trainer_engine import VerlEngine

    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    answers: list[Any] = [
        TokenOutput(token_ids=[7], log_probs=[-1.0], extra_fields={"version_spans": [(1, 1)]}),
        RayTaskError("generate", "traceback", ValueError("too long")).as_instanceof_cause(),
    ]

    class Client:
        async def generate(self, **_: Any) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    client: Any = Client()
    engine = VerlEngine(client, decode=str, max_model_len=100, stop_token_ids=frozenset({0}))
    sampling: dict[str, Any] = {"max_tokens": 5} | ({"structured_outputs": constraint} if constraint else {})
    request = GenerationRequest(
        request_id="r", session_id="s", prompt_ids=(1,), sampling=sampling, deadline=time.time() + 60
    )
    if constraint is None:
        assert asyncio.run(engine.generate(request)).token_ids == [7]
        with pytest.raises(EngineRefused, match="too long"):
            asyncio.run(engine.generate(request))
        return
    with pytest.raises(EngineRefused, match="vLLM"):
        asyncio.run(engine.generate(request))

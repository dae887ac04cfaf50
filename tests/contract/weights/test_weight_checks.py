"""Checksums of weights: the same however they are sharded and fused, another for other weights."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from seamless_verl.errors import ConfigError  # noqa: E402
from seamless_verl.verl_adapter.weights import weight_checks  # noqa: E402
from seamless_verl.verl_adapter.weights.weight_checks import WeightChecks, WeightsDiffer, checksum  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BITS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=12)


def floats(bits: list[int]) -> torch.Tensor:
    """Any number that there is, and those that are none."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


@given(BITS, BITS, st.randoms(use_true_random=False))
def test_order_shards_fusion_and_padding_do_not_matter(first: list[int], second: list[int], rng: Any) -> None:
    apart = [floats(first), floats(second)]
    fused = first + second
    rng.shuffle(fused)
    cut = rng.randrange(len(fused) + 1)
    other = [floats([*fused[:cut], 0, 0]), floats(fused[cut:])]
    assert checksum(apart, torch.float32) == checksum(other, torch.float32)


@given(BITS, st.data())
def test_one_bit_that_differs_shows(bits: list[int], data: st.DataObject) -> None:
    weights = floats(bits)
    changed = weights.clone()
    place, bit = data.draw(st.integers(0, len(bits) - 1)), data.draw(st.integers(0, 30))
    changed.view(torch.int32)[place] ^= 1 << bit
    assert checksum([weights], torch.float32) != checksum([changed], torch.float32)


def test_updates_that_cancel_out_in_a_sum_show() -> None:
    bits = torch.tensor([1000, 2000], dtype=torch.int32)
    other = torch.tensor([1001, 1999], dtype=torch.int32)
    assert checksum([bits.view(torch.float32)], torch.float32) != checksum([other.view(torch.float32)], torch.float32)


def test_masters_are_compared_as_the_engine_holds_them() -> None:
    masters = torch.randn(1000)
    assert checksum([masters], torch.bfloat16) == checksum([masters.to(torch.bfloat16)], torch.bfloat16)
    assert checksum([torch.full((3,), float("nan"))], torch.float32) != checksum([torch.zeros(3)], torch.float32)


def test_large_tensors_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(7, 11)
    whole = checksum([weights], torch.float32)
    monkeypatch.setattr(weight_checks, "_IN_CACHE", 10)
    assert checksum([weights.t()], torch.float32) == whole


class Remote:
    """A method of a Ray actor."""

    def __init__(self, function: Any) -> None:
        self.remote = function


def trainer_of(*weights: float) -> Any:
    module = torch.nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([weights]))
    worker = SimpleNamespace(
        worker_dict={"actor": SimpleNamespace(actor=SimpleNamespace(engine=SimpleNamespace(module=module)))}
    )
    worker.__dict__["__ray_call__"] = Remote(lambda function, *arguments: function(worker, *arguments))
    return worker


def engine_of(*weights: float) -> Any:
    found = f"{checksum([torch.tensor(weights)], torch.float32):016x}"
    return SimpleNamespace(servers=[SimpleNamespace(weights_checksum=Remote(lambda: found))])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(weight_checks.ray, "get", lambda answer: answer)
    return []


def test_a_loan_with_the_published_weights_is_told(told: list[Any]) -> None:
    checks = WeightChecks([trainer_of(1.0, 2.0)], torch.float32, lambda *what: told.append(what))
    checks.publish(3)
    checks.compare(3, {"trainers/0": engine_of(2.0, 1.0), "trainers/1": engine_of(1.0, 2.0)})
    assert [(name, version, published == found) for name, version, published, found in told] == [
        ("trainers/0", 3, True),
        ("trainers/1", 3, True),
    ]


def test_other_weights_are_named_after_all_were_compared(told: list[Any]) -> None:
    checks = WeightChecks([trainer_of(1.0, 2.0)], torch.float32, lambda *what: told.append(what))
    checks.publish(3)
    with pytest.raises(WeightsDiffer, match=r"not those of version 3: trainers/0 \(checksum"):
        checks.compare(3, {"trainers/0": engine_of(float("nan"), 1.0), "trainers/1": engine_of(1.0, 2.0)})
    assert len(told) == 2


def test_only_what_was_published_last_can_be_lent(told: list[Any]) -> None:
    checks = WeightChecks([trainer_of(1.0)], torch.float32, lambda *what: told.append(what))
    with pytest.raises(WeightsDiffer, match="but none was published last"):
        checks.compare(1, {"trainers/0": engine_of(1.0)})
    checks.publish(2)
    with pytest.raises(WeightsDiffer, match="lent version 1, but version 2 was published last"):
        checks.compare(1, {"trainers/0": engine_of(1.0)})


def test_a_slice_with_other_weights_never_generates(told: list[Any]) -> None:
    from seamless_verl.verl_adapter.slices.replica_slices import ReplicaSlices

    async def resume_generation() -> None:
        told.append("generates")

    edge = object.__new__(ReplicaSlices)
    replica = engine_of(1.0, 2.0)
    replica.resume_generation = resume_generation
    edge._hybrid = edge._replicas = {"trainers/0": replica}
    edge._published_weights, edge._store = nullcontext, None
    edge._hybrid_weights = SimpleNamespace(update_weights=lambda version: None)
    trainer = trainer_of(1.0, 2.0)
    edge._checks = WeightChecks([trainer], torch.float32, lambda *what: None)
    edge.publish(1)
    edge.wake(["trainers/0"], 1, [])
    assert told == ["generates"]
    edge._checks._workers = [trainer_of(5.0, 6.0)]
    edge.publish(2)
    with pytest.raises(WeightsDiffer):
        edge.wake(["trainers/0"], 2, [])
    assert told == ["generates"]


@pytest.mark.parametrize(
    ("changes", "wanted", "outcome"),
    [
        ({}, None, True),
        ({}, False, False),
        ({"trainer.device": "cuda"}, None, False),
        ({"trainer.device": "cuda"}, True, True),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}, None, False),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}, True, "tensor_model_parallel_size"),
        ({"actor_rollout_ref.actor.strategy": "megatron"}, True, "actor.strategy"),
        ({"actor_rollout_ref.model.lora_rank": 8}, True, "lora_rank"),
        ({"actor_rollout_ref.rollout.quantization": "fp8"}, True, "quantization"),
    ],
)
def test_checks_are_made_where_they_can_be(changes: dict[str, Any], wanted: bool | None, outcome: bool | str) -> None:
    config = OmegaConf.create(
        {
            "trainer": {"device": "cpu"},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2"},
                "model": {"lora_rank": 0},
                "rollout": {
                    "name": "vllm", "dtype": "float32", "quantization": None, "tensor_model_parallel_size": 1,
                    "data_parallel_size": 1, "pipeline_model_parallel_size": 1,
                },
            },
        }
    )  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    if isinstance(outcome, str):
        with pytest.raises(ConfigError, match=outcome):
            weight_checks.weight_checks_of(config, wanted, [], print)
    else:
        assert (weight_checks.weight_checks_of(config, wanted, [], print) is not None) is outcome

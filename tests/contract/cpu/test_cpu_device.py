"""verl's own FSDP engine and a sleeping vLLM worker on one device of the CPU platform: what each holds, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformer_impl = pytest.importorskip("verl.workers.engine.fsdp.transformer_impl")

import torch.distributed as dist  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from seamless_verl.memory.book import BOOK, CAPACITY, SharedBook  # noqa: E402
from seamless_verl.verl_adapter.cpu import cpu_device  # noqa: E402
from seamless_verl.verl_adapter.cpu.cpu_device import DEVICE  # noqa: E402
from tests.fakes import by_purpose, small_tokenizer  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedBook]:
    """The run's book, as another process sees it."""
    monkeypatch.setenv(BOOK, str(tmp_path / "memory.jsonl"))
    monkeypatch.setenv(DEVICE, "trainer/0")
    monkeypatch.delenv(CAPACITY, raising=False)
    cpu_device._device_memory.cache_clear()
    yield SharedBook(tmp_path / "memory.jsonl")
    cpu_device._device_memory.cache_clear()


@pytest.fixture
def trainer(tmp_path: Path, book: SharedBook) -> Iterator[Any]:
    """verl's engine over a tiny model, offloading, one rank over gloo."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    shape = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = transformer_impl.FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(tmp_path / "model"),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            param_offload=True,
            optimizer_offload=True,
            model_dtype="fp32",
            mixed_precision=precision,
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(lr=0.1, total_training_steps=4),
        CheckpointConfig(),
    )
    engine.initialize()
    yield engine
    dist.destroy_process_group()


def held(book: SharedBook) -> dict[str, int]:
    return by_purpose(book.look().holdings("trainer/0"))


def train(engine: Any) -> None:
    """As verl's ``train_batch``, with a loss of one line."""
    engine.optimizer_zero_grad()
    engine.module(input_ids=torch.arange(6).view(1, 6)).logits.square().mean().backward()
    engine.optimizer_step()


def test_a_trainer_holds_what_it_works_with_and_nothing_while_it_waits(trainer: Any, book: SharedBook) -> None:
    weights = sum(parameter._local_tensor.nbytes for parameter in trainer.module.parameters())
    before = [parameter._local_tensor.clone() for parameter in trainer.module.parameters()]
    assert held(book) == {}
    with trainer.eval_mode():
        assert held(book)["parameters"] == pytest.approx(weights, rel=0.01)  # and buffers
        assert held(book).keys() == {"parameters"}
    assert held(book) == {}
    with trainer.train_mode():
        train(trainer)
        assert held(book)["optimizer"] == pytest.approx(2 * weights, rel=0.01)
        assert cpu_device.device_memory("trainer").own == sum(held(book).values())
    assert held(book) == {}
    assert any(
        not torch.equal(parameter._local_tensor, old)
        for parameter, old in zip(trainer.module.parameters(), before, strict=True)
    )
    with trainer.train_mode():  # the moments come back
        assert held(book).keys() == {"parameters", "optimizer"}
        train(trainer)
    assert held(book) == {}


def test_gradients_are_counted_from_the_backward_pass_to_the_end_of_the_step(trainer: Any, book: SharedBook) -> None:
    seen: list[dict[str, int]] = []
    with trainer.train_mode():
        with pytest.raises(AssertionError, match="must be a TensorDict"):  # the memory is booked before it computes
            trainer.forward_backward_batch(None, loss_function=None)
        seen.append(held(book))
        trainer.optimizer_zero_grad()
        with pytest.raises(AssertionError, match="must be a TensorDict"):
            trainer.forward_backward_batch(None, loss_function=None, forward_only=True)
        seen.append(held(book))
    weights = sum(parameter._local_tensor.nbytes for parameter in trainer.module.parameters())
    assert seen[0]["gradients"] == weights
    assert seen[1].keys() == {"parameters"}


class Engine:
    """vLLM's worker after it has started, with a model of one layer."""

    def __init__(self, weights: int, cache: int) -> None:
        from seamless_verl.verl_adapter.cpu.vllm_sleep import KV_CACHE, WEIGHTS, SleepingCPUWorker

        self.worker = object.__new__(SleepingCPUWorker)
        model = torch.nn.Linear(weights // 4, 1, bias=False)
        model.register_buffer("scale", torch.full((1,), 3.0))
        self.worker.model_runner = SimpleNamespace(
            get_model=lambda: model, kv_caches=[torch.ones(cache // 4)], post_kv_cache_wake_up=lambda: None
        )
        self.worker._asleep = {}
        self.worker._memory = cpu_device.device_memory("engine")
        self.model, self.cache = model, self.worker.model_runner.kv_caches[0]
        from seamless_verl.memory.book import Phase

        self.worker._count(WEIGHTS, weights + 4, (Phase.SYNC, Phase.ROLLOUT))
        self.worker._count(KV_CACHE, cache, (Phase.ROLLOUT,))


def test_an_engine_wakes_only_where_the_trainer_has_left(trainer: Any, book: SharedBook) -> None:
    engine = Engine(weights=40_000, cache=4_000_000)
    assert held(book) == {"weights": 40_004, "kv_cache": 4_000_000}
    with pytest.raises(torch.OutOfMemoryError, match="trainer wants .* for parameters"), trainer.train_mode():
        pytest.fail("the engine is awake")
    engine.worker.sleep(level=2)
    assert held(book) == {}
    with trainer.train_mode():
        train(trainer)
        engine.worker.wake_up(["weights"])
        with pytest.raises(torch.OutOfMemoryError) as refused:
            engine.worker.wake_up(["kv_cache"])
        assert engine.cache.untyped_storage().nbytes() == 0
        assert engine.model.weight.isnan().all()  # until weights arrive
        assert engine.model.scale.tolist() == [3.0]
    for part in ("engine wants 3.8 MiB for kv_cache", "optimizer of trainer", "parameters of trainer"):
        assert part in str(refused.value)
    engine.worker.wake_up(["kv_cache"])
    assert not engine.cache.any()
    assert held(book) == {"weights": 40_004, "kv_cache": 4_000_000}
    free, total = cpu_device.device_memory("trainer").free_and_total
    assert total - free == 4_040_004


def test_without_a_book_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOOK, raising=False)
    cpu_device._device_memory.cache_clear()
    assert cpu_device.device_memory("trainer") is None


def test_the_trainers_checksum_is_that_of_the_weights_it_began_with(trainer: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from seamless_verl.verl_adapter.weights.weight_checks import _of_trainer, checksum

    worker = SimpleNamespace(worker_dict={"actor_rollout": SimpleNamespace(actor=SimpleNamespace(engine=trainer))})
    stored = checksum(load_file(tmp_path / "model" / "model.safetensors").values(), torch.float32)
    assert _of_trainer(worker, torch.float32) == stored  # while it is offloaded
    with trainer.train_mode():
        assert _of_trainer(worker, torch.float32) == stored
        train(trainer)
    assert _of_trainer(worker, torch.float32) != stored

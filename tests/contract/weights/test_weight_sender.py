"""The last hop of a transfer, verl's sender and receiver of buckets, when one of them ends or has nothing to send."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
import torch

from tests.transfers import BUCKET_MB, LAYERS, bucket_transfer, layers

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    from seamless_verl.verl_adapter.weights import transfer_members

    module = bucket_transfer()
    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None)
    monkeypatch.setattr(module, "get_torch_device", lambda: device)
    monkeypatch.setattr(transfer_members, "current", transfer_members.TransferState())
    return module


class Source:
    """Weights as the trainer's workers gather them: whoever stops early leaves the others waiting."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.taken = 0
        self._fails_at = fails_at

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in layers(1):
            if self.taken == self._fails_at:
                raise RuntimeError("a peer died")
            self.taken += 1
            yield named


def _send(transfer: Any, folder: Path, source: Any) -> None:
    sender = transfer.BucketedWeightSender(f"ipc://{folder}/socket", BUCKET_MB, use_shm=True)
    asyncio.run(sender.async_send_weights(iter(source)))


def test_an_engine_that_is_gone_is_not_waited_for_and_peers_are_not_let_down(transfer: Any, tmp_path: Path) -> None:
    from seamless_verl.verl_adapter.weights import transfer_members
    from seamless_verl.verl_adapter.weights.transfer_members import NotDelivered

    source = Source()
    threading.Timer(0.5, transfer_members.current.engine_gone.set).start()
    began = time.monotonic()
    with pytest.raises(NotDelivered, match="given up"):
        _send(transfer, tmp_path, source)
    assert time.monotonic() - began < 10
    assert source.taken == LAYERS, "the others' gathers wait for ours"


def test_an_engine_whose_weights_stop_coming_is_told_so(transfer: Any, tmp_path: Path) -> None:
    loaded: list[str] = []
    ended: list[BaseException | None] = []

    def receive() -> None:
        receiver = transfer.BucketedWeightReceiver(f"ipc://{tmp_path}/socket", torch.device("cpu"), use_shm=True)
        try:
            receiver.receive_weights(lambda weights, is_last: loaded.extend(name for name, _ in weights))
            ended.append(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine is free again
            ended.append(error)

    engine = threading.Thread(target=receive, daemon=True)
    engine.start()
    with pytest.raises(RuntimeError, match="a peer died"):
        _send(transfer, tmp_path, Source(fails_at=5))
    engine.join(10)
    assert not engine.is_alive(), "the engine waits for ever for the next bucket"
    assert isinstance(ended[0], Exception), "half of the weights count as all of them"
    assert loaded


@pytest.mark.parametrize("dies_in", ["resume", "update_weights"])
def test_a_worker_whose_replica_died_stays_with_the_others_up_to_the_barrier(dies_in: str) -> None:
    from seamless_verl.verl_adapter.weights.transfer_members import fail_together

    class Adapter:
        config = SimpleNamespace(free_cache_engine=True)

        async def resume(self, tags: list[str]) -> None:
            if dies_in == "resume":
                raise ConnectionError("its server died")

        async def update_weights(self, weights: Any) -> None:
            if dies_in == "update_weights":
                next(iter(weights))
                raise ConnectionError("its engine died")

    fail_together(SimpleNamespace(ServerAdapter=Adapter))
    adapter, source = Adapter(), Source()

    async def wake() -> None:  # as `ActorRolloutRefWorker.update_weights`
        await adapter.resume(["weights"])
        await adapter.update_weights(iter(source))
        assert source.taken == LAYERS
        await adapter.resume(["kv_cache"])  # behind the barrier

    with pytest.raises(ConnectionError, match="died"):
        asyncio.run(wake())
    assert source.taken == LAYERS


def test_a_worker_beside_a_standing_replica_fails_at_once() -> None:
    """There is no barrier to come, and its caller has to know."""
    from seamless_verl.verl_adapter.weights.transfer_members import fail_together

    class Adapter:
        config = SimpleNamespace(free_cache_engine=True)

        async def resume(self, tags: list[str]) -> None: ...

        async def update_weights(self, weights: Any) -> None:
            raise ConnectionError("its engine died")

    fail_together(SimpleNamespace(ServerAdapter=Adapter))
    source = Source()
    with pytest.raises(ConnectionError):
        asyncio.run(Adapter().update_weights(iter(source)))
    assert source.taken == LAYERS

"""Old log-probs and loans between mini-batches put older weights in place for a while: no update may be lost by that.

FSDP2 on one rank, with the CPU platform's offloading, which moves as a GPU's does. FSDP1 on two: one
shards nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
fsdp_utils = pytest.importorskip("verl.utils.fsdp_utils")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]
MINI_BATCHES = 3


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Trained:
    """A small model as verl's worker holds it: on the device only while it computes."""

    def __init__(self, mesh: Any, *, offload: bool, reshard: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
        for part in (self.model[0], self.model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.offload = offload
        self._to_host()

    def _to_host(self) -> None:
        if self.offload:
            fsdp_utils.offload_fsdp_model_to_cpu(self.model)
            fsdp_utils.offload_fsdp_optimizer(self.optimizer)

    def _to_device(self) -> None:
        if self.offload:
            fsdp_utils.load_fsdp_model_to_gpu(self.model)
            fsdp_utils.load_fsdp_optimizer(self.optimizer, "cpu")

    def outputs(self) -> list[float]:
        self._to_device()
        with torch.no_grad():
            found = self.model(torch.arange(6.0).view(2, 3)).flatten().tolist()
        self._to_host()
        return found

    def update(self, number: int) -> None:
        self._to_device()
        self.model(torch.full((2, 3), float(number + 1))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._to_host()

    def weights(self) -> list[list[float]]:
        return [parameter._local_tensor.flatten().tolist() for parameter in self.model.parameters()]


def as_verl_does(trained: Trained, save: Callable[[Any], Any], load: Callable[..., None]) -> list[list[float]]:
    """verl's ``_compute_old_log_prob`` and an update, per mini-batch; the old policy's outputs."""
    began, outputs = save(trained.model), []
    for number in range(MINI_BATCHES):
        if number:
            newer = save(trained.model)
            load(trained.model, *began)
        outputs.append(trained.outputs())
        if number:
            load(trained.model, *newer)
        trained.update(number)
    return outputs


def plain_weights(mesh: Any, *, reshard: bool = True) -> list[list[float]]:
    plain = Trained(mesh, offload=False, reshard=reshard)
    for number in range(MINI_BATCHES):
        plain.update(number)
    return plain.weights()


@pytest.mark.parametrize(("offload", "reshard"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_old_policy_takes_its_turn_and_no_update_is_lost(mesh: Any, offload: bool, reshard: bool) -> None:
    trained = Trained(mesh, offload=offload, reshard=reshard)
    outputs = as_verl_does(trained, fsdp_utils.fsdp2_sharded_save_to_cpu, fsdp_utils.fsdp2_sharded_load_from_cpu)
    assert trained.weights() == plain_weights(mesh, reshard=reshard)
    assert outputs == [outputs[0]] * MINI_BATCHES


def test_verl_needs_our_copies(mesh: Any) -> None:
    """When this fails, verl clones, and our copies may go."""
    trained = Trained(mesh, offload=True)
    as_verl_does(trained, fsdp_utils.fsdp2_sharded_save_to_cpu.__wrapped__, fsdp_utils.fsdp2_sharded_load_from_cpu)
    assert trained.weights() != plain_weights(mesh)


def test_verl_needs_our_resharding(mesh: Any) -> None:
    """When this fails, verl reshards before it restores, and ours may go."""
    trained = Trained(mesh, offload=False, reshard=False)
    began = fsdp_utils.fsdp2_sharded_save_to_cpu(trained.model)
    before = trained.outputs()
    trained.update(0)
    assert trained.outputs() != before
    with pytest.raises(AssertionError, match="DTensor parameters not initialized"):
        fsdp_utils.fsdp2_sharded_load_from_cpu.__wrapped__(trained.model, *began)
    fsdp_utils.fsdp2_sharded_load_from_cpu(trained.model, *began)
    assert trained.outputs() == before


def fsdp1_rank(rank: int, folder: str) -> None:
    """As the trainer does from one mini-batch to the next, with our functions and with verl's.

    Outputs of the old policy, of the same put in place again, of the new one put back, and what that must be.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ours = fsdp_utils.fsdp1_sharded_save_to_cpu, fsdp_utils.fsdp1_sharded_load_from_cpu
    rows, found = torch.arange(6.0).view(2, 3) / 6, {}
    for kind in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        for save, load in (ours, [each.__wrapped__ for each in ours]):
            torch.manual_seed(0)
            layers = [torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(2)]
            model = FullyShardedDataParallel(
                torch.nn.Sequential(torch.nn.Linear(3, 3), *layers, torch.nn.Linear(3, 1)),
                auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential}),
                sharding_strategy=kind,
                device_id=torch.device("cpu"),
            )

            def outputs(model: Any = model) -> list[float]:
                with torch.no_grad():
                    return model(rows).flatten().tolist()

            def gradients(model: Any = model) -> None:
                model(rows).sum().backward()  # and nothing stays gathered

            old, before = save(model), outputs()
            gradients()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            new = save(model)
            load(model, old)
            again = outputs()
            load(model, new)
            last = outputs()
            gradients()
            found[kind.name, save in ours] = [before, again, last, outputs()]
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def test_fsdp1_computes_with_the_weights_that_were_put_in_place(tmp_path: Path) -> None:
    """It keeps its root gathered after a forward pass; verl reshards that with ``fsdp_size`` above 1 only."""
    processes.spawn(fsdp1_rank, args=(str(tmp_path),), nprocs=2)
    found = torch.load(f"{tmp_path}/found")
    assert len(found) == 4
    for (kind, is_ours), (before, again, last, after) in found.items():
        assert before == again != after
        # When this fails for verl's, verl reshards before it restores, and ours may go.
        assert (last == after) is is_ours, kind


def test_offloading_moves_to_fresh_memory_once_and_back(mesh: Any) -> None:
    trained = Trained(mesh, offload=False)
    trained.update(0)
    moment = next(iter(trained.optimizer.state.values()))["exp_avg"]
    weight = next(trained.model.parameters())
    before = trained.weights()
    for _ in range(2):
        for move in (fsdp_utils.offload_fsdp_model_to_cpu, fsdp_utils.load_fsdp_model_to_gpu):
            old = weight._local_tensor
            move(trained.model)
            assert weight._local_tensor.data_ptr() != old.data_ptr()
            assert next(trained.model.parameters()) is weight
            again = weight._local_tensor.data_ptr()
            move(trained.model)  # it is there already
            assert weight._local_tensor.data_ptr() == again
    assert trained.weights() == before
    fsdp_utils.offload_fsdp_optimizer(trained.optimizer)
    moved = next(iter(trained.optimizer.state.values()))["exp_avg"]
    assert moved.to_local().data_ptr() != moment.to_local().data_ptr()
    assert torch.equal(moved.to_local(), moment.to_local())


def test_the_copies_are_made_on_every_platform() -> None:
    code = "import verl.utils.fsdp_utils as f; assert f.fsdp2_sharded_save_to_cpu.__wrapped__"
    environment = {**os.environ, "VERL_PLATFORM": "nvidia"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

"""What verl 0.9.1 does where we refuse, and that its own entry point refuses under our trainer mode, too."""

import importlib
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run import check_machine, compose

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def trainer_of(*overrides):
    """As verl's entry point makes it, from verl's own configuration."""
    importlib.import_module("verl.trainer.ppo.v1")
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    return SeamlessTrainer(composed(*overrides))


def composed(*overrides):
    ours = ["trainer.v1.trainer_mode=seamless", "actor_rollout_ref.rollout.nnodes=1"]
    ours += ["actor_rollout_ref.rollout.n_gpus_per_node=4"]
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        return hydra_compose("ppo_trainer", overrides=[*ours, *overrides])


@pytest.mark.parametrize("rank", ["model.lora_rank=16", "model.lora.rank=16"])
def test_verls_entry_point_refuses_an_unmerged_adapter_too(rank, monkeypatch):
    monkeypatch.setattr(check_machine, "is_installed", lambda module: True)
    with pytest.raises(ConfigError, match=r"lora\.merge=False: .*base model"):
        trainer_of(f"actor_rollout_ref.{rank}", "trainer.device=cuda")


def test_verls_entry_point_refuses_a_checkpoint_engine_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(check_machine, "is_installed", lambda module: module != "cupy")
    with pytest.raises(ConfigError, match=r"checkpoint_engine\.backend=nccl: needs cupy"):
        trainer_of("trainer.device=cuda")


def sampler(name):
    module = "verl.trainer.ppo.v1.replay_buffer"  # verl's own stand for one of the user's
    keys = {"path": f"pkg://{module}", "name": name}
    return [f"trainer.v1.sampler.custom_sampler.{key}={value}" for key, value in keys.items()]


def test_a_sampler_of_ones_own_has_verls_warm_up_and_is_told_what_it_does_not_keep(caplog):
    eta = ["+seamless.staleness.eta=3", "+seamless.staleness.group_redundancy=1.5"]
    trainer = trainer_of("trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm", *sampler("ReplayBuffer"), *eta)
    modes = trainer.config.trainer.v1
    assert modes.separate_async.num_warmup_batches == 1
    assert trainer.replay_buffer.trainer_config == modes.separate_async  # as under verl's own mode
    (told,) = [line for line in caplog.messages if "custom_sampler" in line]
    assert told.startswith("seamless.staleness.eta: not kept")
    own = ["+trainer.v1.seamless.num_warmup_batches=3", "+trainer.v1.seamless.mine=7"]
    trainer = trainer_of("trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm", *sampler("ReplayBuffer"), *own)
    found = trainer.replay_buffer.trainer_config
    assert (found.num_warmup_batches, found.mine, found.parameter_sync_step) == (
        3,
        7,
        modes.seamless.parameter_sync_step,
    )


def test_a_sampler_that_a_policy_cannot_ask_is_refused():
    colocated = ["trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm", "+seamless.scheduler.policy=colocated"]
    with pytest.raises(ConfigError, match=r"custom_sampler\.name=ReplayBuffer: .*get_sampleable_count.*Async"):
        trainer_of(*colocated, *sampler("ReplayBuffer"))
    assert trainer_of(*colocated, *sampler("ReplayBufferAsync")).rows.outlives_workers is False


@pytest.mark.parametrize("backend", check_machine._MODULES)
def test_verls_checkpoint_engines_import_what_we_look_for(backend):
    folder = Path(importlib.import_module("verl.checkpoint_engine").__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("*_checkpoint_engine.py")]
    named = f'CheckpointEngineRegistry.register("{backend}")'
    (source,) = [text for text in sources if named in text and "torch.npu" not in text]
    for module in check_machine._MODULES[backend]:
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE)


@pytest.mark.skipif(check_machine.is_installed("cupy"), reason="cupy is installed; runs where it is not, as in CI")
def test_without_cupy_verl_has_no_checkpoint_engine_nccl():
    from verl.checkpoint_engine import CheckpointEngineRegistry

    with pytest.raises(ValueError, match=r"nccl not registered.*No module named 'cupy'"):
        CheckpointEngineRegistry.get("nccl")


def test_verl_still_drops_the_adapter_where_it_broadcasts_weights():
    """When this fails, verl carries it (verl #7495), and `run.check_combinations` may let unmerged adapters through."""
    import inspect

    from verl.workers.engine_workers import ActorRolloutRefWorker

    source = inspect.getsource(ActorRolloutRefWorker.update_weights)
    assert "per_tensor_param, _ = self.actor.engine.get_per_tensor_param()" in source


@pytest.mark.parametrize(("keep", "left"), [(1, ["global_step_3"]), (2, ["global_step_2", "global_step_3"])])
def test_while_a_checkpoint_is_written_verl_has_a_whole_one_only_where_it_keeps_two(tmp_path, keep, left):
    """What `run.checkpoints` advises: after the actor verl writes four more things, the tracker last."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    manager = object.__new__(BaseCheckpointManager)
    manager.previous_saved_paths = []
    for step in (1, 2, 3):
        actor = tmp_path / f"global_step_{step}" / "actor"
        manager.ensure_checkpoint_capacity(keep)
        actor.mkdir(parents=True)
        (actor.parent / "data.pt").touch()
        manager.register_checkpoint(str(actor), keep)
    assert sorted(actor.parent.name for actor in tmp_path.glob("*/actor")) == left
    assert len(list(tmp_path.glob("*/data.pt"))) == 3, "the rest of each checkpoint stays"


def test_prompts_that_the_limit_leaves_too_few_of_for_a_batch_are_refused(tmp_path):
    """verl divides by the steps of an epoch, once all has been started and validated; with its filter off the limit
    leaves all of them."""
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer
    from tests.fakes import small_tokenizer

    rows = [{"prompt": [{"role": "user", "content": "long " * size}]} for size in (1, 99, 1, 99)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    trainer = object.__new__(SeamlessTrainer)
    trainer.tokenizer, trainer.processor, trainer.seamless = small_tokenizer(), None, SeamlessConfig()
    trainer.trainer_mode, trainer.parameter_sync_step = "seamless", 1
    files = [f"data.{kind}_files={tmp_path}/rows.parquet" for kind in ("train", "val")]
    keys = [*files, "data.max_prompt_length=40", "data.filter_overlong_prompts=true"]
    keys += ["data.filter_overlong_prompts_workers=1", "data.dataloader_num_workers=0"]
    trainer.config = composed("data.train_batch_size=3", *keys)
    with pytest.raises(ConfigError, match=r"train_batch_size=3: is more than the 2 prompts .*max_prompt_length=40"):
        trainer._init_dataloader()
    trainer.config = composed("data.train_batch_size=5", *keys, "data.filter_overlong_prompts=false")
    with pytest.raises(
        ConfigError, match=r"than the 4 prompts of data\.train_files.* Fix: write 4 or less, or give more"
    ):
        trainer._init_dataloader()
    trainer.config = composed("data.train_batch_size=2", *keys)
    trainer._init_dataloader()
    assert trainer.steps_per_epoch == 1

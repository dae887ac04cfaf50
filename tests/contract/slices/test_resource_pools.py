"""Declared resources on verl's configuration and in verl's resource pools; other engines and trainers compose."""

import pytest

from seamless_verl.errors import ConfigError

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

MIXED = (
    "seamless.resources=[{name: trainers, nodes: 2, gpus_per_node: 8, capabilities: [train, rollout]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 8, capabilities: [rollout]}]"
)


def adopted(*overrides, config_name="ppo_trainer"):
    """The configuration as the trainer would see it, and its slices."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from seamless_verl.run import compose
    from seamless_verl.verl_adapter.slices.resource_pools import adopt_resources
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config

    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose(
            config_name,
            overrides=[
                f"hydra.searchpath=[file://{compose.our_config_dir()}]",
                "+seamless=default",
                "seamless.run_dir=null",
                *overrides,
            ],
        )
    seamless = adopt_config(config)
    return config, adopt_resources(config, seamless)


def test_tags_become_verls_keys_and_slices_of_one_replica_each():
    config, slices = adopted(MIXED, "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert (config.actor_rollout_ref.rollout.nnodes, config.actor_rollout_ref.rollout.n_gpus_per_node) == (1, 8)
    assert config.actor_rollout_ref.hybrid_engine is True
    assert [s.id for s in slices] == [*(f"trainers/{i}" for i in range(4)), "rollouts/0", "rollouts/1"]
    assert {len(s.gpus) for s in slices} == {4}


def test_declared_slices_that_stand_alone_may_take_weights_in_turn_and_another_engine_for_them_is_refused():
    """Under verl's own entry point too, where nobody has written verl's keys before."""
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config, refuse_early
    from seamless_verl.verl_adapter.weights.weight_store import SHARED

    rolling = ["seamless.weights.sync=rolling", "trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm"]
    config, _ = adopted(MIXED, *rolling)
    refuse_early(config, adopt_config(config))
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == SHARED
    backend = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    config, _ = adopted(MIXED, *rolling, f"{backend}=nixl")
    with pytest.raises(ConfigError, match="rolling brings one of its own"):
        refuse_early(config, adopt_config(config))


def test_a_slice_has_the_seats_that_verl_gives_its_replica():
    _, slices = adopted(MIXED, "actor_rollout_ref.rollout.max_num_seqs=48")
    assert {s.seats for s in slices} == {48}


@pytest.mark.parametrize(
    ("override", "policy"),
    [
        ("actor_rollout_ref.rollout.name=vllm", "priority"),
        ("seamless.router.oldest_first=false", "fcfs"),
        ("actor_rollout_ref.rollout.name=sglang", "fcfs"),
    ],
)
def test_an_engine_that_can_serves_the_oldest_session_first(override, policy):
    config, _ = adopted(MIXED, "actor_rollout_ref.rollout.name=vllm", override)
    assert config.actor_rollout_ref.rollout.scheduling_policy == policy


def test_disaggregated_is_another_tag_and_nothing_else():
    config, slices = adopted(MIXED.replace("[train, rollout]", "[train]"))
    assert config.actor_rollout_ref.hybrid_engine is False
    assert not any(s.lendable for s in slices)


@pytest.mark.parametrize(
    ("resources", "entry"),
    [
        (MIXED.replace("[rollout]}", "[rollout], accelerator: L40S}"), "rollouts"),
        (
            "seamless.resources=[{name: a, nodes: 1, gpus_per_node: 8, capabilities: [train], accelerator: H100},"
            "{name: b, nodes: 1, gpus_per_node: 8, capabilities: [train, rollout], accelerator: A100},"
            "{name: c, nodes: 1, gpus_per_node: 8, capabilities: [rollout]}]",
            "a",
        ),
    ],
)
def test_a_kind_of_gpu_that_verl_cannot_be_asked_for_is_refused(resources, entry):
    with pytest.raises(ConfigError, match=rf"seamless.resources\[{entry}\].accelerator.*leave it out"):
        adopted(resources)


def test_without_a_declaration_nothing_is_changed():
    from omegaconf import OmegaConf

    from seamless_verl.config import SeamlessConfig
    from seamless_verl.verl_adapter.slices.resource_pools import adopt_resources

    config, slices = adopted("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=8")
    before = OmegaConf.to_yaml(config)
    assert slices == adopt_resources(config, SeamlessConfig()) == ()
    assert OmegaConf.to_yaml(config) == before


def test_without_gpus_for_rollout_alone_all_of_them_do_both():
    config, slices = adopted()
    assert {(s.pool, s.lendable) for s in slices} == {("trainer", True)}
    assert config.trainer.n_gpus_per_node * config.trainer.nnodes == sum(len(s.gpus) for s in slices)


def test_without_resources_a_policy_takes_verls_keys():
    _, slices = adopted(
        "seamless.scheduler.policy=greedy",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert [(s.id, s.lendable) for s in slices] == [("trainer/0", True), ("trainer/1", True), ("rollout/0", False)]


def test_with_a_policy_all_gpus_may_be_the_trainers():
    everybody = "seamless.resources=[{name: all, nodes: 2, gpus_per_node: 4, capabilities: [train, rollout]}]"
    one_gpu = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    config, slices = adopted(everybody, "seamless.scheduler.policy=colocated", one_gpu)
    assert [s.lendable for s in slices] == [True] * 8
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node) == (0, 4)
    assert config.actor_rollout_ref.hybrid_engine
    _, of_verls_keys = adopted("seamless.scheduler.policy=colocated", "trainer.n_gpus_per_node=4", one_gpu)
    assert [s.id for s in of_verls_keys] == ["trainer/0", "trainer/1", "trainer/2", "trainer/3"]


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([MIXED, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"], "trainers", "would straddle"),
        ([MIXED.replace("[rollout]}", "[train]}")], "seamless.scheduler.policy", "nobody lends them to rollout"),
        (
            [MIXED.replace("[rollout]}", "[train]}"), "seamless.scheduler.policy=disaggregated"],
            "seamless.scheduler.policy",
            "never lends them to rollout",
        ),
        (
            ["seamless.scheduler.policy=verl_gate", "trainer.n_gpus_per_node=4"],
            "seamless.scheduler.policy",
            "nobody would generate the first batch",
        ),
        (
            [
                MIXED,
                "seamless.scheduler.policy=greedy",
                "trainer.v1.separate_async.hybrid_rollout.enable_switch=true",
            ],
            "enable_switch",
            "beside seamless.scheduler.policy",
        ),
        (
            [
                "seamless.scheduler.policy=greedy",
                "trainer.n_gpus_per_node=3",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            ],
            "trainer.n_gpus_per_node",
            "would straddle",
        ),
    ],
)
def test_what_cannot_work_is_refused_naming_the_key(overrides, key, said):
    from seamless_verl.errors import ConfigError

    with pytest.raises(ConfigError, match=said) as refused:
        adopted(*overrides)
    assert key in refused.value.key


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.rollout.name=sglang"],
        ["model_engine=megatron", "actor_rollout_ref.rollout.name=vllm"],
        ["model_engine=megatron", "actor_rollout_ref.rollout.name=sglang"],
    ],
    ids=["sglang", "megatron", "both"],
)
def test_other_engines_compose_and_are_cut_into_the_same_slices(overrides):
    from verl.utils.config import omega_conf_to_dataclass

    config, slices = adopted(MIXED, *overrides)
    reference = adopted(MIXED)[1]
    assert slices == reference
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).name == config.actor_rollout_ref.rollout.name


def test_the_pools_of_the_trainer_want_their_accelerator(monkeypatch):
    import ray

    from seamless_verl.verl_adapter.slices.resource_pools import TRAINER_POOL, TagAwareResourcePoolManager

    nodes = [{"Alive": True, "Resources": {"GPU": 8.0}}] * 3
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: dict(enumerate([{"GPU": 8}] * 3)))
    manager = TagAwareResourcePoolManager(
        resource_pool_spec={TRAINER_POOL: [8, 8]}, mapping={}, standing_gpus=8, accelerator="H100"
    )
    manager.create_resource_pool()
    pool = manager.resource_pool_dict[TRAINER_POOL]
    assert pool.store == [8, 8]
    assert pool.accelerator_type == "accelerator_type:H100"


def test_a_cluster_that_is_too_small_for_trainer_and_replicas_is_refused(monkeypatch):
    import ray

    from seamless_verl.errors import ConfigError
    from seamless_verl.verl_adapter.slices.resource_pools import TRAINER_POOL, TagAwareResourcePoolManager

    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 8.0}}] * 2)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: {0: {"GPU": 8}, 1: {"GPU": 8}})
    manager = TagAwareResourcePoolManager(resource_pool_spec={TRAINER_POOL: [8, 8]}, mapping={}, standing_gpus=8)
    with pytest.raises(ConfigError, match="the Ray cluster has: 16"):
        manager.create_resource_pool()

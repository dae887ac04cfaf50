"""Settings that do not go together are refused with key, value and fix before anything starts."""

import pytest

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run import check_combinations
from seamless_verl.scheduling.declaration import with_policy

TRAIN_AND_ROLL_OUT = [
    {"name": "trainers", "nodes": 1, "gpus_per_node": 1, "capabilities": ["train", "rollout"]},
    {"name": "rollouts", "nodes": 1, "gpus_per_node": 1, "capabilities": ["rollout"]},
]


def config(*, mode="seamless", train=8, rollout=0, hybrid=True):
    return {
        "trainer": {"nnodes": 1, "n_gpus_per_node": train, "v1": {"trainer_mode": mode}},
        "actor_rollout_ref": {
            "hybrid_engine": hybrid,
            "rollout": {"nnodes": 1 if rollout else 0, "n_gpus_per_node": rollout, "tensor_model_parallel_size": 1},
        },
    }


def entry(*, device="cuda", tool=None, steps=None, timeline=None, use_v1=True):
    return {
        "trainer": {"device": device, "use_v1": use_v1},
        "global_profiler": {"tool": tool, "steps": steps},
        "ray_kwargs": {"timeline_json_file": timeline},
    }


def test_nothing_special_is_accepted(tmp_path):
    check_combinations.check_entry(entry())
    check_combinations.check_entry(entry(tool="nsys"))  # no step is profiled
    check_combinations.check_entry(entry(tool="torch", steps=[1]))
    check_combinations.check_entry(entry(tool="nsys", steps=[1], device="cpu"))  # verl looks at it with CUDA only
    check_combinations.check_entry(entry(timeline=str(tmp_path / "timeline.json")))


@pytest.mark.parametrize(
    ("settings", "key", "fix"),
    [
        ({"tool": "nsys", "steps": [2, 3]}, "global_profiler.tool", "trainer.v1.trainer_mode=seamless"),
        ({"use_v1": False}, "trainer.use_v1", "verl.trainer.main_ppo"),
        ({"timeline": "/no/such/folder/t.json"}, "ray_kwargs.timeline_json_file", "does not exist"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings, key, fix):
    with pytest.raises(ConfigError) as refused:
        check_combinations.check_entry(entry(**settings))
    assert refused.value.key == key
    assert fix in str(refused.value)


@pytest.mark.parametrize("policy", ["predictive", "greedy", "verl_gate", "colocated"])
def test_a_policy_that_has_nothing_to_lend_is_refused(policy):
    apart = config(train=4, rollout=4, hybrid=False)
    with pytest.raises(ConfigError, match=r"has nothing to lend.*capabilities: \[train, rollout\]"):
        check_combinations.check_layout(apart, SeamlessConfig.from_mapping({"scheduler": {"policy": policy}}))


def test_a_policy_with_slices_to_lend_is_not():
    seamless = SeamlessConfig.from_mapping({"scheduler": {"policy": "predictive"}})
    check_combinations.check_layout(config(train=4, rollout=4), seamless)
    never = SeamlessConfig.from_mapping({"scheduler": {"policy": "disaggregated"}})
    check_combinations.check_layout(config(train=4, rollout=4, hybrid=False), never)


def test_what_verls_own_trainers_do_not_read_is_named_or_refused():
    def unused(mode, **seamless):
        return check_combinations.unused_by_verls_trainer(config(mode=mode), SeamlessConfig.from_mapping(seamless))

    assert unused("seamless", staleness={"eta": 3}) == ()
    assert unused("separate_async") == []
    assert unused("separate_async", staleness={"eta": 3}) == ["seamless.staleness"]
    ours = {"weights": {"sync": "rolling"}, "scheduler": {"margin": 0.5}}
    assert unused("sync", **ours) == ["seamless.weights", "seamless.scheduler"]
    assert unused("a_trainer_of_my_own") == []
    with pytest.raises(ConfigError, match="did you mean seamless"):
        unused("seamles")
    with pytest.raises(ConfigError, match=r"has no effect under trainer\.v1\.trainer_mode=separate_async"):
        unused("separate_async", scheduler={"policy": "predictive"})
    with pytest.raises(ConfigError, match="has no effect"):
        unused("sync", resources=TRAIN_AND_ROLL_OUT)


@pytest.mark.parametrize(
    ("apart", "policy", "way_out"),
    [
        (0, None, "give rollout GPUs of its own (actor_rollout_ref.rollout.nnodes) and no policy, or keep verl's"),
        (0, "colocated", "give rollout GPUs of its own (actor_rollout_ref.rollout.nnodes) and no policy, or keep"),
        (4, "greedy", "leave seamless.scheduler.policy out"),
    ],
    ids=["no policy", "the one that comes by itself", "one beside GPUs of its own"],
)
@pytest.mark.parametrize(
    "unlent",
    [{"name": "sglang"}, {"name": "vllm", "disaggregation": {"enabled": True}}, {"data_parallel_size": 2}],
    ids=["engine", "split", "cores"],
)
def test_what_cannot_be_lent_is_refused_with_a_way_out_that_is_one(unlent, apart, policy, way_out):
    """With the policy that comes by itself in its key, as our command writes it there."""
    asked = config(train=4, rollout=apart)
    asked["actor_rollout_ref"]["rollout"].update(unlent)
    seamless = with_policy(given(policy), asked)
    asked["seamless"] = {"scheduler": {"policy": seamless.scheduler.policy}}
    with pytest.raises(ConfigError) as refused:
        check_combinations.check_engine(asked, seamless)
    assert f"or {way_out}" in str(refused.value)
    asked = config(train=4, rollout=4)
    asked["actor_rollout_ref"]["rollout"].update(unlent)
    check_combinations.check_engine(asked, with_policy(given(), asked))


@pytest.mark.parametrize("value", [None, "abc", 0, 2.0, True])
def test_a_number_that_is_none_names_its_key(value):
    wrong = config(train=4, rollout=4)
    wrong["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"] = value
    with pytest.raises(ConfigError) as refused:
        check_combinations.check_layout(wrong, SeamlessConfig.from_mapping({}))
    assert refused.value.key == "actor_rollout_ref.rollout.tensor_model_parallel_size"


def given(policy=None, resources=()):
    return SeamlessConfig.from_mapping({"scheduler": {"policy": policy}, "resources": list(resources)})


def test_without_gpus_for_rollout_alone_all_do_both_and_it_is_told():
    """As verl's sync mode: a command for verl's own entry point runs as it is."""
    shape = config(train=8)
    seamless = with_policy(given(), shape)
    assert seamless.scheduler.policy == "colocated"
    check_combinations.check_layout(shape, seamless)
    assert check_combinations.told_of_layout(shape, seamless).startswith(
        "layout: devices that generate and then train, in turns: 8 ("
    )


@pytest.mark.parametrize(
    ("shape", "seamless"),
    [
        (config(train=8), given("greedy")),
        (config(train=4, rollout=4), given()),
        (config(train=8, hybrid=False), given()),
        (config(train=1, rollout=1), given(resources=TRAIN_AND_ROLL_OUT)),
    ],
)
def test_what_is_declared_stands(shape, seamless):
    assert with_policy(seamless, shape) == seamless


def test_verls_own_switch_stands():
    shape = config(train=8)
    shape["trainer"]["v1"]["separate_async"] = {"hybrid_rollout": {"enable_switch": True}}
    assert with_policy(given(), shape) == given()
    assert check_combinations.told_of_layout(shape, given()) == ""


def test_gpus_that_only_train_are_told_what_lending_would_bring():
    told = check_combinations.told_of_layout(config(train=4, rollout=2), given())
    assert told.startswith("layout: devices that train: 4, that roll out: 2; ")
    assert "[train, rollout]" in told
    assert check_combinations.told_of_layout(config(train=4, rollout=2), given("greedy")) == ""
    assert check_combinations.told_of_layout(config(train=1, rollout=1), given(resources=TRAIN_AND_ROLL_OUT)) == ""


@pytest.mark.parametrize(
    ("device", "strategy", "story"),
    [
        ("npu", "fsdp2", "knows CPUs and CUDA only"),
        ("cpu", "megatron", "works with FSDP only"),
        ("cuda", "fsdp2", ""),
        ("cpu", "fsdp2", ""),
    ],
)
def test_shared_prefixes_are_refused_before_anything_starts_where_nothing_would_come_of_them(device, strategy, story):
    shape = {"trainer": {"device": device}, "actor_rollout_ref": {"actor": {"strategy": strategy}}}
    check_combinations.check_shared_prefix(shape, SeamlessConfig())
    asked = SeamlessConfig(shared_prefix="auto")
    if not story:
        check_combinations.check_shared_prefix(shape, asked)
        return
    with pytest.raises(ConfigError, match=f"seamless.shared_prefix=auto: .*{story}"):
        check_combinations.check_shared_prefix(shape, asked)

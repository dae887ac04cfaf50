"""What cannot work is refused before anything heavy starts, naming key, value and fix."""

import copy
import socket

import pytest

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine, port_is_free
from seamless_verl.run import check_machine, check_references, preflight

GIB = 1 << 30
RUNNER = "tests.kernel.run.test_check_references.Runner"
CRITICS = "critic.ppo_mini_batch_size"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SEQUENCE = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
DYNAMIC = {"ppo_mini_batch_size": 8, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 511}
SHARED = {"ppo_mini_batch_size": 8, "ulysses_sequence_parallel_size": 2}
ROLLOUT, REF, MICRO = "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu"
REFERENCE = {"actor_rollout_ref__actor__use_kl_loss": True}
ADAPTER = {"path": "Qwen/Qwen3-8B", "lora_adapter_path": "/a", "lora_rank": 8, "lora": {"merge": True}}
BYPASSED = {"algorithm__rollout_correction": {"bypass_mode": True}}
ELSEWHERE = "203.0.113.7"  # kept for documentation: no machine has it
MACHINE = Machine(
    accelerators=0,
    cores=2,
    memory_available=16 * GIB,
    memory_total=24 * GIB,
    disk_free=50 * GIB,
    shared_memory_free=GIB,
)
CONFIG = {
    "trainer": {"device": "cpu", "nnodes": 1, "n_gpus_per_node": 1, "v1": {"trainer_mode": "seamless"}},
    "data": {
        "train_batch_size": 16,
        "max_prompt_length": 256,
        "max_response_length": 768,
        "train_files": [],
        "val_files": [],
    },
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-8B"},
        "actor": {"ppo_mini_batch_size": 8},
        "rollout": {
            "name": "vllm",
            "n": 8,
            "nnodes": 1,
            "n_gpus_per_node": 1,
            "tensor_model_parallel_size": 1,
            "max_model_len": 1024,
        },
    },
    "critic": {"model": {"path": "Qwen/Qwen3-8B"}},
    "algorithm": {"adv_estimator": "grpo"},
    "ray_kwargs": {"ray_init": {"address": "local"}},
}


def config(**changes):
    changed = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = changed
        for parent in parents:
            section = section[parent]
        section[last] = value
    return changed


def check(changed, machine=MACHINE, **seamless):
    settings = SeamlessConfig.from_mapping(seamless)
    warnings = preflight.check_settings(changed, settings, machine)
    return warnings + check_references.check_files(changed, settings)


def test_a_sound_configuration_passes():
    check(config())
    check(config(ray_kwargs__ray_init=None))  # as verl takes it


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        (dict(data__train_batch_size=10), "actor_rollout_ref.actor.ppo_mini_batch_size", "write 5"),
        (dict(trainer__n_gpus_per_node=3), "actor_rollout_ref.actor.ppo_mini_batch_size", "multiple of 3"),
        (dict(critic__ppo_mini_batch_size=16, algorithm__adv_estimator="gae"), CRITICS, "write 8"),
        (dict(critic__ppo_mini_batch_size=3, critic__enable=True), CRITICS, "write 8"),
        # The actor's 64 rows divide over 32 ranks, the critic's 8 do not; nor do they where only the actor's sequences
        # are split.
        (dict(trainer__n_gpus_per_node=32, critic__ppo_mini_batch_size=1, critic__enable=True), CRITICS, "of 32"),
        (
            dict(
                trainer__n_gpus_per_node=16,
                actor_rollout_ref__actor__ulysses_sequence_parallel_size=2,
                critic__ppo_mini_batch_size=1,
                critic__ulysses_sequence_parallel_size=2,
                critic__enable=True,
            ),
            CRITICS,
            "of 16",
        ),
        (
            dict(
                trainer__n_gpus_per_node=256,
                actor_rollout_ref__actor__fsdp_config={"ulysses_sequence_parallel_size": 2},
            ),
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "of 128",
        ),
        (dict(critic__enable=False, algorithm__adv_estimator="gae"), "critic.enable", "adv_estimator=grpo"),
        (
            dict(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=24),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "write 16",
        ),
        (
            dict(actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=48),
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz=true",
        ),
        # It divides the 128 rows of a batch, but not the 64 of a mini-batch.
        (dict(actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=128), f"{ROLLOUT}.{MICRO}", "write 64"),
        (dict(**REFERENCE, actor_rollout_ref__ref={MICRO: 128}), f"{REF}.{MICRO}", "write 64"),
        (dict(algorithm__use_kl_in_reward=True, actor_rollout_ref__ref={MICRO: 24}), f"{REF}.{MICRO}", "write 16"),
        # 32 rows for each of the reference's two ranks, where the actor has one.
        (
            dict(
                trainer__n_gpus_per_node=2,
                actor_rollout_ref__actor={**SHARED, "use_kl_loss": True},
                actor_rollout_ref__ref={MICRO: 64},
            ),
            f"{REF}.{MICRO}",
            "write 32",
        ),
        # An adapter's reference is the actor without it, which computes by rollout's keys.
        (
            dict(
                **REFERENCE,
                **BYPASSED,
                actor_rollout_ref__model__lora_rank=8,
                actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=128,
            ),
            f"{ROLLOUT}.{MICRO}",
            "write 64",
        ),
        (
            dict(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu="some"),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "write 1 or more",
        ),
        (dict(actor_rollout_ref__rollout__nnodes=0), "actor_rollout_ref.rollout.nnodes", "trainer_mode=sync"),
        (
            dict(actor_rollout_ref__rollout__tensor_model_parallel_size=2),
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "divides 1",
        ),
        (dict(actor_rollout_ref__rollout__max_model_len=256), "actor_rollout_ref.rollout.max_model_len", "write 1024"),
        (dict(actor_rollout_ref__actor={**DYNAMIC, "ppo_max_token_len_per_gpu": 1000}), TOKENS, "write 1024"),
        (
            dict(trainer__n_gpus_per_node=2, actor_rollout_ref__actor={**SHARED, **DYNAMIC}),
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "write 512",
        ),
        (
            dict(
                actor_rollout_ref__rollout__log_prob_use_dynamic_bsz=True,
                actor_rollout_ref__rollout__log_prob_max_token_len_per_gpu=1000,
            ),
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            "write 1024",
        ),
        (
            dict(
                **REFERENCE,
                actor_rollout_ref__ref={"log_prob_use_dynamic_bsz": True, "log_prob_max_token_len_per_gpu": 1023},
            ),
            f"{REF}.log_prob_max_token_len_per_gpu",
            "write 1024",
        ),
        (
            dict(algorithm__adv_estimator="gae", critic__ppo_infer_max_token_len_per_gpu=1023),
            "critic.ppo_infer_max_token_len_per_gpu",
            "write 1024",
        ),
        (  # which is not in verl's configuration, so has the 32768 of its code
            dict(
                algorithm__adv_estimator="gae",
                data__max_prompt_length=2**15,
                actor_rollout_ref__rollout__max_model_len=None,
            ),
            "critic.ppo_infer_max_token_len_per_gpu",
            "write +critic.ppo_infer_max_token_len_per_gpu=33536",
        ),
        (dict(trainer__n_gpus_per_node=3, actor_rollout_ref__actor=SHARED), SEQUENCE, "write 1, or train on a multi"),
        (
            dict(
                trainer__n_gpus_per_node=2,
                actor_rollout_ref__actor=SHARED,
                actor_rollout_ref__model__override_config={"attn_implementation": "sdpa"},
            ),
            SEQUENCE,
            "install flash-attn",
        ),
        (
            dict(
                trainer__n_gpus_per_node=2,
                actor_rollout_ref__actor=SHARED,
                actor_rollout_ref__model__use_remove_padding=False,
            ),
            SEQUENCE,
            "write true there",
        ),
        (
            dict(
                trainer__n_gpus_per_node=8,
                actor_rollout_ref__rollout__nnodes=2,
                actor_rollout_ref__rollout__n_gpus_per_node=2,
                actor_rollout_ref__rollout__tensor_model_parallel_size=4,
            ),
            "actor_rollout_ref.rollout.n_gpus_per_node",
            "write 8, or replicas of at most 2",
        ),
        (dict(actor_rollout_ref__model__path="/no/such/model"), "actor_rollout_ref.model.path", "hub name"),
        (dict(data__train_files="/no/such/file.parquet"), "data.train_files", "parquet"),
    ],
)
def test_a_setting_that_cannot_work_names_its_key_and_the_fix(changes, key, fix):
    with pytest.raises(ConfigError) as refused:
        check(config(**changes))
    assert refused.value.key == key
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    "changes",
    [
        dict(algorithm__adv_estimator="gae", critic__ppo_mini_batch_size=4),
        # Nobody asks for a critic.
        dict(critic__ppo_mini_batch_size=16),
        dict(critic__enable=False, critic__ppo_mini_batch_size=16),
        # Rows divide over the data-parallel ranks, not over devices: 64 over 48, eight each; a critic's 8 over 8.
        dict(trainer__n_gpus_per_node=48, actor_rollout_ref__actor__ulysses_sequence_parallel_size=6),
        dict(trainer__n_gpus_per_node=48, actor_rollout_ref__actor__fsdp_config={"ulysses_sequence_parallel_size": 6}),
        dict(trainer__n_gpus_per_node=48, actor_rollout_ref__actor__strategy="megatron"),
        dict(
            trainer__n_gpus_per_node=16,
            critic__enable=True,
            critic__ppo_mini_batch_size=1,
            critic__fsdp={"ulysses_sequence_parallel_size": 2},
        ),
    ],
)
def test_batches_that_verl_divides_without_padding_are_not_refused(changes):
    check(config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=32),
        dict(
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=24,
            actor_rollout_ref__actor__use_dynamic_bsz=True,
        ),
        # Two ranks of 32 rows each, where four devices would have 16.
        dict(
            trainer__n_gpus_per_node=4,
            actor_rollout_ref__actor__ulysses_sequence_parallel_size=2,
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=32,
        ),
        # A row of 1024 tokens on two GPUs.
        dict(trainer__n_gpus_per_node=2, actor_rollout_ref__actor={**SHARED, **DYNAMIC, TOKENS.split(".")[-1]: 512}),
        dict(actor_rollout_ref__actor={**DYNAMIC, "strategy": "megatron"}),
        # Replicas of one GPU, or of four on nodes of four and of eight.
        dict(trainer__n_gpus_per_node=8, actor_rollout_ref__rollout__n_gpus_per_node=2),
        dict(
            trainer__n_gpus_per_node=8,
            actor_rollout_ref__rollout__n_gpus_per_node=4,
            actor_rollout_ref__rollout__tensor_model_parallel_size=4,
        ),
        # Nobody computes these: log-probs are copied, a reference is not asked for, or is the actor itself.
        dict(**BYPASSED, actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=128),
        dict(actor_rollout_ref__ref={MICRO: 128}),
        dict(**REFERENCE, actor_rollout_ref__model=ADAPTER, actor_rollout_ref__ref={MICRO: 128}),
        # verl's V1 trainer does not read these two.
        dict(algorithm__adv_estimator="gae", critic__use_dynamic_bsz=True, critic__ppo_max_token_len_per_gpu=1023),
    ],
)
def test_what_works_in_verl_is_not_refused(changes):
    check(config(**changes))


def test_an_engine_that_is_shorter_than_the_longest_row_is_told_and_rows_are_as_long_as_it_makes_them():
    exact = {**DYNAMIC, "ppo_max_token_len_per_gpu": 800}
    (told,) = check(config(actor_rollout_ref__rollout__max_model_len=800, actor_rollout_ref__actor=exact))
    assert "max_model_len=800: answers to the longest prompts end 224 tokens early" in told
    with pytest.raises(ConfigError, match="longest row, which has 801"):
        check(config(actor_rollout_ref__rollout__max_model_len=801, actor_rollout_ref__actor=exact))


def test_a_schedule_in_steps_is_told_where_a_step_has_several_updates():
    optim = {"lr_warmup_steps": 10, "lr_decay_steps": None}
    asked = dict(actor_rollout_ref__actor__optim=optim, critic__optim={"lr_warmup_steps": 5, "lr_decay_steps": 70})
    (told,) = check(config(**asked))
    assert told.startswith("actor_rollout_ref.actor.optim.lr_warmup_steps=10 counts calls to update")
    assert "of which a step has 2 here" in told
    assert told.endswith("write 20 for 10 steps")
    _, warmup, decay = check(config(**asked, critic__enable=True))
    assert "critic.optim.lr_warmup_steps=5" in warmup
    assert "write 140 for 70 steps" in decay
    assert not check(config(**asked, actor_rollout_ref__actor__ppo_mini_batch_size=16))
    assert not check(config(**asked, trainer__v1__trainer_mode="sync"))
    assert not check(config(actor_rollout_ref__actor__optim={"lr_warmup_steps": -1}))


def test_what_verl_computes_over_a_batch_is_told_where_it_is_over_a_mini_batch_here():
    for of in ("gae", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        (told,) = check(config(algorithm__adv_estimator=of))
        assert told.startswith(f"algorithm.adv_estimator={of}: ")
        assert "over 8 prompts here, over 16 under verl's sync" in told
        assert "write actor_rollout_ref.actor.ppo_mini_batch_size=16" in told
    (told,) = check(config(algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}))
    assert told.startswith("algorithm.kl_ctrl.type=adaptive: ")
    assert not check(config(algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed"}}))
    assert not check(config(algorithm={"use_kl_in_reward": False, "kl_ctrl": {"type": "adaptive"}}))
    assert not check(config(algorithm__adv_estimator="gae", actor_rollout_ref__actor__ppo_mini_batch_size=16))


def test_with_a_policy_nobody_need_only_roll_out():
    check(config(actor_rollout_ref__rollout__nnodes=0), scheduler={"policy": "colocated"})


def test_a_gpu_recipe_needs_a_gpu_or_a_cluster(monkeypatch):
    monkeypatch.setattr(check_machine, "is_installed", lambda module: True)
    with pytest.raises(MachineError, match="this machine has none"):
        check(config(trainer__device="cuda"))
    check(config(trainer__device="cuda", ray_kwargs__ray_init__address="auto"))


@pytest.mark.parametrize("short", ["memory_available", "disk_free"])
def test_a_machine_that_is_too_small_is_told_so(short):
    fields = {name: getattr(MACHINE, name) for name in Machine.__slots__}
    with pytest.raises(MachineError, match="1.0 GiB"):
        check(config(), machine=Machine(**{**fields, short: GIB}))


def test_too_little_shared_memory_is_refused_on_a_cpu_and_told_on_gpus(monkeypatch):
    fields = {name: getattr(MACHINE, name) for name in Machine.__slots__} | {"shared_memory_free": 64 << 20}
    with pytest.raises(MachineError, match=r"64 MiB free in /dev/shm.*Fix: .*--shm-size"):
        check(config(), machine=Machine(**fields))
    on_gpus = config(trainer__device="cuda")
    machine = Machine(**{**fields, "accelerators": 2})
    (told,) = check_machine.check_room(on_gpus, machine)
    assert "64 MiB free in /dev/shm" in told
    assert check_machine.check_room(config(ray_kwargs__ray_init__address="auto", trainer__device="cuda"), machine) == []


def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match="in use"):
            check(config(), proxy={"port": port})
    assert port_is_free("127.0.0.1", 0)


@pytest.mark.parametrize("port", [0, 8123])
@pytest.mark.parametrize("host", [ELSEWHERE, "no-such-host.invalid", "a..b"])
def test_a_host_that_cannot_be_bound_is_refused_as_a_host(host, port):
    agent = {"runner": RUNNER, "kwargs": {"address": "a"}}
    with pytest.raises(ConfigError, match=f"{host}: is no address that .* can listen on: .") as refused:
        check(config(), agent=agent, proxy={"host": host, "port": port})
    assert refused.value.key == "seamless.proxy.host"
    # Nobody binds it where no agent talks to a proxy, and another machine's may be the right one there.
    check(config(), proxy={"host": host, "port": port})
    check(config(ray_kwargs__ray_init__address="auto"), agent=agent, proxy={"host": host, "port": port})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_hosts_that_can_be_bound_are_accepted(host):
    check(
        config(),
        agent={"runner": RUNNER, "kwargs": {"address": "a"}},
        proxy={"host": host},
    )

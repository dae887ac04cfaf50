"""Which of verl's advantage estimators its V1 trainer can serve, and which count rows where grpo counts rollouts.

verl's own `PPOTrainer._compute_advantage` runs here over a TransferQueue that has whatever an estimator might ask for.
"""

import pytest
import torch

from seamless_verl.run.check_batches import ESTIMATORS, OF_ROWS, OF_SEVERAL, UNSERVED

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

TWO, FORKED = ["p_0_0", "p_1_0"], ["p_0_0", "p_1_0", "p_0_1"]  # prompt, rollout, row: 0 passes and 1 fails
ALONE = ["p_0_0", "q_0_0"]  # one rollout of each prompt
UNKNOWN_TO_V1 = ["prompts", "attention_mask", "format", "reward_baselines", "sum_pi_squared"]


def computed(estimator, keys, monkeypatch, **algorithm):
    """What is stored of each row then, by key, and the coefficient of a KL penalty that adapts."""
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.core_algos import AdaptiveKLController
    from verl.trainer.ppo.v1 import trainer_base

    from seamless_verl.verl_adapter.trainer.batches import on_real_rows
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    numbers = ["rollout_log_probs", "old_log_probs", "ref_log_prob", "values", *UNKNOWN_TO_V1]
    stored = {}
    for key in keys:
        width = 1 if key.startswith("pad") else 3
        reward = torch.zeros(width)
        reward[-1] = float(key.startswith("p_0"))
        mask = torch.full((width,), int(width > 1))
        row = {name: torch.full((width,), -0.5) for name in numbers} | {"rm_scores": reward, "response_mask": mask}
        stored[key] = row | {"ref_log_prob": torch.full((width,), -0.7)}

    def get(keys, partition_id, select_fields):
        found = {name: [stored[key][name] for key in keys] for name in select_fields if name in stored[keys[0]]}
        nested = {name: torch.nested.as_nested_tensor(of, layout=torch.jagged) for name, of in found.items()}
        return TensorDict({**nested, "uid": NonTensorStack(*(key.split("_")[0] for key in keys))}, batch_size=len(keys))

    def put(keys, partition_id, fields):
        for name, column in fields.items():
            for key, row in zip(keys, column.unbind(), strict=True):
                stored[key][name] = row
        tags = [tag for key, tag in zip(batch.keys, batch.tags, strict=True) if key in keys]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags, fields=[*stored[keys[0]]])

    monkeypatch.setattr(trainer_base.tq, "kv_batch_get", get)
    monkeypatch.setattr(trainer_base.tq, "kv_batch_put", put)
    algorithm = {
        "adv_estimator": estimator, "use_kl_in_reward": True, "kl_penalty": "kl", "gamma": 1.0, "lam": 0.95,
        "gdpo_reward_keys": ["format"], **algorithm,
    }  # fmt: skip
    trainer = object.__new__(SeamlessTrainer)
    trainer.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.18, horizon=100)
    tags = [{"is_padding": key.startswith("pad"), "response_len": len(stored[key]["response_mask"])} for key in keys]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    done = on_real_rows(batch, lambda rows: trainer._compute_advantage(rows, {}))
    assert (done.keys, done.tags) == (keys, tags)
    assert set(done.fields) == set(stored[keys[0]]), "workers fetch what it names, of each row"
    return stored, trainer.kl_ctrl_in_reward.value


def advantages(estimator, keys, monkeypatch, **algorithm):
    """The first two rows' advantages, without a KL penalty."""
    stored, _ = computed(estimator, keys, monkeypatch, use_kl_in_reward=False, **algorithm)
    return torch.stack([stored[key]["advantages"] for key in keys[:2]])


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - UNSERVED))
def test_v1_serves_an_estimator_that_we_let_pass(estimator, monkeypatch):
    assert advantages(estimator, TWO, monkeypatch).isfinite().all()


@pytest.mark.parametrize("estimator", sorted(UNSERVED))
def test_v1_falls_over_an_estimator_that_we_refuse(estimator, monkeypatch):
    """Where this fails verl has mended it: then it may be taken from `UNSERVED`, when a run has shown it."""
    with pytest.raises((AssertionError, KeyError, TypeError), match="|".join(UNKNOWN_TO_V1)):
        advantages(estimator, TWO, monkeypatch)


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - UNSERVED - {"gae", "reinforce_plus_plus"}))
def test_a_second_row_of_a_rollout_weighs_with_the_estimators_that_we_warn_of(estimator, monkeypatch):
    """The two that are left out compare no rollouts of a prompt."""
    differs = not torch.allclose(advantages(estimator, TWO, monkeypatch), advantages(estimator, FORKED, monkeypatch))
    assert differs == (estimator in OF_ROWS)


@pytest.mark.parametrize("padding", [["pad_0_0"], ["pad_0_0", "pad_1_0", "pad_2_0"]])
@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - UNSERVED))
def test_padding_counts_neither_in_a_group_nor_in_a_batch(estimator, padding, monkeypatch):
    """As `PPOTrainer._compute_advantage` counts it: gpg by rows, grpo_passk in a group of its own, the KL by rows."""
    alone, coefficient = computed(estimator, TWO, monkeypatch)
    beside, coefficient_beside = computed(estimator, [*padding, *TWO], monkeypatch)
    assert coefficient_beside == coefficient
    for key in TWO:
        assert torch.equal(beside[key]["advantages"], alone[key]["advantages"])
    for name in ("advantages", "returns", "token_level_rewards"):
        assert [beside[key][name].tolist() for key in padding] == [[0.0]] * len(padding)


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - UNSERVED))
def test_a_rollout_with_none_beside_it_teaches_nothing_under_the_estimators_that_we_refuse_then(estimator, monkeypatch):
    """Where this fails verl has mended it, and `OF_SEVERAL` can lose the name."""
    try:
        useless = not advantages(estimator, ALONE, monkeypatch).any()
    except ValueError as error:
        useless = "at least 2 samples" in str(error)
    assert useless == (estimator in OF_SEVERAL)


def test_a_reweighted_batch_comes_back_in_another_order(monkeypatch):
    """Why `check_estimator` refuses ``use_pf_ppo``: V1 writes what comes back under the keys as they were. The check
    can go when this fails."""
    plain = advantages("gae", TWO, monkeypatch)
    method = {"reweight_method": "pow", "weight_pow": 2.0}  # of the reward: only the row that passes is drawn
    drawn = advantages("gae", TWO, monkeypatch, use_pf_ppo=True, pf_ppo=method)
    assert torch.equal(drawn[1], plain[0]), "the row that fails gets the advantages of the one that passes"
    assert not torch.equal(plain[1], plain[0])

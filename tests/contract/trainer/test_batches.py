"""What is done about the lag: verl's own keys, A-3PO's loss among verl's, and rows that were cut off."""

import importlib

import pytest

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        yield importlib.import_module("verl.trainer.ppo.v1")


def adopted(*overrides):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from seamless_verl.run import compose
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config

    ours = ["hydra.searchpath=[file://" + str(compose.our_config_dir()) + "]", "+seamless=default"]
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose("ppo_trainer", overrides=[*ours, "seamless.run_dir=/runs/x", *overrides])
    adopt_config(config)
    return config


FORGOTTEN = "actor_rollout_ref.rollout.calculate_log_probs=false"  # verl 0.9.1 keeps them unless told not to


@pytest.mark.parametrize(
    ("overrides", "rollout_is"),
    [
        ([], "token"),
        ([FORGOTTEN], None),  # there is nothing to correct with
        (["seamless.staleness.eta=0"], None),
        (["seamless.staleness.correction=verl"], None),
        (["algorithm.rollout_correction.rollout_is=sequence"], "sequence"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], None),
        (["algorithm.rollout_correction.bypass_mode=true"], None),
    ],
)
def test_token_level_truncated_weights_are_the_default_and_the_user_has_the_last_word(overrides, rollout_is):
    assert adopted(*overrides).algorithm.rollout_correction.rollout_is == rollout_is


@pytest.mark.parametrize(("asked", "factor"), [((), 512), (("actor_rollout_ref.actor.loss_scale_factor=9",), 9)])
def test_without_length_bias_a_token_weighs_the_same_beside_any_other_row(asked, factor):
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    mode = "seq-mean-token-sum-norm"
    config = adopted(f"actor_rollout_ref.actor.loss_agg_mode={mode}", "data.max_response_length=512", *asked)
    assert config.critic.loss_scale_factor == factor, "as its mode, it is the actor's"

    def loss(*micro_batches):
        losses = []
        for lengths in micro_batches:  # verl pads each to its own longest row
            mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            given = config.actor_rollout_ref.actor.loss_scale_factor
            losses.append(agg_loss(mask.float(), mask, mode, global_batch_size=4, loss_scale_factor=given))
        return float(sum(losses))

    assert loss([1, 1], [9, 9]) == pytest.approx(loss([1, 9], [1, 9])) == pytest.approx(20 / 4 / factor)
    assert adopted().actor_rollout_ref.actor.loss_scale_factor is None, "another mode knows none"


def test_a3po_takes_the_behaviour_for_old_and_needs_its_log_probs():
    from seamless_verl.errors import ConfigError

    config = adopted("seamless.staleness.correction=a3po")
    assert config.algorithm.rollout_correction.bypass_mode
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "a3po"
    with pytest.raises(ConfigError, match=r"calculate_log_probs=False"):
        adopted(FORGOTTEN, "seamless.staleness.correction=a3po")
    for key, value, fix in (
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo", "vanilla"),
        ("algorithm.rollout_correction.rollout_is", "sequence", "null"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1", "null"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}={value}: .*a3po.*write {fix}"):
            adopted(f"{key}={value}", "seamless.staleness.correction=a3po")


@pytest.mark.parametrize(("name", "value"), [("use_policy_gradient", True), ("use_task_rewards", False)])
def test_a_teachers_loss_does_not_take_a3pos_weights_for_its_own(name, value):
    from seamless_verl.errors import ConfigError

    a3po, key = "seamless.staleness.correction=a3po", f"distillation.distillation_loss.{name}"
    adopted(a3po, f"{key}={value}")  # no teacher
    adopted(a3po, "distillation.enabled=true")  # beside a loss of a3po's
    with pytest.raises(ConfigError, match=rf"{key}={value}: .*a3po.*write {str(not value).lower()}"):
        adopted(a3po, "distillation.enabled=true", f"{key}={value}")


@pytest.mark.parametrize(
    ("name", "value"), [("rollout_is", "token"), ("rollout_rs", "seq_mean_k1"), ("loss_type", "reinforce")]
)
def test_what_verl_does_not_read_beside_bypass_mode_is_refused_unless_the_loss_is_told(name, value):
    from seamless_verl.errors import ConfigError

    asked = f"algorithm.rollout_correction.{name}={value}"
    loss = "actor_rollout_ref.actor.policy_loss"
    told = f"+{loss}.rollout_correction.{name}={value}"
    adopted(asked)
    bypassed = [asked, "algorithm.rollout_correction.bypass_mode=true"]
    for more in ([], [told], [f"{loss}.loss_mode=bypass_mode"]):
        with pytest.raises(ConfigError, match=rf"{asked}: .*bypass_mode=false.*{loss}.loss_mode=bypass_mode and \+"):
            adopted(*bypassed, *more)
    adopted(*bypassed, f"{loss}.loss_mode=bypass_mode", told)


def tensors(seed=0):
    import torch

    generator = torch.Generator().manual_seed(seed)
    old, now, advantages = (torch.randn(4, 6, generator=generator) for _ in range(3))
    mask = torch.ones(4, 6)
    mask[0, 4:] = 0
    return {
        "old_log_prob": old - 2,
        "log_prob": (old - 2 + 0.3 * now).requires_grad_(),
        "advantages": advantages,
        "response_mask": mask,
    }


def actor():
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def loss_of(mode, inputs, weights=None):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    return get_policy_loss_fn(mode)(**inputs, loss_agg_mode="token-mean", config=actor(), rollout_is_weights=weights)


def test_at_a_lag_of_one_it_is_ppo_against_the_behaviour():
    import torch

    ours, _ = loss_of("a3po", tensors(), torch.ones(4, 6))
    theirs, _ = loss_of("vanilla", tensors())
    assert torch.allclose(ours, theirs)


def test_at_a_longer_lag_it_is_what_the_formula_says_token_by_token():
    import math

    import torch

    inputs = tensors(seed=3)
    weights = torch.full((4, 6), 1 / 3)
    loss, metrics = loss_of("a3po", inputs, weights)
    loss.backward()
    total, truncated, tokens = 0.0, 0, 0
    for row in range(4):
        for token in range(6):
            if not inputs["response_mask"][row, token]:
                continue
            behaviour = inputs["old_log_prob"][row, token].item()
            now, advantage = inputs["log_prob"][row, token].item(), inputs["advantages"][row, token].item()
            proximal = behaviour / 3 + 2 * now / 3
            ratio = math.exp(now - proximal)
            clipped = min(max(ratio, 0.8), 1.2)
            policy = max(-advantage * ratio, -advantage * clipped)
            if advantage < 0:
                policy = min(policy, -advantage * 3.0)
            total += min(math.exp(proximal - behaviour), 2.0) * policy
            truncated += math.exp(proximal - behaviour) >= 2.0
            tokens += 1
    assert loss.item() == pytest.approx(total / tokens, rel=1e-4)
    assert metrics["actor/a3po_truncated"] == pytest.approx(truncated / tokens)
    assert inputs["log_prob"].grad.abs().sum() > 0


def test_without_its_weights_the_loss_refuses():
    with pytest.raises(ValueError, match=r"seamless\.staleness\.correction=a3po"):
        loss_of("a3po", tensors())


def test_the_weight_of_a_token_is_one_over_the_lag_of_the_version_that_generated_it():
    import torch

    from seamless_verl.verl_adapter.trainer.batches import interpolation_weights

    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    made_by = [(0, 2, 4), (3, 5, 6), (5, 6, 8)]
    weights = interpolation_weights(mask, {"min_global_steps": 4}, made_by, version=8)
    assert weights.tolist() == [0.25, 0.25, 1.0, 0.5, 0.5, 1.0]
    rejected = torch.tensor([1, 0, 0, 1, 1, 1])  # by verl, in the same mask
    assert interpolation_weights(rejected, {}, made_by, version=8).tolist() == [1.0] * 6
    weights = interpolation_weights(rejected, {"min_global_steps": 4}, made_by, version=8)
    assert weights.tolist() == [0.25, 1.0, 1.0, 0.5, 0.5, 1.0]
    whole = interpolation_weights(mask, {"min_global_steps": 6}, None, version=8)
    assert whole.tolist() == [0.5, 0.5, 1.0, 0.5, 0.5, 0.5]
    assert interpolation_weights(mask, {"is_padding": True}, None, version=8).tolist() == [1.0] * 6


@pytest.fixture
def stored(monkeypatch):
    """TransferQueue's two functions that are used here, over one dict of jagged columns."""
    import torch
    import transfer_queue
    from tensordict import TensorDict

    rows = {
        "a": {"advantages": torch.tensor([1.0, 1.0]), "response_mask": torch.tensor([1, 1]), "extra_fields": {}},
        "b": {"advantages": torch.tensor([-1.0] * 4), "response_mask": torch.tensor([1] * 4), "extra_fields": {}},
    }

    def get(keys, partition_id, select_fields):
        def column(name):
            values = [rows[key][name] for key in keys]
            tensor = isinstance(values[0], torch.Tensor)
            return torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensor else values

        return {name: column(name) for name in select_fields}

    def put(keys, partition_id, fields):
        assert isinstance(fields, TensorDict)
        for name, column in fields.items():
            for key, row in zip(keys, column.unbind(), strict=True):
                rows[key][name] = row
        return transfer_queue.KVBatchMeta(
            partition_id=partition_id, keys=keys, tags=[{} for _ in keys], fields=[*rows[keys[0]]]
        )

    monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
    monkeypatch.setattr(transfer_queue, "kv_batch_put", put)
    return rows


def batch():
    from transfer_queue import KVBatchMeta

    tags = [
        {"response_len": 2, "seq_len": 7, "min_global_steps": 3},
        {"response_len": 4, "seq_len": 6, "min_global_steps": 1},
    ]
    return KVBatchMeta(partition_id="train", keys=["a", "b"], tags=tags)


def test_rows_that_were_cut_off_have_zero_advantage(stored):
    from seamless_verl.verl_adapter.trainer.batches import zero_overlong_advantages

    assert zero_overlong_advantages(batch(), (4, None)) == 0.5
    assert stored["a"]["advantages"].tolist() == [1.0, 1.0]
    assert stored["b"]["advantages"].tolist() == [0.0] * 4
    assert zero_overlong_advantages(batch(), (5, 8)) == 0.0
    assert zero_overlong_advantages(batch(), (5, 7)) == 0.5, "max_model_len ended it"
    assert stored["a"]["advantages"].tolist() == [0.0, 0.0]


def test_the_stamp_says_what_was_cut_off_not_the_length_with_the_words_of_tools(stored):
    from seamless_verl.verl_adapter.trainer.batches import zero_overlong_advantages

    stored["a"]["extra_fields"] = {"seamless": {"cut_off": True}}  # a turn's limit, two tokens into the answer
    stored["b"]["extra_fields"] = {"seamless": {"cut_off": False}}  # complete; a tool said most of it
    assert zero_overlong_advantages(batch(), (4, 6)) == 0.5
    assert stored["a"]["advantages"].tolist() == [0.0, 0.0]
    assert stored["b"]["advantages"].tolist() == [-1.0] * 4


def test_interpolation_weights_are_stored_where_verl_passes_them_on(stored):
    from seamless_verl.verl_adapter.trainer.batches import write_interpolation_weights

    written = write_interpolation_weights(batch(), version=3)
    assert "rollout_is_weights" in written.fields  # else no worker fetches them
    assert stored["a"]["rollout_is_weights"].tolist() == [1.0, 1.0]
    assert stored["b"]["rollout_is_weights"].tolist() == [0.5] * 4


def test_tokens_of_too_old_weights_do_not_count_and_their_row_does(stored):
    import torch

    from seamless_verl.verl_adapter.trainer.batches import mask_old_tokens

    # Version 1 made a token, a tool said one, version 2 went on with two.
    stored["b"]["response_mask"] = torch.tensor([1, 0, 1, 1])
    stored["b"]["extra_fields"] = {"seamless": {"made_by": [(0, 1, 1), (2, 4, 2)]}}
    assert mask_old_tokens(batch(), version=3, most=2) == 0.0
    assert mask_old_tokens(batch(), version=3, most=1) == pytest.approx(1 / 5)
    assert stored["b"]["response_mask"].tolist() == [0, 0, 1, 1]
    assert stored["a"]["response_mask"].tolist() == [1, 1], "of version 3"
    assert stored["b"]["advantages"].tolist() == [-1.0] * 4
    stored["b"]["extra_fields"] = {}  # of verl's own agent loops: the row's oldest version stands for all
    assert mask_old_tokens(batch(), version=3, most=1) == pytest.approx(2 / 4)
    assert stored["b"]["response_mask"].tolist() == [0, 0, 0, 0]
    assert mask_old_tokens(batch(), version=9, most=1) == 0.0
    assert stored["a"]["response_mask"].tolist() == [1, 1], "a mean over no token is no number"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_is_spread_over_the_optimizer_steps(ranks):
    """Sessions left 33 rows where a step has 32: verl adds 31 and would let one row be a step of its own."""
    from transfer_queue import KVBatchMeta

    from seamless_verl.verl_adapter.trainer.batches import spread_padding

    share, mini_batch, real = 64 // ranks, 32 // ranks, 33
    keys = [f"row{row}" for row in range(64)]
    dealt = [key for rank in range(ranks) for key in keys[rank::ranks]]  # in order on each rank, as verl deals them
    tags = [{"is_padding": int(key[3:]) >= real} for key in dealt]
    batch = KVBatchMeta(partition_id="train", keys=list(dealt), tags=tags, extra_info={})
    spread_padding(batch, share, mini_batch)
    assert sorted(batch.keys) == sorted(keys)
    steps = [0, 0]
    for row, tag in enumerate(batch.tags):
        assert tag["is_padding"] is (int(batch.keys[row][3:]) >= real)
        steps[row % share // mini_batch] += not tag["is_padding"]
    assert abs(steps[0] - steps[1]) <= ranks
    for rank in range(ranks):
        kept = [int(key[3:]) for key in batch.keys[rank * share : (rank + 1) * share] if int(key[3:]) < real]
        assert kept == sorted(kept), "groups stay together"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [64, 40])  # 40: as verl pads for the critic alone, before it trains the actor
def test_padding_is_spread_over_the_steps_of_a_critic_that_takes_more_of_them(rows, ranks):
    from omegaconf import OmegaConf
    from transfer_queue import KVBatchMeta

    from seamless_verl.config import SeamlessConfig
    from seamless_verl.verl_adapter.trainer.batches import in_training_order

    real = 33
    dealt = [row for rank in range(ranks) for row in range(rank, rows, ranks)]
    tags = [{"is_padding": row >= real, "seq_len": 100 + row * 37 % 64} for row in dealt]
    batch = KVBatchMeta(partition_id="train", keys=[f"{row}_0_0" for row in dealt], tags=tags)
    actor = {"rollout": {"n": 4}, "actor": {"ppo_mini_batch_size": 8}}
    config = OmegaConf.create({"actor_rollout_ref": actor, "critic": {"ppo_mini_batch_size": 2}})
    ordered = in_training_order(batch, config, SeamlessConfig(), ranks, ranks)
    steps = [0] * (rows // 8)
    for row, tag in enumerate(ordered.tags):
        steps[row % (rows // ranks) // (8 // ranks)] += not tag["is_padding"]
    assert sum(steps) == real
    assert max(steps) - min(steps) <= ranks, steps


@pytest.mark.parametrize(("padding", "share", "mini_batch"), [(0, 8, 4), (3, 6, 4)])
def test_a_batch_without_padding_or_without_updates_stays_as_verl_dealt_it(padding, share, mini_batch):
    from transfer_queue import KVBatchMeta

    from seamless_verl.verl_adapter.trainer.batches import spread_padding

    keys = [f"row{row}" for row in range(share)]
    tags = [{"is_padding": row < padding} for row in range(share)]
    batch = KVBatchMeta(partition_id="train", keys=list(keys), tags=tags, extra_info={})
    spread_padding(batch, share, mini_batch)
    assert batch.keys == keys

"""A micro-batch of padding alone, or of tokens that are all too old, in every loss of verl's that a run can name.

And weights for the lag in a teacher's."""

import importlib
import math

import pytest
import torch

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

LOSSES = [
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo", "a3po",
    "bypass_mode",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        yield importlib.import_module("verl.trainer.ppo.v1")


def actor(loss_type="ppo_clip"):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    told = {"loss_type": loss_type, "rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", dro_beta=0.1, rollout_correction=told)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=8, global_batch_size=4, loss_scale_factor=None)
    return config


def test_all_of_verls_losses_are_looked_at():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(LOSSES) == set(POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize(
    ("mode", "loss_type"), [*((mode, "ppo_clip") for mode in LOSSES), ("bypass_mode", "reinforce")]
)
def test_a_policy_loss_is_zero_where_no_token_counts(mode, loss_type):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    found = {}
    for counted in (0, 1):
        log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        mask = torch.full((1, 2), counted).bool()
        loss, metrics = get_policy_loss_fn(mode)(
            old_log_prob=torch.tensor([[-1.5, -1.5]]), log_prob=log_prob,
            advantages=torch.tensor([[0.5, -0.5]]) * counted, response_mask=mask, loss_agg_mode="token-mean",
            config=actor(loss_type), rollout_is_weights=torch.ones(1, 2),
        )  # fmt: skip
        loss.backward()
        found[counted] = metrics
        if not counted:
            assert loss.item() == 0
            assert log_prob.grad.tolist() == [[0, 0]]
            assert all(math.isfinite(value) for value in metrics.values())
            assert not mask.any(), "the batch's own mask is as it was"
    assert found[0].keys() == found[1].keys(), "all ranks report the same"


def taught(mode, by_gradient, counted, weight=1.0):
    """Loss of two rows, gradient of what the model said, metrics."""
    from tensordict import NonTensorData, TensorDict
    from verl.trainer.distillation import losses
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    def rows(*lengths):
        return torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)

    asked = DistillationLossConfig(loss_mode=mode, topk=2, use_policy_gradient=by_gradient, use_task_rewards=False)
    whole = torch.nested.nested_tensor([torch.full((3,), -1.0), torch.full((4,), -2.0)], layout=torch.jagged)
    model = torch.full((7,), -0.5, requires_grad=True)
    said = torch.nested.nested_tensor_from_jagged(model, whole.offsets())
    of_topk = ("distillation_losses", "student_mass", "teacher_mass")
    fields = {"prompts": rows(1, 2), "responses": rows(2, 2), "response_mask": rows(2, 2) * counted}
    fields |= {"teacher_logprobs": whole.unsqueeze(-1), "old_log_probs": rows(2, 2) * -0.5}
    fields["rollout_is_weights"] = rows(2, 2) * weight
    info = {"dp_size": 1, "batch_num_tokens": 4, "global_batch_size": 2}
    data = TensorDict({**fields, **{key: NonTensorData(value) for key, value in info.items()}}, batch_size=2)
    outputs = {"log_probs": said, **dict.fromkeys(of_topk, -said)}
    loss, metrics = losses.distillation_loss(actor(), DistillationConfig(distillation_loss=asked), outputs, data)
    loss.backward()
    assert data["response_mask"].values().tolist() == [counted] * 4
    return loss.item(), model.grad, metrics


@pytest.mark.parametrize(("mode", "by_gradient"), [("forward_kl_topk", False), ("k1", True), ("k3", False)])
def test_a_teachers_loss_is_zero_where_no_token_counts(mode, by_gradient):
    found = {}
    for counted in (0, 1):
        loss, gradient, found[counted] = taught(mode, by_gradient, counted)
        assert (loss == 0, not gradient.any()) == (not counted,) * 2
    assert found[0].keys() == found[1].keys(), "all ranks report the same"
    for key, value in found[0].items():
        if key.endswith(("_min", "_max")):
            value.extend(found[1][key])
            assert value.aggregate() == found[1][key].aggregate(), "no token is no extreme"
        else:
            assert getattr(value, "values", [value]) == [0.0]


def test_a_teachers_policy_gradient_takes_the_weights_of_the_lag():
    assert taught("k1", True, 1, weight=0.5)[0] == pytest.approx(taught("k1", True, 1)[0] / 2)

"""The `seamless` section: defaults, nesting, and refusals that name key, value and fix."""

import pytest

from seamless_verl.config import SeamlessConfig, StalenessConfig
from seamless_verl.errors import ConfigError


@pytest.mark.parametrize("key", ["module", "cache", "dir"])
def test_names_of_assets_are_texts(key):
    with pytest.raises(ConfigError, match=f"seamless.assets.{key}=5: .* Fix: write a text, or null"):
        SeamlessConfig.from_mapping({"assets": {key: 5}})


def test_an_empty_section_is_the_one_step_lag():
    assert SeamlessConfig.from_mapping(None).staleness.eta == 1


def test_nested_keys_reach_their_section():
    config = SeamlessConfig.from_mapping({"staleness": {"eta": 0}, "agent": {"kwargs": {"processes": 4}}})
    assert config.staleness.eta == 0
    assert config.agent.kwargs == {"processes": 4}


def test_a_section_with_nothing_below_it_is_empty():
    empty = SeamlessConfig.from_mapping({"agent": {"kwargs": None}, "proxy": None, "staleness": {}})
    assert empty == SeamlessConfig.from_mapping({})
    assert empty.agent.kwargs == {}


def test_every_published_cost_model_can_be_named():
    from seamless_verl.decode_cost import PUBLISHED

    for name in PUBLISHED:
        assert SeamlessConfig.from_mapping({"router": {"cost": name}}).router.cost == name


def test_stages_are_read_with_their_rules():
    stages = [
        {"name": "math", "sources": ["gsm"], "until_plateau": {"epochs": 2}},
        {"name": "all", "sources": ["gsm", "code"]},
    ]
    curriculum = SeamlessConfig.from_mapping({"curriculum": {"accuracy_key": "acc", "stages": stages}}).curriculum
    assert curriculum.enabled
    assert curriculum.stages[0].until_plateau.epochs == 2
    assert curriculum.stages[1].sources == ("gsm", "code")


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [
        ({"stalenes": {"eta": 1}}, "seamless.stalenes", "seamless.staleness"),
        ({"staleness": {"etta": 1}}, "seamless.staleness.etta", "seamless.staleness.eta"),
        ({"agent": {"max_turn": 3}}, "seamless.agent.max_turn", "seamless.agent.max_turns"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(section, key, near):
    with pytest.raises(ConfigError) as refused:
        SeamlessConfig.from_mapping(section)
    assert refused.value.key == key
    assert near in refused.value.fix


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"staleness": {"eta": -1}}, "seamless.staleness.eta"),
        ({"staleness": {"eta": 1.5}}, "seamless.staleness.eta"),
        ({"staleness": {"policy": "drop"}}, "seamless.staleness.policy"),
        ({"router": {"policy": "random"}}, "seamless.router.policy"),
        ({"router": {"mu": 1.5}}, "seamless.router.mu"),
        ({"router": {"cost": "70b"}}, "seamless.router.cost"),
        ({"staleness": {"mask_older_than": -1}}, "seamless.staleness.mask_older_than"),
        ({"staleness": {"redundancy": 0.5}}, "seamless.staleness.redundancy"),
        ({"staleness": {"in_flight": 3}}, "seamless.staleness.in_flight"),
        ({"staleness": {"in_flight": 0}}, "seamless.staleness.in_flight"),
        ({"staleness": {"in_flight": 1, "policy": "verl"}}, "seamless.staleness.in_flight"),
        ({"staleness": {"correction": "sequence"}}, "seamless.staleness.correction"),
        ({"curriculum": {"zero_overlong_advantage": 1}}, "seamless.curriculum.zero_overlong_advantage"),
        ({"curriculum": {"history_resampling": True}}, "seamless.curriculum.accuracy_key"),
        ({"curriculum": {"history_resampling": "yes"}}, "seamless.curriculum.history_resampling"),
        ({"curriculum": {"pool_floor": 0}}, "seamless.curriculum.pool_floor"),
        ({"curriculum": {"stages": "math"}}, "seamless.curriculum.stages"),
        *[
            ({"curriculum": {"stages": [{"name": "a", "sources": [], **end}]}}, f"seamless.curriculum.stages[0].{key}")
            for end, key in (
                ({"until_step": "10"}, "until_step"),
                ({"until_epoch": 0}, "until_epoch"),
                ({"until_plateau": {"epochs": 2.5}}, "until_plateau.epochs"),
                ({"until_plateau": {"epochs": None}}, "until_plateau.epochs"),
                ({"until_plateau": {"epochs": 2, "min_gain": "0.01"}}, "until_plateau.min_gain"),
                ({"until_plateau": {"epochs": 2, "min_gain": float("nan")}}, "until_plateau.min_gain"),
            )
        ],
        ({"curriculum": {"stages": [{"name": "a"}]}}, "seamless.curriculum.stages[0].sources"),
        ({"curriculum": {"stages": [{"name": "a", "sourcs": []}]}}, "seamless.curriculum.stages[0].sourcs"),
        ({"staleness": 0}, "seamless.staleness"),
        ({"proxy": {"port": "abc"}}, "seamless.proxy.port"),
        ({"proxy": {"host": None}}, "seamless.proxy.host"),
        ({"staleness": {"eta": True}}, "seamless.staleness.eta"),
        ({"agent": {"deadline_s": 0}}, "seamless.agent.deadline_s"),
        ({"agent": {"max_tokens_per_turn": -5}}, "seamless.agent.max_tokens_per_turn"),
        ({"agent": {"max_tokens_per_turn": 0.5}}, "seamless.agent.max_tokens_per_turn"),
        ({"agent": {"max_turns": 1.5}}, "seamless.agent.max_turns"),
        ({"agent": {"max_concurrent": 2.5}}, "seamless.agent.max_concurrent"),
        ({"agent": {"kwargs": 3}}, "seamless.agent.kwargs"),
        ({"proxy": {"port": 70000}}, "seamless.proxy.port"),
        ({"staleness": 3}, "seamless.staleness"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_key(section, key):
    with pytest.raises(ConfigError) as refused:
        SeamlessConfig.from_mapping(section)
    assert refused.value.key == key
    assert "Fix: " in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_redundancy": 0.5}, r"group_redundancy=0\.5: must be a number >= 1.*no surplus rollouts"),
        ({"group_redundancy": True}, r"group_redundancy=True: must be a number >= 1"),
        ({"stuck": "retries"}, r"stuck=retries: is none of wait, retry, truncate.*write retry"),
        ({"stuck": "retry", "stuck_patience_s": 0}, r"stuck_patience_s=0: must be a number above 0"),
        ({"stuck": "retry", "stuck_patience_s": float("nan")}, r"stuck_patience_s=nan: must be a number above 0"),
        ({"stuck": "retry", "policy": "verl"}, r"stuck=retry: .*write wait, or policy=reserve"),
    ],
)
def test_staleness_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        StalenessConfig(**settings)

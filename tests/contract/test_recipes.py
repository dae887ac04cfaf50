"""Every recipe composes with verl's configuration, and on the machine it is for nothing in it is refused."""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from seamless_verl.config import SeamlessConfig
from seamless_verl.decode_cost import EnginePace
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine
from seamless_verl.memory.gpu_memory import ModelShape
from seamless_verl.recipes.swe.real import runner as swe_runner
from seamless_verl.recipes.swe.real.task import AgentView, SweTask
from seamless_verl.run import check_gpu_memory, check_machine, check_references, compose, new_command, preflight
from seamless_verl.run.check_combinations import replica_size
from seamless_verl.scheduling.declaration import slices_of, verl_keys
from seamless_verl.scheduling.slices import Tag
from seamless_verl.simulation.run import Simulation
from seamless_verl.staleness.routing import Hold, PendingRequest, ReplicaLoad
from seamless_verl.verl_adapter.rollout.holding_balancer import CacheAwareBalancer, HoldingBalancer
from tests.kernel.memory.test_gpu_memory import H100, QWEN3_8B, QWEN3_32B
from tests.kernel.simulation.build import ENGINE, scenario

pytestmark = pytest.mark.timeout(180)

GIB = 1 << 30
RECIPES = sorted(path.stem for path in (compose.our_config_dir() / "recipe").glob("*.yaml"))


def composed(recipe, *overrides):
    # One group after the other as on the command line; an interpolation of Hydra's own has no meaning here.
    platform = "gpu" if "qwen" in recipe else "cpu"
    ours = [f"hydra.searchpath=[file://{compose.our_config_dir()}]", "+seamless=default", f"+platform={platform}"]
    built = [] if platform == "gpu" else ["seamless.assets.dir=/assets"]
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose(
            "ppo_trainer", overrides=[*ours, f"+recipe={recipe}", "seamless.run_dir=/runs/x", *built, *overrides]
        )
    section = SeamlessConfig.from_mapping(OmegaConf.to_container(config.seamless, resolve=True))
    for key, value in verl_keys(section.resources).items():
        OmegaConf.update(config, key, value)
    return OmegaConf.to_container(config, resolve=True), section


def machine(accelerators):
    return Machine(
        accelerators=accelerators,
        cores=2,
        memory_available=16 * GIB,
        memory_total=24 * GIB,
        disk_free=50 * GIB,
        shared_memory_free=GIB,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_composes_and_its_settings_are_accepted(recipe, monkeypatch):
    monkeypatch.setattr(check_machine, "is_installed", lambda module: True)  # as where GPUs are
    config, seamless = composed(recipe)
    assert seamless.recipe == recipe
    assert config["trainer"]["default_local_dir"] == "/runs/x/checkpoints"
    assert config["trainer"]["rollout_data_dir"] == "/runs/x/rows"
    preflight.check_settings(config, seamless, machine(64 if "qwen" in recipe else 0))


@pytest.fixture
def small(tmp_path):
    """Arguments that choose a recipe for the CPU or one GPU: ours, or the one that `seamless-verl new` writes."""
    folder = new_command.write("my_task", tmp_path)
    return lambda name: [f"+recipe={name}", *(["--config-dir", folder] if name == "my_task" else [])]


@pytest.mark.parametrize("cards", [0, 1, 8], ids="{} cards".format)
@pytest.mark.parametrize("recipe", ["arithmetic", "srpo", "swe", "my_task"])
def test_a_small_recipe_starts_as_it_is_on_one_gpu_or_none(recipe, cards, small, on_machine):
    started = on_machine(*small(recipe), cards=cards)
    assert started.code == 0, started.err
    config = OmegaConf.load(started.folder / "config.yaml")
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 1
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1  # also what `seamless-verl try` starts


def test_the_recipe_that_new_writes_takes_all_gpus_that_it_is_given(small, on_machine):
    started = on_machine(*small("my_task"), "trainer.n_gpus_per_node=8", cards=8)
    assert started.code == 0, started.err


def test_the_cpu_is_offered_where_vllm_can_use_it_only(on_machine, monkeypatch):
    many = ["+recipe=arithmetic", "+platform=gpu", "trainer.n_gpus_per_node=9"]
    refused = on_machine(*many, cards=1)
    assert "asks for 9 to train" in refused.err
    assert "+platform=cpu" not in refused.err
    assert "+platform=cpu +recipe=arithmetic" in on_machine(*many, cards=0).err
    assert "or +platform=gpu on GPUs" in on_machine("+recipe=arithmetic", "+platform=cpu", cards=1).err


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "arithmetic"])
def test_its_slices_follow_the_users_layout_and_those_that_train_are_lent(recipe):
    devices = 8 if "qwen" in recipe else 1
    asked = ["trainer.nnodes=3", f"actor_rollout_ref.rollout.n_gpus_per_node={devices}"]
    config, seamless = composed(recipe, *asked)
    slices = slices_of(seamless.resources, replica_gpus=replica_size(config))
    trains = [one for one in slices if Tag.TRAIN in one.capabilities]
    assert sum(len(one.gpus) for one in trains) == 3 * config["trainer"]["n_gpus_per_node"]
    assert all(Tag.ROLLOUT in one.capabilities for one in slices)
    assert len(trains) < len(slices)
    assert config["actor_rollout_ref"]["hybrid_engine"] is True
    # Measured on two cores, where a switch takes 0.1 s; on GPUs, where it takes seconds, nobody has.
    assert seamless.scheduler.policy == ("predictive" if "qwen" in recipe else "greedy")
    _, alone = composed(recipe, "actor_rollout_ref.rollout.nnodes=0")
    assert [entry.name for entry in alone.resources] == ["trainer"]


APART = ["seamless.resources=[]", "seamless.scheduler.policy=null", "actor_rollout_ref.hybrid_engine=false"]
SHAPES = {
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-32B": QWEN3_32B,
    "Qwen/Qwen2.5-32B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
        "vocab_size": 152064,
    },
}


LIVE_POLICIES = ("predictive", "greedy", "disaggregated", "colocated", "verl_gate")
ROUTERS = {
    "gain": ("++seamless.router.policy=marginal_gain", "++seamless.router.mu=0.1"),
    "moving": ("++seamless.router.policy=marginal_gain", "++seamless.router.migrate=true"),
    "fewest": ("++seamless.router.policy=least_requests",),
    "keeping caches": ("++seamless.router.policy=cache_aware",),
    "as they come": ("++seamless.router.oldest_first=false",),
}
# Where engines have told what they take, both sides reckon with that.
PACE = EnginePace(decode=ENGINE.decode, prefill_s_per_token=ENGINE.prefill_s_per_token)


def live(config):
    """Of a run that is configured so: verl's configuration as its trainer reads it, what that trainer schedules with,
    and the class of its router."""
    import verl.trainer.ppo.v1  # noqa: F401  (brings our trainer in; to begin with a module of ours is a cycle)

    from seamless_verl.verl_adapter.slices.standing import StandingServers
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config
    from seamless_verl.verl_adapter.trainer.lending import lending_of

    verls = OmegaConf.create(config)
    seamless = adopt_config(verls)
    servers = SimpleNamespace(get_replicas=list, global_load_balancer=None)
    trainer = SimpleNamespace(
        config=verls,
        seamless=seamless,
        slices=(),
        global_steps=0,
        parameter_sync_step=verls.trainer.v1.seamless.parameter_sync_step,
        flight=SimpleNamespace(recorder=SimpleNamespace(now=lambda: 0.0), follow=None, weights_checked=None),
        rows=SimpleNamespace(attend=lambda call: None),
        reporter=SimpleNamespace(say=None),
        actor_rollout_wg=SimpleNamespace(workers=()),
        llm_server_manager=servers,
        standalone_server_manager=servers,
        checkpoint_manager=None,
        standalone_checkpoint_manager=None,
    )
    router = StandingServers(verls, seamless.router, hybrid=True)._balancer_class()
    return verls, lending_of(trainer, workers=())._scheduler._policy, router


def loads_and_requests():
    """Of two versions, some lent, some full; old and young, long and short, some with a prefix somewhere. The youngest
    request fits nowhere."""
    cache = ENGINE.kv_tokens
    busy = [(40, 90_000), (100, 350_000), (150, 160_000), (290, 300_000), (240, 355_000)]
    loads = [
        ReplicaLoad(
            replica=f"r{number}",
            version=number % 2,
            running=min(requests, ENGINE.max_running),
            waiting=max(0, requests - ENGINE.max_running),
            kv_tokens=1000 * requests,
            kv_room=cache - 1000 * requests,
            max_running=ENGINE.max_running,
            lent=number == 2,
            kept=kept,
            pace=PACE,
        )
        for number, (requests, kept) in enumerate(busy)
    ]
    asks = [
        PendingRequest(
            request=str(number),
            version=number % 2,
            tokens=2 * cache if number == 13 else 1 + 2500 * number,
            arrival=(number,),
            long=number % 3 == 0,
            near=f"r{number % 7}",
        )
        for number in range(14)
    ]
    return loads, asks


def assert_the_simulator_plays(config, seamless):
    """What a live run gets is compared with what a simulation of it holds, each built by its own code."""
    verls, policy, router = live(config)
    batch = {"batch": verls.data.train_batch_size, "mini_batch": verls.actor_rollout_ref.actor.ppo_mini_batch_size}
    played = Simulation(
        scenario(seamless.scheduler.policy, router=seamless.router, scheduler=seamless.scheduler, **batch)
    )
    assert pickle.dumps(played.scheduler._policy) == pickle.dumps(policy), "a policy with all its settings"

    simulated, rules = played.fleet.router, router.rules
    assert simulated.oldest_first == (verls.actor_rollout_ref.rollout.scheduling_policy == "priority")
    assert type(simulated.policy) is type(rules.policy)
    assert simulated.migration == rules.migration
    assert (played.fleet._residents is not None) == issubclass(router, CacheAwareBalancer)
    loads, asks = loads_and_requests()
    decided = rules.policy.route(asks, loads)
    assert simulated.policy.route(asks, loads) == decided
    holds = any(isinstance(decision, Hold) for decision in decided)
    assert holds == issubclass(router, HoldingBalancer), "so that what makes a request wait is compared, too"
    if rules.migration is not None:
        assert simulated.migration.migrations(loads, simulated.cost) == rules.migration.migrations(loads, rules.cost)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "arithmetic"])
def test_the_simulator_plays_what_decides_in_its_run(recipe):
    assert_the_simulator_plays(*composed(recipe))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", LIVE_POLICIES)
@pytest.mark.parametrize("asked", ROUTERS)
def test_the_simulator_plays_what_a_run_may_be_told(policy, asked):
    weighed = ("++seamless.scheduler.margin=0.25", "++seamless.scheduler.max_loans_per_step=2")
    assert_the_simulator_plays(*composed("swe", *ROUTERS[asked], *weighed, f"seamless.scheduler.policy={policy}"))


@pytest.mark.filterwarnings("ignore")
def test_the_router_counts_the_seats_of_all_engine_cores_of_a_replica():
    import verl.trainer.ppo.v1  # noqa: F401  (as in `live`)

    from seamless_verl.verl_adapter.slices.standing import StandingServers

    rollout = "actor_rollout_ref.rollout"
    config, seamless = composed("swe", f"{rollout}.max_num_seqs=48", f"{rollout}.data_parallel_size=2")
    servers = StandingServers(OmegaConf.create(config), seamless.router, hybrid=True)
    assert servers._balancer_class().max_running == 2 * 48


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "qwen" in recipe])
@pytest.mark.parametrize("layout", [APART, []], ids=["apart", "lent"])
def test_its_shares_of_a_card_fit_also_where_nothing_is_lent(recipe, layout, monkeypatch):
    monkeypatch.setattr(check_gpu_memory, "model_shape", lambda path, **_: ModelShape.from_config(SHAPES[path]))
    cards = replace(machine(64), accelerator_memory=H100)
    config, _ = composed(recipe, *layout, "++ray_kwargs.ray_init.address=local")
    assert check_gpu_memory.check_memory(config, cards) == []
    config, _ = composed(recipe, *layout, "++ray_kwargs.ray_init.address=local", f"{check_gpu_memory.SHARE}=0.9")
    if layout != APART:
        with pytest.raises(ConfigError, match="does not fit beside the trainer"):
            check_gpu_memory.check_memory(config, cards)


TASK = SweTask(
    view=AgentView(instance_id="a__b-1", repo="a/b", base_commit="c", problem_statement="p"), test_command="pytest"
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """What the recipes on real data find there: rows of SRPO's sources, each with a task for agents."""
    sources = ["math_dapo"] * 300 + ["codecontests"] * 20 + ["apps"] * 20 + ["codeforces"] * 20 + ["taco"] * 20
    rows = [
        {"data_source": source, "prompt": "", "agent_name": "seamless_agent", "extra_info": {"task": TASK.to_json()}}
        for source in sources
    ]
    for name in ("train", "val"):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    monkeypatch.setenv("SRPO_DATA", str(tmp_path))
    monkeypatch.setenv("SWE_DATA", str(tmp_path))
    return tmp_path


# A cluster has the containers that this machine may lack.
JOINS = "++ray_kwargs.ray_init.address=auto"


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_files_agent_and_the_arguments_of_its_agent_are_accepted(recipe, data):
    check_references.check_files(*composed(recipe, *([JOINS] if "qwen" in recipe else [])), pending=Path("/assets"))


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.startswith("swe")])
def test_a_wrong_argument_of_its_agent_is_refused(recipe, data):
    config, seamless = composed(recipe, JOINS, "+seamless.agent.kwargs.max_concurent=3")
    with pytest.raises(ConfigError, match=r"seamless\.agent\.kwargs\.max_concurent=3") as refused:
        check_references.check_files(config, seamless, pending=Path("/assets"))
    assert refused.value.fix


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "qwen" in recipe and recipe.startswith("swe")])
def test_what_its_sandboxes_need_is_missed_on_this_machine_and_not_where_it_joins_a_cluster(recipe, data, monkeypatch):
    monkeypatch.setattr(swe_runner, "_PACKAGES", {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(MachineError, match="docker: not found in PATH"):
        check_references.check_files(*composed(recipe))
    check_references.check_files(*composed(recipe, JOINS))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_references.check_files(*composed(recipe))


def test_srpo_on_real_data_is_checked_down_to_the_sources_of_its_stages(data):
    check_references.check_files(*composed("srpo_qwen2_5_32b"))
    file = Path(data) / "train.parquet"
    parquet.write_table(parquet.read_table(file).slice(0, 300), file)  # math_dapo only
    with pytest.raises(ConfigError, match=r"stages\[1\]\.sources=codecontests.*math_dapo"):
        check_references.check_files(*composed("srpo_qwen2_5_32b"))

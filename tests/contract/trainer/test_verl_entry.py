"""verl's entry point reads nothing that ours does not know of: a key that is new there shows here."""

import ast
import inspect
import io
import signal
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

# Key, environment variable or call: who honours it for us.
KNOWN = {
    # `environment.trainer_environment`
    "actor_rollout_ref.rollout.full_determinism",
    "actor_rollout_ref.rollout.seed",
    "reward.reward_model.enable",
    "reward.reward_model.rollout.full_determinism",
    "trainer.logger",
    "VERL_FULL_DETERMINISM",
    "VLLM_BATCH_INVARIANT",
    "PYTHONHASHSEED",
    "VERL_RL_INSIGHT_ENABLE",
    # `check_combinations.check_entry`
    "trainer.use_v1",
    "global_profiler.tool",
    "global_profiler.steps",
    "global_profiler.global_tool_config.nsys.controller_nsight_options",
    # `job._start_ray`
    "ray_kwargs.ray_init",
    "ray_kwargs.ray_init.runtime_env",
    "transfer_queue.enable",
    "get_ppo_ray_runtime_env",
    "ray.init",
    "ray.is_initialized",
    # `job._train`, `job._load_config`
    "transfer_queue",
    "trainer.v1.trainer_mode",
    "ray_kwargs.timeline_json_file",
    "ray.timeline",
    "get_trainer_cls",
    "configure_verl_logging",
    "auto_set_device",
    "validate_config",
    "need_critic",
    "need_reference_policy",
    "tq.init",
    "tq.close",
    "self.trainer.init",
    "self.trainer.fit",
    "self.init_agent_loop_manager",
    "tracking.finish",
    # `job._agent_loops`
    "actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "agent_loop_manager_cls.create",
    "load_class_from_fqn",
    "self.trainer.get_llm_client",
    "self.trainer.get_teacher_client",
    "self.trainer.get_reward_handles",
    # the actor in which verl's trainer runs; ours is a process
    "task_runner_class.options",
    "task_runner_class.remote",
    "runner.run.remote",
    "run_ppo",
    "trainer_cls",
    "is_nvtx_available",
    "ray.get",
    # nothing of the configuration
    "default_runtime_env.setdefault",
    "OmegaConf.create",
    "OmegaConf.merge",
    "OmegaConf.resolve",
    "OmegaConf.to_container",
    "getattr",
    "hydra.main",
    "isinstance",
    "len",
    "logger.warning",
    "pprint",
    "print",
    "str",
}


class Reads(ast.NodeVisitor):
    """Dotted keys read from the configuration, variables set, and functions called."""

    def __init__(self):
        self.found = set()
        self.names = {"config": "", "self.config": ""}

    def key_of(self, node):
        """The key under which a configuration's expression lies; None: it is none."""
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in self.names:
            return self.names[ast.unparse(node)]
        if isinstance(node, ast.Attribute):
            base, name = self.key_of(node.value), node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            base, name = self.key_of(node.func.value), getattr(node.args[0], "value", None)
        else:
            return None
        return None if base is None else f"{base}.{name}".lstrip(".")

    def visit_Assign(self, node):
        self.generic_visit(node)
        key = self.key_of(node.value)
        for target in node.targets:
            if key is not None and isinstance(target, ast.Name):
                self.names[target.id] = key
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                self.found.add(target.slice.value)

    def visit_Attribute(self, node):
        key = self.key_of(node)
        if key:
            self.found.add(key)
        self.generic_visit(node)

    def visit_Call(self, node):
        key, name = self.key_of(node), ast.unparse(node.func)
        if key is not None:
            self.found.add(key)
        elif self.key_of(getattr(node.func, "value", None)) is None and "(" not in name and '"' not in name:
            self.found.add(name)
        for child in [*node.args, *node.keywords, *([node.func] if key is None else [node.func.value])]:
            self.visit(child)


def reads_of(source):
    reads = Reads()
    reads.visit(ast.parse(textwrap.dedent(source)))
    found = {name.removesuffix(".get") for name in reads.found}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found) or name in KNOWN}


def test_verls_entry_point_reads_only_what_we_know():
    from verl.trainer import main_ppo

    runner = main_ppo.TaskRunnerV1.__ray_metadata__.modified_class
    parts = (main_ppo.run_ppo, main_ppo.main.__wrapped__, runner.run, runner.init_agent_loop_manager)
    found = set().union(*(reads_of(inspect.getsource(part)) for part in parts))
    assert found - KNOWN == set(), "verl's entry point does something new: honour it (verl_entry, job) or refuse it"
    assert "ray_kwargs.timeline_json_file" in found
    assert "actor_rollout_ref.rollout.full_determinism" in found
    assert "VLLM_BATCH_INVARIANT" in found


def test_a_new_key_and_a_new_variable_would_show():
    source = """
    def run_ppo(config):
        rollout = config.actor_rollout_ref.rollout
        if rollout.get("brand_new", False) and config.trainer.other:
            os.environ["NEW"] = "1"
            start_something(config)
    """
    new = {"actor_rollout_ref.rollout.brand_new", "trainer.other", "NEW", "start_something"}
    assert reads_of(source) - KNOWN == new


@pytest.mark.parametrize(
    ("rollout", "judge", "logger"),
    [(True, False, "console"), (False, True, ["console", "rl_insight"]), (False, False, [])],
)
def test_what_verl_sets_for_its_keys_we_set(monkeypatch, rollout, judge, logger):
    """verl's own function, as far as Ray, beside ours."""
    import os

    import ray
    from omegaconf import OmegaConf
    from verl.trainer import main_ppo

    from seamless_verl.run.environment import trainer_environment
    from seamless_verl.run.supervisor import JOURNALS

    class Enough(Exception):
        pass

    def init(**settings):
        raise Enough

    before = dict(os.environ)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "environ", dict(before))
    config = {
        "actor_rollout_ref": {"rollout": {"full_determinism": rollout, "seed": 7}},
        "reward": {"reward_model": {"enable": judge, "rollout": {"full_determinism": judge}}},
        "trainer": {"logger": logger},
        "ray_kwargs": {"ray_init": {}},
        "transfer_queue": {"enable": True},
    }
    with pytest.raises(Enough):
        main_ppo.run_ppo(OmegaConf.create(config), task_runner_class=None)
    set_by_verl = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert trainer_environment(config) == set_by_verl
    config["seamless"] = {"proxy": {"journal_dir": "/scratch"}}
    assert trainer_environment(config) == set_by_verl | {JOURNALS: "/scratch"}


@pytest.mark.parametrize(
    ("address", "joins", "folder"),
    [(None, "", "here"), ("local", "", "here"), (None, "10.0.0.1:6379", None), ("auto", "10.0.0.1:6379", None)],
)
def test_a_cluster_of_the_runs_own_keeps_its_logs_where_the_supervisor_looks(
    monkeypatch, tmp_path, address, joins, folder
):
    import ray
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter import job

    told = []
    monkeypatch.setattr(ray, "init", lambda **settings: told.append(settings))
    monkeypatch.setattr(job.os, "environ", {"SEAMLESS_RAY_DIR": "here", "TMPDIR": str(tmp_path), "RAY_ADDRESS": joins})
    settings = None if address is None else {"address": address}
    job._start_ray(OmegaConf.create({"ray_kwargs": {"ray_init": settings}}), {"env_vars": {}})
    assert told[0].get("_temp_dir") == folder


def test_workers_of_a_cluster_that_was_there_are_given_what_the_user_set_for_them(monkeypatch):
    import ray
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter import job

    told = []
    monkeypatch.setattr(ray, "init", lambda **settings: told.append(settings))
    given = {"SEAMLESS_RUN_ID": "a-run", "SEAMLESS_TRANSFER_TIMEOUT_S": "300"}
    monkeypatch.setattr(job.os, "environ", {**given, "RAY_ADDRESS": "10.0.0.1:6379", "TOKEN": "secret"})
    job._start_ray(OmegaConf.create({"ray_kwargs": {}}), {"env_vars": {}})
    assert told[0]["runtime_env"]["env_vars"] == {**given, "TRANSFER_QUEUE_ENABLE": "1"}


def test_what_ends_the_run_with_its_clean_up_is_set_again_after_rays_own(monkeypatch):
    import ray
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter import job

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(job.os, "environ", {})
    monkeypatch.setattr(ray, "init", lambda **_: ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(1)))
    try:
        job._start_ray(OmegaConf.create({"ray_kwargs": {}}), {"env_vars": {}})
        assert signal.getsignal(signal.SIGTERM) is job._interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("succeeds", [True, False])
def test_trackers_are_told_how_the_run_ended(succeeds):
    from types import SimpleNamespace

    from seamless_verl.verl_adapter.job import _tracking_finished

    told = []
    trainer = SimpleNamespace()

    def fit():
        with _tracking_finished(trainer):
            trainer.logger = SimpleNamespace(finish=lambda exit_code: told.append(exit_code))
            if not succeeds:
                raise RuntimeError("a worker died")

    if succeeds:
        fit()
    else:
        with pytest.raises(RuntimeError, match="a worker died"):
            fit()
    assert told == [0 if succeeds else 1]


def test_a_run_that_ends_before_it_tracks_anything_has_nobody_to_tell():
    from types import SimpleNamespace

    from seamless_verl.verl_adapter.job import _tracking_finished

    with pytest.raises(KeyboardInterrupt), _tracking_finished(SimpleNamespace()):
        raise KeyboardInterrupt


def test_half_a_surrogate_pair_in_the_error_that_ends_a_run_is_told(tmp_path):
    from seamless_verl.verl_adapter.job import _tell

    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    _tell(tmp_path, terminal, "RunBroken: \ud83d")
    assert terminal.buffer.getvalue().startswith(b"error: RunBroken: \\ud83d\n(full story: ")


def test_what_is_filled_in_reaches_the_rollout_workers_without_keys_of_ours():
    """There only the configuration is read, which verl's entry point composes without our defaults."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from seamless_verl.config import SeamlessConfig
    from seamless_verl.run import compose
    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config

    def client(*overrides):
        with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
            config = hydra_compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])
        adopt_config(config)
        return VersionedLLMClient(config=config, load_balancer_handle=None)

    lent = client()
    assert lent._outlives_replicas
    assert lent._tokens_at_risk(is_journalled=False) == SeamlessConfig().supervise.tokens_at_risk
    assert client("+seamless.supervise.tokens_at_risk=7")._tokens_at_risk(is_journalled=False) == 7
    assert not client("actor_rollout_ref.rollout.nnodes=1")._outlives_replicas
    apart = [f"actor_rollout_ref.rollout.{key}" for key in ("nnodes=1", "disaggregation.enabled=true")]
    assert client(*apart)._tokens_at_risk(is_journalled=True) == 0, "verl's own servers hand nothing over in parts"
    assert client(apart[0])._tokens_at_risk(is_journalled=True) > 0

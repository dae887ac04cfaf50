"""Entry point ``verl.plugins``: loaded at the end of ``import verl`` in every process of a run.

It must stay light (it runs in each Ray worker), so nothing is imported until verl itself imports the module we extend.
verl logs a plug-in that fails to load at DEBUG level only, and the user is left with "Unknown trainer 'seamless'";
hence the loud complaint here.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

AGENT_LOOP_NAME = "seamless_agent"
TRAINER_MODE = "seamless"


def _register_agent_loop(agent_loop: ModuleType) -> None:
    # The registry takes a Hydra target, so the class itself is imported only by the worker that runs it.
    target = "seamless_verl.verl_adapter.rollout.agent_loop.ProxyAgentLoop"
    agent_loop._agent_loop_registry[AGENT_LOOP_NAME] = {"_target_": target}


def _register_trainer(_: ModuleType) -> None:
    import seamless_verl.verl_adapter.trainer.trainer  # noqa: F401  (registers itself under TRAINER_MODE)


def _register_policy_loss(_: ModuleType) -> None:
    import seamless_verl.verl_adapter.trainer.a3po  # noqa: F401  (registers itself)


def _copy_saved_weights(fsdp_utils: ModuleType) -> None:
    from seamless_verl.verl_adapter.weights import saved_weights

    saved_weights.install(fsdp_utils)


def _scope_weight_sockets(rollout: ModuleType) -> None:
    """Keep two runs on one machine apart: verl names its weight sockets after the Ray job id.

    Each embedded run has a Ray cluster of its own, and the first job of every cluster has the same id, so both would
    bind ``/tmp/rl-colocate-zmq-01000000-…``. Remove when verl 0.9.1's handle carries something unique per cluster.
    """
    run_id = os.environ.get("SEAMLESS_RUN_ID")
    if run_id is None:
        return

    def scoped(handle: str) -> str:
        return handle.replace("-replica-", f"-{run_id}-replica-", 1)

    if hasattr(rollout, "ServerAdapter"):
        original_init = rollout.ServerAdapter.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original_init(self, *args, **kwargs)
            self.zmq_handle = scoped(self.zmq_handle)

        rollout.ServerAdapter.__init__ = init
    if hasattr(rollout, "vLLMColocateWorkerExtension"):
        extension = rollout.vLLMColocateWorkerExtension
        original_handle = extension._get_zmq_handle
        extension._get_zmq_handle = lambda self: scoped(original_handle(self))


def _add_checksum(rollout: ModuleType) -> None:
    from seamless_verl.verl_adapter.weights import weight_checks

    weight_checks.install(rollout)


def _bound_sender(transfer: ModuleType) -> None:
    from seamless_verl.verl_adapter.weights.weight_sender import bound_sender

    bound_sender(transfer)


def _fail_together(rollout: ModuleType) -> None:
    from seamless_verl.verl_adapter.weights.weight_sender import fail_together

    fail_together(rollout)


def _copy_megatron_weights_once(megatron_utils: ModuleType) -> None:
    from seamless_verl.verl_adapter.weights import megatron_weights

    megatron_weights.install(megatron_utils)


def _load() -> None:
    import wrapt

    if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
        import seamless_verl.verl_adapter.cpu.cpu_platform  # noqa: F401  (registers the platform)
    wrapt.register_post_import_hook(_register_agent_loop, "verl.experimental.agent_loop.agent_loop")
    wrapt.register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1")
    wrapt.register_post_import_hook(_copy_saved_weights, "verl.utils.fsdp_utils")
    wrapt.register_post_import_hook(_copy_megatron_weights_once, "verl.utils.megatron_utils")
    wrapt.register_post_import_hook(_register_policy_loss, "verl.trainer.ppo.core_algos")
    wrapt.register_post_import_hook(_bound_sender, "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    wrapt.register_post_import_hook(_fail_together, "verl.workers.rollout.vllm_rollout.vllm_rollout")
    wrapt.register_post_import_hook(_add_checksum, "verl.workers.rollout.vllm_rollout.utils")
    for module in ("vllm_rollout", "utils"):
        wrapt.register_post_import_hook(_scope_weight_sockets, f"verl.workers.rollout.vllm_rollout.{module}")


try:
    _load()
except Exception as error:
    sys.stderr.write(
        f"seamless_verl: the verl plug-in could not be loaded, so trainer_mode={TRAINER_MODE} will be unknown to verl: "
        f"{type(error).__name__}: {error}. Run `seamless-verl doctor` to see what is missing.\n"
    )
    raise

"""Entry point ``verl.plugins``: loaded at the end of ``import verl`` in every process of a run.

It must stay light (it runs in each Ray worker), so nothing is imported until verl itself imports the module we extend.
verl logs a plug-in that fails to load at DEBUG level only, and the user is left with "Unknown trainer 'seamless'";
hence the loud complaint here.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from seamless_verl.config import TRAINER_MODE
from seamless_verl.machine import ANY_VERL, fits_verl

AGENT_LOOP_NAME = "seamless_agent"


def _register_agent_loop(agent_loop: ModuleType) -> None:
    # The registry takes a Hydra target, so the class itself is imported only by the worker that runs it.
    target = "seamless_verl.verl_adapter.rollout.agent_loop.ProxyAgentLoop"
    agent_loop._agent_loop_registry[AGENT_LOOP_NAME] = {"_target_": target}


def _register_trainer(_: ModuleType) -> None:
    import seamless_verl.verl_adapter.trainer.trainer  # noqa: F401  (registers itself under TRAINER_MODE)


def _register_policy_loss(core_algos: ModuleType) -> None:
    from seamless_verl.verl_adapter.trainer.a3po import LOSS_MODE, compute_policy_loss_a3po

    core_algos.register_policy_loss(LOSS_MODE)(compute_policy_loss_a3po)


def _load() -> None:
    version = getattr(sys.modules.get("verl"), "__version__", "0.9.1")  # else loaded by itself, before verl
    if not fits_verl(version):  # its own trainers, which may not know us at all, must go on working
        if "RAY_RAYLET_PID" not in os.environ:  # each of Ray's workers comes by here
            told = f"written for verl 0.9.1, this is {version}; nothing of verl is changed ({ANY_VERL}=1 tries it)"
            sys.stderr.write(f"seamless_verl: {told}\n")
        return
    import wrapt

    from seamless_verl.verl_adapter.workarounds import VERL, VERL_ON_CPU, install

    if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
        import seamless_verl.verl_adapter.cpu.cpu_platform  # noqa: F401  (registers the platform)

        install(VERL_ON_CPU)
    install(VERL)
    wrapt.register_post_import_hook(_register_agent_loop, "verl.experimental.agent_loop.agent_loop")
    wrapt.register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1")
    wrapt.register_post_import_hook(_register_policy_loss, "verl.trainer.ppo.core_algos")


try:
    _load()
except Exception as error:
    sys.stderr.write(
        f"seamless_verl: the verl plug-in could not be loaded, so trainer_mode={TRAINER_MODE} will be unknown to verl: "
        f"{type(error).__name__}: {error}. Run `seamless-verl doctor` to see what is missing.\n"
    )
    raise

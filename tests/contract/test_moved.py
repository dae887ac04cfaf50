"""What of verl moved is told from a checkout's source: one line per name, with where it is now and who uses it."""

import importlib.util
from pathlib import Path

import pytest

from tests.contract import moved
from tests.contract.test_verl_contract import NAMES, ONLY_READ

TRAINER = "verl.trainer.base:Trainer"


@pytest.fixture
def checkout(tmp_path):
    files = {
        "verl/__init__.py": "",
        "verl/trainer/__init__.py": "from .base import Trainer as Ours\n",
        "verl/trainer/base.py": (
            "import other\n"
            "from verl.trainer.hooks import Hooks\n"
            "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
            "class Trainer(Hooks):\n    def _balance(self): ...\n    step: int = 0\n"
            "class Foreign(other.Base): ...\n"
        ),
        "verl/trainer/hooks.py": "from abc import ABC\nclass Hooks(ABC):\n    def on_end(self): ...\n",
        "verl/workers/elsewhere.py": "class LLMServer:\n    def generate(self): ...\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return moved.Checkout(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        f"{TRAINER}._balance",
        f"{TRAINER}.step",
        f"{TRAINER}.__init__",
        f"{TRAINER}.on_end",  # of a base class in another module
        "verl.trainer:Ours.on_end",  # another name, through two imports
        "verl.trainer.base:fast",
        "verl.trainer.base:Foreign.anything",  # the base is of another package
    ],
)
def test_what_is_there_is_found(checkout, name):
    assert checkout.missing(name) is None


@pytest.mark.parametrize(
    ("name", "story"),
    [
        (f"{TRAINER}._balance_batch", "verl.trainer.base:Trainer has no _balance_batch (it has _balance)"),
        ("verl.trainer.hooks:on_end", "verl.trainer.hooks has no on_end"),
        (
            "verl.trainer.base:LLMServer.generate",
            "verl.trainer.base has no LLMServer; defined in verl/workers/elsewhere.py",
        ),
        ("verl.workers.llm:LLMServer", "no module verl.workers.llm; defined in verl/workers/elsewhere.py"),
    ],
)
def test_what_moved_is_told_with_where_it_is(checkout, name, story):
    assert checkout.missing(name) == story


def test_the_installed_verl_has_all_names_without_being_imported():
    root = moved.Checkout(Path(importlib.util.find_spec("verl").origin).parents[1])
    names = [name for name in (*NAMES, *ONLY_READ) if name.startswith("verl.")]
    assert {name: story for name in names if (story := root.missing(name))} == {}


def test_who_uses_a_name_is_told():
    assert "seamless_verl/verl_adapter/trainer/trainer.py" in moved.users(
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup"
    )
    assert "seamless_verl/verl_adapter/slices/replica_slices.py" in moved.users(
        "verl.workers.rollout.replica:RolloutReplica.sleep"
    )


def test_no_name_is_listed_twice():
    listed = [*NAMES, *ONLY_READ]
    assert sorted(listed) == sorted(set(listed))


def test_the_command_lists_what_moved(checkout, capsys):
    assert moved.main(str(checkout.root)) == 1
    said = capsys.readouterr().out
    assert "verl.workers.rollout.replica:TokenOutput\n    no module verl.workers.rollout.replica\n    used in " in said
    assert f"0 of {sum(name.startswith('verl.') for name in (*NAMES, *ONLY_READ))} names are there" in said
    assert moved.main(str(checkout.root / "verl")) == 2

"""Who ends one point of Hydra's sweep has ended the sweep, however that point ended."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from seamless_verl import main


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Two points; ``ends`` of those that begin: the exit code, and whether the user interrupted it.

    Each saves a checkpoint in its folder.
    """

    def run(*ends, folders=("one", "two")):
        left = list(ends)
        made = [{"save_freq": 5, "default_local_dir": str(tmp_path / folder)} for folder in folders]
        points = [OmegaConf.create({"trainer": trainer}) for trainer in made]

        def one(command, config):
            code, is_interrupted = left.pop(0)
            command.interrupts += [2] * is_interrupted
            folder = Path(config.trainer.default_local_dir)
            folder.mkdir(exist_ok=True)
            (folder / "latest_checkpointed_iteration.txt").write_text("5")
            return code

        monkeypatch.setattr(main._Command, "_run_point", one)
        monkeypatch.setattr(main.HydraConfig, "get", lambda: OmegaConf.create({"runtime": {"choices": {}}}))
        monkeypatch.setattr(main.hydra, "main", lambda **_: lambda task: lambda: [task(point) for point in points])
        command = main._Command(None, 0.0)
        command.run([])
        return command.codes

    return run


@pytest.mark.parametrize("code", [0, 1, 130])
def test_an_interrupt_ends_the_sweep_also_where_its_point_was_done_or_left_something_behind(sweep, code):
    assert sweep((code, True)) == [code]


def test_a_point_whose_trainer_was_killed_by_others_ends_itself_only(sweep):
    assert sweep((137, False), (0, False)) == [137, 0]


def test_a_point_that_would_go_on_from_another_ones_checkpoint_is_refused(sweep, capsys):
    assert sweep((0, False), folders=("one", "one")) == [0, 2]
    assert "earlier point of the sweep, which this one would continue. Fix: write 'trainer.d" in capsys.readouterr().err

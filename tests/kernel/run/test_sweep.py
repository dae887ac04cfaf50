"""Who ends one point of Hydra's sweep has ended the sweep; the same sweep again runs only points that had not ended."""

from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from seamless_verl import main


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Two points; ``ends`` of those that begin: the exit code, and whether the user interrupted it.

    Each saves a checkpoint in its folder. ``ended``: numbers of the points that ended in an earlier command.
    """

    at = []

    def hydras():
        runtime = {"choices": {}, "output_dir": str(tmp_path / str(at[-1]))}
        return OmegaConf.create({"runtime": runtime, "mode": RunMode.MULTIRUN, "job": {"num": at[-1]}})

    def run(*ends, folders=("one", "two"), ended=()):
        left = list(ends)
        for number in ended:
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / "summary.json").write_text("{}")
        made = [{"save_freq": 5, "default_local_dir": str(tmp_path / folder)} for folder in folders]
        points = [OmegaConf.create({"trainer": trainer}) for trainer in made]

        def one(command, config):
            code, is_interrupted = left.pop(0)
            command.interrupts += [2] * is_interrupted
            folder = Path(config.trainer.default_local_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "latest_checkpointed_iteration.txt").write_text("5")
            return code

        monkeypatch.setattr(main._Command, "_run_point", one)

        def launch(task):
            for number, point in enumerate(points):
                at.append(number)
                task(point)

        monkeypatch.setattr(main.HydraConfig, "get", hydras)
        monkeypatch.setattr(main.hydra, "main", lambda **_: lambda task: lambda: launch(task))
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
    said = capsys.readouterr()
    assert "earlier point of the sweep, which this one would continue. Fix: write 'trainer.d" in said.err
    assert said.out.count("warning: if no swept key changes trainer.default_local_dir=") == 1, "before the first point"


def test_points_with_checkpoints_in_their_own_folders_need_no_warning(sweep, capsys):
    assert sweep((0, False), (0, False), folders=("0/saved", "1/saved")) == [0, 0]
    assert "warning" not in capsys.readouterr().out


def test_the_checkpoints_of_a_point_that_ended_in_an_earlier_command_are_no_other_points(sweep, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "latest_checkpointed_iteration.txt").write_text("5")
    assert sweep(folders=("one", "one"), ended=[0]) == [0, 2]


def test_a_point_that_ended_in_an_earlier_command_is_left_as_it_is(sweep, capsys, tmp_path):
    assert sweep((1, False), ended=[0]) == [0, 1]
    assert f"sweep point 0 has ended before and is left as it is: {tmp_path / '0'} (remove" in capsys.readouterr().out
    assert (tmp_path / "0" / "summary.json").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"saved": True}, "to continue from the last checkpoint: the same command with hydra.sweep.dir="),
        ({"save_freq": -1}, " starts this point over: there is no checkpoint (trainer.save_freq=-1: "),
        ({}, " starts this point over: there is no checkpoint yet"),
        ({"saved": True, "resume_mode": "disable"}, " starts this point over: trainer.resume_mode=disable does not"),
    ],
)
def test_what_the_same_command_would_do_is_told_of_a_point_that_failed(sweep, tmp_path, capsys, changes, told):
    sweep((0, False), (0, False))
    (tmp_path / "1").mkdir()
    folder = tmp_path / ("one" if changes.pop("saved", False) else "none")
    trainer = {"save_freq": 5, "resume_mode": "auto", "default_local_dir": str(folder), **changes}
    main._explain_end(1, tmp_path / "1", OmegaConf.create(trainer), is_interrupted=False)
    assert told in capsys.readouterr().err

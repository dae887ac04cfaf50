"""What a full disk leaves of a checkpoint's tracker, and what the user is told of it."""

import shutil
from types import SimpleNamespace

import pytest

from seamless_verl.run import checkpoints

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(("left", "kept"), [("", "10"), ("9", "9")], ids=["emptied", "whole"])
def test_a_tracker_that_was_emptied_names_the_newest_checkpoint(tmp_path, left, kept):
    (tmp_path / TRACKER).write_text(left)
    for name in ("global_step_9", "global_step_10", "global_step_old"):
        (tmp_path / name).mkdir()
    checkpoints.mend_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == kept
    assert checkpoints.have_one(tmp_path)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    checkpoints.mend_tracker(tmp_path)
    (tmp_path / TRACKER).touch()
    checkpoints.mend_tracker(tmp_path)
    assert not checkpoints.have_one(tmp_path)


@pytest.mark.parametrize(("free", "told"), [(3 << 20, True), (1 << 30, False)])
def test_a_full_disk_is_told_with_what_to_do(tmp_path, monkeypatch, free, told):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    said = checkpoints.told_of_full_disk(tmp_path, "hydra.run.dir=HERE")
    assert ("3.0 MiB free" in said and said.endswith("hydra.run.dir=HERE")) if told else said == ""
    assert "max_actor_ckpt_to_keep=1" not in said, "verl removes the last whole one then before the new one is whole"

"""The files that keep what the trainer made of every token, written from a batch as verl's queue hands it over."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from seamless_verl.observe.token_signals import FOLDER, read
from seamless_verl.verl_adapter.trainer import signal_files
from seamless_verl.verl_adapter.trainer.signal_files import SignalFiles
from tests.contract.trainer.test_refusals import trainer_of

KEYS = ["g_0_0", "g_1_0", "padding"]
LENGTHS = (3, 5, 1)


def _nested(value: float) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((length,), value) for length in LENGTHS[:2]], layout=torch.jagged)


@pytest.fixture
def batch(monkeypatch):
    """``monkeypatch``: the transfer queue, which is asked for the fields of two rows and not of the padding."""
    columns = {"response_mask": _nested(1), "advantages": _nested(0.5)}
    columns |= {"old_log_probs": _nested(-1.0), "rollout_log_probs": _nested(-1.25)}

    def handed_over(keys, partition_id, select_fields):
        assert (keys, partition_id) == (KEYS[:2], "train")
        return {field: columns[field] for field in select_fields if field in columns}

    monkeypatch.setattr(signal_files.tq, "kv_batch_get", handed_over)
    return SimpleNamespace(keys=KEYS, tags=[{}, {}, {"is_padding": True}], partition_id="train")


def _files(tmp_path, told, *, bypass_mode=False, rows="rows"):
    correction = {"bypass_mode": bypass_mode}
    config = {"trainer": {"rollout_data_dir": rows}, "algorithm": {"rollout_correction": correction}}
    return SignalFiles(OmegaConf.create(config), str(tmp_path), told.append)


@pytest.mark.parametrize("bypass_mode", [False, True])
def test_a_row_is_read_back_as_the_trainer_had_it(tmp_path, batch, bypass_mode):
    files = _files(tmp_path, told := [], bypass_mode=bypass_mode)
    files.keep(batch, "7.0")
    files.close()
    row = read(tmp_path / FOLDER, 7, "g_1_0")
    assert row.mask.tolist() == [1] * 5
    assert row.advantage.tolist() == [0.5] * 5
    assert row.weight is None
    if bypass_mode:  # verl copies the rollout's log-probs then
        assert row.log_ratio is None
    else:
        np.testing.assert_allclose(row.log_ratio, 0.25)
    assert read(tmp_path / FOLDER, 7, "padding") is None
    assert told == []


def test_where_they_cannot_be_written_the_run_goes_on_and_is_told_once(tmp_path, batch):
    (tmp_path / FOLDER).write_text("somebody's file")
    files = _files(tmp_path, told := [])
    files.keep(batch, "1.0")
    files.keep(batch, "2.0")
    files.close()
    assert len(told) == 1
    assert told[0].startswith(
        "advantages and ratios of tokens are not kept (trainer.rollout_data_dir=null keeps none):"
    )
    assert FOLDER in told[0]


def test_a_disk_that_stands_still_fills_no_memory_and_holds_up_no_end(tmp_path, batch, monkeypatch):
    begun, moves = threading.Event(), threading.Event()

    def stands_still(*_: object) -> None:
        begun.set()
        moves.wait()

    monkeypatch.setattr(signal_files, "write", stands_still)
    monkeypatch.setattr(signal_files, "_PATIENCE_S", 0.1)
    files = _files(tmp_path, told := [])
    files.keep(batch, "1.0")
    assert begun.wait(60)
    for step in range(2, 9):
        files.keep(batch, f"{step}.0")
    files.close()  # comes back
    assert len(told) == 1
    assert "step 4.0" in told[0]
    moves.set()
    files.close()


def test_nothing_is_asked_for_where_rows_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(signal_files.tq, "kv_batch_get", lambda **_: pytest.fail("nobody wants them"))
    files = _files(tmp_path, [], rows=None)
    files.keep(SimpleNamespace(), "1.0")
    files.close()
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.* engine is not available:UserWarning")  # verl, as it is imported
def test_the_users_terminal_is_told_and_not_only_the_trainers_log(tmp_path):
    """`job` gives the trainer the terminal's reporter after it was made."""
    (tmp_path / FOLDER).write_text("somebody's file")
    trainer = trainer_of("trainer.device=cpu", f"+seamless.run_dir={tmp_path}")
    trainer.reporter = SimpleNamespace(say=(told := []).append)
    trainer.signals._write(tmp_path / FOLDER, "7.0", {})
    (line,) = told
    assert line.startswith("advantages and ratios of tokens are not kept")

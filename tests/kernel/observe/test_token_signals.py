"""What the trainer made of a token comes back as it was written, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from seamless_verl.observe.token_signals import TokenSignals, read, write


def signals(advantage: list[float], **others: list[float]) -> TokenSignals:
    values = {name: np.array(each, np.float32) for name, each in others.items()}
    return TokenSignals(mask=np.ones(len(advantage)), advantage=np.array(advantage, np.float32), **values)


def test_each_row_comes_back_from_the_batch_that_has_it(tmp_path: Path) -> None:
    group = signals([0.5, 0.5, 0.5], log_ratio=[0.0, -0.25, 1.5])
    critic = signals([0.5, -1.0], weight=[2.0, 2.0])
    write(tmp_path / "signals", "7.0", {"g_0_0": group, "with/slash_0_0": critic})
    write(tmp_path / "signals", "7.1", {"g_1_0": signals([-1e9, 0.25])})
    write(tmp_path / "signals", "17.0", {"g_9_0": critic})
    found = read(tmp_path / "signals", 7, "g_0_0")
    assert found is not None
    assert (found.mask.tolist(), found.advantage.tolist()) == ([1, 1, 1], [0.5, 0.5, 0.5])
    assert found.log_ratio is not None
    assert (found.log_ratio.tolist(), found.weight) == ([0.0, -0.25, 1.5], None)
    slash = read(tmp_path / "signals", 7, "with/slash_0_0")
    assert slash is not None
    assert slash.weight is not None
    assert (slash.advantage.tolist(), slash.weight.tolist(), slash.log_ratio) == ([0.5, -1.0], [2.0, 2.0], None)
    extreme = read(tmp_path / "signals", 7, "g_1_0")
    assert extreme is not None
    assert np.isfinite(extreme.advantage).all()
    assert extreme.advantage[0] < -5e4


def test_nothing_is_told_of_what_was_not_kept(tmp_path: Path) -> None:
    write(tmp_path / "signals", "7.0", {"g_0_0": signals([1.0])})
    assert read(tmp_path / "signals", 7, "g_0_1") is None
    assert read(tmp_path / "signals", 8, "g_0_0") is None
    assert read(tmp_path / "nowhere", 7, "g_0_0") is None
    (tmp_path / "signals" / "9.0.safetensors").write_bytes(b"half a file")
    assert read(tmp_path / "signals", 9, "g_0_0") is None


def test_a_token_takes_one_byte_to_seven(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).normal(0.0, 1e-3, 3000).tolist()
    rows = {f"g_{attempt}_0": signals(drawn, log_ratio=drawn, weight=drawn) for attempt in range(8)}
    write(tmp_path / "signals", "1.0", rows)
    assert (tmp_path / "signals" / "1.0.safetensors").stat().st_size <= 8 * (7 * 3000 + 400)
    alike = {key: signals([0.5] * 3000) for key in rows}  # advantages of a group, log-probs of the rollout
    write(tmp_path / "signals", "2.0", alike)
    assert (tmp_path / "signals" / "2.0.safetensors").stat().st_size <= 8 * (3000 + 400)

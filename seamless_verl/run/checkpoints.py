"""The checkpoints of a run: whether there is one to go on from, and whether the disk that they are on is full."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError

_TRACKER = "latest_checkpointed_iteration.txt"  # verl's, beside the checkpoints: the number of the last complete one
_FOLDER = "global_step_"
_FULL = 64 << 20


def have_one(folder: Path) -> bool:
    """Whether a run can go on from a checkpoint in ``folder``."""
    return (folder / _TRACKER).exists()


def check_own(trainer: Any, used: set[Path], run_dir: Path) -> str:
    """Whether a sweep's next point has its checkpoints for itself.

    Args:
        trainer: the section.
        used: folders of the points before; this one's is added.
        run_dir: of the point.

    Returns:
        At the first point a warning if the later ones may not; else empty.

    Raises:
        ConfigError: it is the folder of an earlier point that wrote one there.
    """
    key, fix = "trainer.default_local_dir", "write 'trainer.default_local_dir=${seamless.run_dir}/checkpoints'"
    folder = Path(trainer.default_local_dir).absolute()
    if folder in used and have_one(folder) and trainer.save_freq > 0:
        problem = "holds the checkpoints of an earlier point of the sweep, which this one would continue"
        raise ConfigError(key, trainer.default_local_dir, problem, fix)
    is_at_risk = not used and trainer.save_freq > 0 and not folder.is_relative_to(run_dir.absolute())
    used.add(folder)
    given = f"{key}={trainer.default_local_dir}"
    return f"if no swept key changes {given}, the points after this one are refused; {fix}" if is_at_risk else ""


def mend_tracker(folder: Path) -> None:
    """Writes the last checkpoint's number where a full disk left none.

    verl 0.9.1 empties the file before it writes, after all parts of a checkpoint: where the number found no room, the
    newest checkpoint is complete, and a start from it would end with ``int('')``. Remove when verl replaces the file.
    """
    tracker = folder / _TRACKER
    if not tracker.exists() or tracker.read_text(encoding="ascii").strip():
        return
    names = (path.name.removeprefix(_FOLDER) for path in folder.glob(f"{_FOLDER}*"))
    if steps := [int(name) for name in names if name.isdigit()]:
        tracker.write_text(str(max(steps)), encoding="ascii")
    else:
        tracker.unlink()


def told_of_full_disk(run_dir: Path, again: str) -> str:
    """What to do where the disk of a run that failed is full; else empty.

    Args:
        again: what the same command needs to go on.
    """
    free = shutil.disk_usage(run_dir).free
    if free >= _FULL:
        return ""
    return (
        f"the disk is full: {free / (1 << 20):.1f} MiB free at {run_dir}. Fix: make room (only the checkpoint that "
        f"{_TRACKER} names is needed), write fewer (trainer.save_freq) or keep two "
        f"(trainer.max_actor_ckpt_to_keep=2; 1 may leave none that is whole), then the same command with {again}"
    )

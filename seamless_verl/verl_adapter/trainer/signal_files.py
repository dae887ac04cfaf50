"""Keeps what the trainer made of every token (`observe.token_signals`), beside verl's dump of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from seamless_verl.observe.token_signals import FOLDER, TokenSignals, write

_FIELDS = ("response_mask", "advantages", "rollout_is_weights")
_LOG_PROBS = ("old_log_probs", "rollout_log_probs")
_MOST_WAITING = 2  # batches, beside the one that is written
_PATIENCE_S = 30.0


class SignalFiles:
    """Written by a thread of its own; a run whose disk is full, or stands still, goes on without them.

    Args:
        run_dir: the run's folder. None, or ``trainer.rollout_data_dir`` null: nothing is kept.
        say: tells the user why files are missing, once.
    """

    def __init__(self, config: DictConfig, run_dir: str | None, say: Callable[[str], None]) -> None:
        wanted = run_dir is not None and config.trainer.get("rollout_data_dir") is not None
        self._folder = Path(run_dir) / FOLDER if wanted and run_dir is not None else None
        correction = config.algorithm.get("rollout_correction")
        copied = correction is not None and correction.bypass_mode  # then the old ones are the rollout's
        self._fields = [*_FIELDS, *(() if copied else _LOG_PROBS)]
        self._say = say
        self._waiting: SimpleQueue[tuple[Path, str, dict[str, TokenSignals]] | None] = SimpleQueue()
        self._writer = Thread(target=self._write_all, name="signals", daemon=True)  # nothing waits for it at the end
        self._writer.start()

    def keep(self, batch: KVBatchMeta, name: str) -> None:
        """Of a batch that has its advantages; ``name``: ``STEP.PART``."""
        if self._folder is None:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            self._tell(f"the disk does not keep up, step {name} is left out")
            return
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=self._fields)
        columns = {field: _arrays(data.get(field, None)) for field in self._fields}
        rows = {
            key: _row({field: values[index] for field, values in columns.items() if values is not None})
            for index, key in enumerate(keys)
        }
        self._waiting.put((self._folder, name, rows))

    def _write_all(self) -> None:
        while (batch := self._waiting.get()) is not None:
            self._write(*batch)

    def _write(self, folder: Path, name: str, rows: dict[str, TokenSignals]) -> None:
        try:
            write(folder, name, rows)
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread: whatever it is, it is told
            self._tell(error)

    def _tell(self, why: object) -> None:
        say, self._say = self._say, lambda words: None
        say(f"advantages and ratios of tokens are not kept (trainer.rollout_data_dir=null keeps none): {why}")

    def close(self) -> None:
        """Returns when all is written, or `_PATIENCE_S` have passed."""
        self._waiting.put(None)
        self._writer.join(_PATIENCE_S)


def _arrays(nested: Any) -> list[Any] | None:
    return None if nested is None else [row.float().numpy() for row in nested.unbind()]


def _row(of: Mapping[str, Any]) -> TokenSignals:
    ours, theirs = of.get("old_log_probs"), of.get("rollout_log_probs")
    return TokenSignals(
        mask=of["response_mask"],
        advantage=of["advantages"],
        log_ratio=None if ours is None or theirs is None else ours - theirs,
        weight=of.get("rollout_is_weights"),
    )

"""Kill -9 at random instants, resume, and compare what was trained with a run that nobody disturbed.

    python -m benchmarks.resume [--quick] [--json FILE]

The streaming dataloader and the curriculum are the ones that run under verl, with verl's replay buffer below them.
Scripted are TransferQueue (a dict, saved with every checkpoint as verl saves it) and the completions: which group ends
next depends only on prompt, epoch and what is in flight. "Weights" are the list of everything trained so far.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pickle
import random
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import Record, arguments, report
from seamless_verl.curriculum_config import CurriculumConfig, StageConfig
from tests.fakes import ScriptedTransferQueue

ETA, BATCH, MINI_BATCH, ROLLOUTS, STEPS = 2, 8, 4, 4, 60
DATASET = [{"index": number, "data_source": "math" if number < 40 else "code"} for number in range(64)]
CURRICULUM = CurriculumConfig(
    history_resampling=True,
    accuracy_key="acc",
    pool_floor=24,
    readmit_after_epochs=3,
    stages=(
        StageConfig(name="math", sources=("math",), until_epoch=2),
        StageConfig(name="math+code", sources=("math", "code")),
    ),
)
_TRACKER = "latest_checkpointed_iteration.txt"


class Run:
    """A trainer over scripted completions; everything it must remember is in its folder."""

    def __init__(self, folder: Path, queue: ScriptedTransferQueue) -> None:
        from seamless_verl.verl_adapter.dataloader.curriculum_dataloader import CurriculumLoader
        from seamless_verl.verl_adapter.dataloader.streaming_buffer import StreamingReplayBuffer

        self.folder, self.queue = folder, queue
        self.step = 0
        self.trained: list[list[int]] = []  # prompt and epoch of every group, in order
        self.failed: list[list[int]] = []  # the script's memory
        self.names: dict[str, list[int]] = {}  # of the groups in flight
        self.loader = CurriculumLoader(
            DATASET,
            CURRICULUM,
            train_batch_size=BATCH,
            shuffle=True,
            seed=7,
            on_epoch=lambda report: None,
            say=lambda line: None,
        )
        self.prompts = iter(self.loader)
        self.buffer: Any = StreamingReplayBuffer(
            eta=ETA, batch_size=BATCH, refill_fn=self.submit, trainer_config={}, sampler_kwargs={}
        )
        self.buffer.follow(self.loader)
        self.buffer._wait_for_next_poll = self.complete_one
        tracker = folder / _TRACKER
        if tracker.exists():
            self.restore(folder / f"global_step_{tracker.read_text()}")

    def submit(self, count: int) -> int:
        rows = [next(self.prompts) for _ in range(count)]
        uids = [os.urandom(8).hex() for _ in rows]
        self.buffer.reserve(uids, self.step)
        self._remember_names()
        tag = {"is_prompt": True, "status": "pending", "global_steps": self.step}
        self.queue.kv_batch_put(uids, "train", [tag for _ in uids])
        return count

    def _remember_names(self) -> None:
        self.names |= {uid: [draw.prompt, draw.epoch] for uid, draw in self.loader._draws.items()}

    def complete_one(self, partition: str, last_debug_time: float) -> float:
        """The next group of the script ends: finished, or failed when its prompt is tried first in an epoch."""
        draws, prompts = self.loader._draws, self.queue.tags["train"]
        running = [uid for uid, tag in prompts.items() if tag.get("status") == "pending"]
        uid = min(running, key=lambda uid: _script("order", draws[uid]))
        draw, tag = draws[uid], prompts[uid]
        first_try = [draw.prompt, draw.epoch] not in self.failed
        if _script("fails", draw) % 10 == 0 and first_try:
            self.failed.append([draw.prompt, draw.epoch])
            self.queue.kv_batch_put([uid], "train", [{"status": "failure"}])
            return last_debug_time
        keys = [f"{uid}_{member}_0" for member in range(ROLLOUTS)]
        skill = min(ROLLOUTS, _script("skill", draw) % 7 + draw.epoch // 3)
        fields = [{"extra_fields": {"reward_extra_info": {"acc": float(m < skill)}}} for m in range(ROLLOUTS)]
        tags = [{"status": "success", "seq_len": 1, "min_global_steps": tag["global_steps"] - 1} for _ in keys]
        self.queue.kv_batch_put(keys, "train", tags, fields)
        self.queue.kv_batch_put([uid], "train", [{"status": "finished"}])
        return last_debug_time

    def train(self) -> None:
        while self.step < STEPS:
            self.step += 1
            self.buffer.admit(self.step)
            rows: list[str] = []
            for _ in range(BATCH // MINI_BATCH):
                batch, metrics = self.buffer.sample(global_steps=self.step, partition_id="train", batch_size=MINI_BATCH)
                self.trained += [self.names.pop(uid) for uid in dict.fromkeys(k.split("_")[0] for k in batch.keys)]
                rows += batch.keys
                assert metrics["training/staleness/max"] <= ETA
            self.loader.step_ended(self.step)
            self.save()
            self.queue.kv_clear(rows, "train")

    def save(self) -> None:
        """In verl's order: parts first, the tracker last; trained rows are still in TransferQueue."""
        folder = self.folder / f"global_step_{self.step}"
        folder.mkdir(exist_ok=True)
        (folder / "streaming.json").write_text(json.dumps(self.buffer.state()))
        (folder / "weights.json").write_text(json.dumps(self.trained))
        (folder / "transfer_queue.pkl").write_bytes(pickle.dumps((self.queue.tags, self.queue.fields, self.failed)))
        temporary = self.folder / f"{_TRACKER}.part"
        temporary.write_text(str(self.step))
        temporary.replace(self.folder / _TRACKER)

    def restore(self, folder: Path) -> None:
        self.step = int(folder.name.rpartition("_")[2])
        self.trained = json.loads((folder / "weights.json").read_text())
        self.queue.tags, self.queue.fields, self.failed = pickle.loads((folder / "transfer_queue.pkl").read_bytes())
        self.buffer.restore(json.loads((folder / "streaming.json").read_text()))
        self._remember_names()


def _script(what: str, draw: Any) -> int:
    digest = hashlib.blake2b(f"{what}/{draw.prompt}/{draw.epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def start(folder: Path) -> int:
    """A run in a process of its own, forked so that it need not import verl again; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with pytest.MonkeyPatch.context() as patch:
            Run(folder, ScriptedTransferQueue().install(patch)).train()
        status = 0
    except BaseException:  # noqa: BLE001 - the child ends here, and says why
        traceback.print_exc()
    finally:
        os._exit(status)


def kill_once(folder: Path, after_s: float) -> bool:
    """Whether the signal came before the run had ended."""
    child = start(folder)
    time.sleep(after_s)  # the instant is what is random here
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def finish(folder: Path) -> list[list[int]]:
    _, status = os.waitpid(start(folder), 0)
    if status:
        raise RuntimeError(f"the run in {folder} ended with status {status}")
    trained: list[list[int]] = json.loads((folder / f"global_step_{STEPS}" / "weights.json").read_text())
    return trained


def main() -> int:
    options = arguments("Kill -9 at random instants and resume: exactly once, in the same order.")
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")  # two hundred buffers would each introduce themselves
    importlib.import_module("verl.trainer.ppo.v1")  # the plug-in then brings in our trainer, once for all children
    rounds, rng = 5 if options.quick else 50, random.Random(1)
    with tempfile.TemporaryDirectory(prefix="resume-") as temporary:
        root = Path(temporary)
        (root / "reference").mkdir()
        begin = time.monotonic()
        expected = finish_reference(root / "reference")
        length = time.monotonic() - begin
        twice = other_order = missed = 0
        resumed_at = []
        for number in range(rounds):
            folder = root / str(number)
            folder.mkdir()
            while not kill_once(folder, rng.uniform(0.02, 0.95) * length):
                missed += 1  # it ended before the signal came
                shutil.rmtree(folder)
                folder.mkdir()
            tracker = folder / _TRACKER
            resumed_at.append(int(tracker.read_text()) if tracker.exists() else 0)
            trained = finish(folder)
            twice += max(Counter(map(tuple, trained)).values()) > 1
            other_order += trained != expected
    epochs = max(epoch for _, epoch in expected)
    return report(
        [
            Record(name="rounds, each killed at a random instant", value=rounds, unit="rounds"),
            Record(name="attempts that ended before the signal, not counted", value=missed, unit="attempts"),
            Record(name="different steps resumed from", value=len(set(resumed_at)), unit="steps"),
            Record(name="step resumed from: median", value=statistics.median(resumed_at), unit=f"of {STEPS}"),
            Record(name="groups trained per run", value=len(expected), unit="groups"),
            Record(name="epochs reached, with resampling and two stages", value=epochs, unit="epochs"),
            Record(name="rounds with a group trained twice", value=twice, unit="rounds", bar="0", holds=twice == 0),
            Record(
                name="rounds whose order differs from the undisturbed run",
                value=other_order,
                unit="rounds",
                bar="0",
                holds=other_order == 0,
            ),
        ],
        options.json,
    )


def finish_reference(folder: Path) -> list[list[int]]:
    trained = finish(folder)
    per_epoch = Counter(map(tuple, trained))
    assert max(per_epoch.values()) == 1, "a prompt was trained twice in an epoch without any crash"
    return trained


if __name__ == "__main__":
    raise SystemExit(main())

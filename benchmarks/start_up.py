"""Seconds from the command to the first training step, warm caches: verl's own sequence against ours, interleaved.

Both run the arithmetic recipe on the CPU with one trainer worker and one rollout replica, without validation. verl's
side is `verl.trainer.main_ppo` in mode separate_async with the same configuration, as a user of 0.9.1 would start it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.records import Record, arguments, report
from seamless_verl.run.environment import CPU_ENVIRONMENT
from seamless_verl.run.supervisor import RUN_ID, sweep

_OURS = [
    "+recipe=arithmetic",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=1",
]
_LIMIT_S = 400.0


def ours(folder: Path) -> dict[str, float]:
    """One run; the parts of its start, and the whole under ``total``."""
    command = [sys.executable, "-m", "seamless_verl.main", *_OURS, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary["start_up_s"], "total": summary["time_to_first_step_s"]}


def verls(config: Path, folder: Path) -> float:
    """One start of verl's own entry point; seconds until its progress bar appears, which is when training begins."""
    run_id = f"bench-{os.getpid()}"
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"--config-path={config}",
        "--config-name=config",
        f"hydra.run.dir={folder}",
        "seamless.run_dir=null",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"{engine}.backend=cpu_zmq",
        f"{engine}.custom_backend_module=seamless_verl.verl_adapter.cpu.cpu_weights",
        "trainer.rollout_data_dir=null",
    ]
    # verl 0.9.1 fails at its default log level when hybrid replicas are off (trainer_separate_async.py:181).
    environment = {**os.environ, **CPU_ENVIRONMENT, "VERL_LOGGING_LEVEL": "WARN", RUN_ID: run_id}
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                if b"Training Progress" in line:
                    return time.monotonic() - started
        raise RuntimeError("verl ended before training began")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        sweep(run_id)


def main() -> int:
    parsed = arguments(__doc__ or "")
    repeats = 1 if parsed.quick else 3
    totals: list[float] = []
    theirs: list[float] = []
    parts: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        ours(root / "warm")
        for repeat in range(repeats):
            theirs.append(verls(root / "warm", root / f"verl-{repeat}"))
            parts.append(ours(root / f"ours-{repeat}"))
            totals.append(parts[-1]["total"])
            print(f"repeat {repeat + 1}/{repeats}: verl {theirs[-1]:.1f} s, ours {totals[-1]:.1f} s", flush=True)
    ratio = statistics.median(theirs) / statistics.median(totals)
    records = [
        Record(name="start-up, verl's own sequence (median)", value=statistics.median(theirs), unit="s"),
        Record(name="start-up, ours (median)", value=statistics.median(totals), unit="s"),
        *(
            Record(name=f"  of which {name}", value=statistics.median(part[name] for part in parts), unit="s")
            for name in parts[0]
            if name != "total"
        ),
        Record(name="start-up, verl / ours", value=ratio, unit="x", bar="halved: >= 2", holds=ratio >= 2),
    ]
    return report(records, parsed.json)


if __name__ == "__main__":
    sys.exit(main())

"""The one replica is killed, server or engine, while it generates and while the trainer trains: the run goes on."""

from __future__ import annotations

import json
import uuid
from typing import Any

import psutil

from benchmarks.gpu_checks.live import last_words
from benchmarks.gpu_checks.registry import Context
from benchmarks.gpu_checks.stage import has_variable
from benchmarks.gpu_checks.whole_runs import lines_of, offloading, settings, skewed_lengths, watched
from benchmarks.records import Record

_PLAN = [
    {"step": 2, "while": "training", "what": "server"},
    {"step": 4, "while": "generating", "what": "server"},
    {"step": 6, "while": "training", "what": "engine"},
    {"step": 8, "while": "generating", "what": "engine"},
]
_STEPS = 10


def run(context: Context) -> list[Record]:
    mark = uuid.uuid4().hex
    overrides = [
        *settings(context),
        *offloading(False),  # what the trainer keeps is there when the engine starts again
        *skewed_lengths(context),
        "seamless.staleness.eta=0",  # so that every step begins with nobody but the replica at work
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.total_training_steps={_STEPS}",
    ]
    probe = context.folder / "kills.jsonl"
    done = watched(context, overrides, probe, watches="", BENCHMARK_KILLS=json.dumps(_PLAN), BENCHMARK_MARK=mark)
    kills = [line for line in lines_of(probe) if line["kind"] == "kill"]
    summary = done.summary() if done.code == 0 else {}
    back = done.said.count("is back")
    orphaned = max([line["seconds"] for line in lines_of(probe) if line["kind"] == "engine_gone"], default=0.0)
    left = sum(has_variable(process.pid, f"BENCHMARK_MARK={mark}") for process in psutil.process_iter())
    return [
        Record(name="kills", value=len(kills), unit="", bar=f"= {len(_PLAN)}", holds=len(kills) == len(_PLAN)),
        Record(
            name="times that the replica came back",
            value=back,
            unit="",
            bar=f"= {len(kills)}",
            holds=back == len(kills),
        ),
        _ended(done.code, summary, done.said),
        _audited(summary),
        Record(
            name="an engine outlived its server, longest", value=orphaned, unit="s", bar="< 10", holds=orphaned < 10
        ),
        Record(name="processes left behind", value=left, unit="", bar="= 0", holds=left == 0),
    ]


def _ended(code: int, summary: dict[str, Any], said: str) -> Record:
    steps = summary.get("steps", 0)
    bar = f"= {_STEPS}" if code == 0 else f"= {_STEPS}; exit code {code}: {last_words(said, 1)}"
    return Record(name="steps of the run", value=steps, unit="", bar=bar, holds=steps == _STEPS)


def _audited(summary: dict[str, Any]) -> Record:
    share = summary["rows_audited"] / summary["rows"] if summary.get("rows") else 0.0
    return Record(name="rows audited", value=share, unit="share", bar="= 1", holds=share == 1)

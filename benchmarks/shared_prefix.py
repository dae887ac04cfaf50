"""One update of verl's training worker with what rows share computed once, beside verl's own engine: seconds, ratios.

Both engines live in this process with the same weights and take turns on the same rows. Beside the measured ratio is
the ideal one, of multiply-adds. verl pads rows on the CPU, which ours does not, and its head sees prompts; so the same
rows with a first token of their own, which share nothing, tell what sharing itself brings.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.records import Record, arguments, report
from seamless_verl.token_trie import Shape, Work, work

_VOCABULARY = 4096
_MODEL = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 3, "vocab_size": _VOCABULARY}
_MODEL |= {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64}
_BAR, _MOST_SLOWER = 0.85, {"on": 0.02, "auto": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``rows``: prompt and response of each."""

    name: str
    rows: list[tuple[np.ndarray, np.ndarray]]
    shares: bool = True


def cases(unit: int) -> list[Case]:
    """``unit``: tokens of one part."""
    rng = np.random.default_rng(5)

    def ids(parts: float) -> np.ndarray:
        return rng.integers(1, _VOCABULARY, int(parts * unit))

    def group(samples: int, prompt: float, response: float) -> list[tuple[np.ndarray, np.ndarray]]:
        asked = ids(prompt)
        return [(asked, ids(response)) for _ in range(samples)]

    def session() -> list[tuple[np.ndarray, np.ndarray]]:
        """Three branches part after a first turn; a compaction keeps the task only."""
        task, turn = ids(2), ids(2)
        branches = [(task, np.concatenate([turn, ids(2)])) for _ in range(3)]
        return [*branches, (task, ids(3))]

    return [
        Case(name="8 samples, prompt 4 : response 1", rows=group(8, 4, 1)),
        Case(name="8 samples, prompt 1 : response 1", rows=group(8, 2, 2)),
        Case(name="8 samples, prompt 1 : response 4", rows=group(8, 1, 4)),
        Case(name="16 samples, prompt 8 : response 1", rows=group(16, 4, 0.5)),
        Case(name="two sessions, three branches and a compaction", rows=[*session(), *session()]),
        Case(name="rows that share nothing", rows=[(ids(2), ids(2)) for _ in range(8)], shares=False),
        Case(name="the same, hardly a prompt", rows=[(ids(0.05), ids(3.95)) for _ in range(8)], shares=False),
    ]


def apart(case: Case) -> Case:
    """The same rows, each with a first token of its own."""
    rows = [
        (np.concatenate([[number + 1], prompt[1:]]), response) for number, (prompt, response) in enumerate(case.rows)
    ]
    return Case(name=case.name, rows=rows, shares=False)


def work_of(case: Case, shape: Shape) -> Work:
    """In one micro-batch, as both engines have it here."""
    rows = [np.concatenate(row) for row in case.rows]
    return work(rows, [len(prompt) for prompt, _ in case.rows], [list(range(len(rows)))], shape, padded=True)


def main() -> int:
    options = arguments(__doc__ or "", lambda parser: parser.add_argument("--unit", type=int, default=96))
    _alone()
    import torch

    torch.set_num_threads(1)
    import verl  # noqa: F401  (its plug-ins: the CPU platform, our engines)
    from transformers import Qwen3Config

    from benchmarks.training_workers import model_folder, worker_of
    from seamless_verl.verl_adapter.shared_prefix import guard

    guard.EVERY = 10**9  # rows are computed both ways once, before anything is timed
    shape, records = Shape.of(Qwen3Config(**_MODEL)), []
    with tempfile.TemporaryDirectory() as folder:
        model_folder(folder, **_MODEL)
        workers = {ours: worker_of(folder, ours=ours, budget=10**6) for ours in (False, True)}
        for case in cases(options.unit):
            tried = {"verl": case, "on": case}
            tried |= {"apart": apart(case)} if case.shares else {"auto": case, "verl, again": case}
            seconds: dict[str, list[float]] = {name: [] for name in tried}
            for turn in range(2 if options.quick else 8):
                for name, rows in tried.items():
                    taken = update(workers[not name.startswith("verl")], rows, "auto" if name == "auto" else "on")
                    if turn:  # the first warms up
                        seconds[name].append(taken)
            median = {name: statistics.median(times) for name, times in seconds.items()}
            records += judged(case, median, shape)
            records += [
                Record(name=f"  peak memory, {name}", value=peak_gb(workers[ours], case), unit="GB")
                for ours, name in ((False, "verl's engine"), (True, "ours"))
            ]
    return report(records, options.json)


def _alone() -> None:
    """A process group of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "WG_BACKEND": "ray"}
    os.environ |= {"MASTER_PORT": str(port), "DIST_INIT_METHOD": f"tcp://127.0.0.1:{port}", "VERL_PLATFORM": "cpu"}


def update(worker: Any, case: Case, mode: str) -> float:
    """CPU seconds of one forward and backward pass of a whole batch through verl's engine."""
    from verl.utils import tensordict_utils as tu

    from benchmarks.training_workers import data_of
    from seamless_verl.verl_adapter.shared_prefix import MODE

    os.environ[MODE] = mode
    data = data_of(case.rows)
    tu.assign_non_tensor(data, use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=10**6)
    with worker.engine.train_mode(zero_grad_on_exit=True):
        worker.engine.optimizer_zero_grad()
        began = time.process_time()
        worker.engine.forward_backward_batch(data, worker.loss_fn)
        return time.process_time() - began


def peak_gb(worker: Any, case: Case) -> float:
    """The most that tensors of one pass held at a time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        update(worker, case, "on")
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return float(np.cumsum(sizes).max()) / 1e9


def judged(case: Case, median: dict[str, float], shape: Shape) -> list[Record]:
    of = work_of(case, shape)
    ratio, ideal = median["verl"] / median["on"], of.rows / of.trie
    records = [
        Record(name=f"{case.name}: verl's engine", value=median["verl"], unit="s"),
        Record(name="  ours", value=median["on"], unit="s"),
        Record(name="  verl's time over ours", value=ratio, unit="x"),
        _share("  of the ideal ratio", ratio, ideal),
    ]
    if case.shares:
        sharing = median["apart"] / median["on"]
        name = "  nothing shared, over shared"
        return [
            *records,
            Record(name=name, value=sharing, unit="x"),
            _share("  of its ideal ratio", sharing, work_of(apart(case), shape).trie / of.trie),
        ]
    spread = abs(median["verl, again"] / median["verl"] - 1)
    records.append(Record(name="  verl's engine beside itself", value=spread, unit=""))
    for mode, most in _MOST_SLOWER.items():
        slower, bar = median[mode] / median["verl"] - 1, f"<= {most:g}, or as verl's beside itself"
        holds = slower <= max(most, spread)
        records.append(Record(name=f"  {mode}: slower than verl's", value=slower, unit="", bar=bar, holds=holds))
    return records


def _share(name: str, ratio: float, ideal: float) -> Record:
    share = ratio / ideal
    return Record(name=f"{name}, {ideal:.2f}", value=share, unit="", bar=f">= {_BAR}", holds=share >= _BAR)


if __name__ == "__main__":
    sys.exit(main())

"""One update of verl's training worker with what rows share computed once, beside verl's own engine: seconds, ratios.

Both engines live in this process with the same weights and take turns on the same rows. Beside the measured ratio is
the ideal one, of multiply-adds. verl pads rows on the CPU, which ours does not; so the same rows with a first token of
their own, which share nothing, tell what sharing itself brings.
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
from seamless_verl.token_trie import Trie

_HIDDEN, _LAYERS, _WIDE, _HEADS, _VOCABULARY = 384, 3, 1152, 6, 4096
_BAR = 0.85


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
        """Three branches: two part after a first turn, one is a compaction that keeps the task only."""
        task, turn = ids(2), ids(2)
        return [(task, np.concatenate([turn, ids(2)])), (task, np.concatenate([turn, ids(2)])), (task, ids(3))]

    return [
        Case(name="8 samples, prompt 4 : response 1", rows=group(8, 4, 1)),
        Case(name="8 samples, prompt 1 : response 1", rows=group(8, 2, 2)),
        Case(name="8 samples, prompt 1 : response 4", rows=group(8, 1, 4)),
        Case(name="16 samples, prompt 8 : response 1", rows=group(16, 4, 0.5)),
        Case(name="two sessions of three branches", rows=[*session(), *session()]),
        Case(name="rows that share nothing", rows=[(ids(2), ids(2)) for _ in range(8)], shares=False),
    ]


def apart(case: Case) -> Case:
    """The same rows, each with a first token of its own."""
    rows = [
        (np.concatenate([[number + 1], prompt[1:]]), response) for number, (prompt, response) in enumerate(case.rows)
    ]
    return Case(name=case.name, rows=rows, shares=False)


def work(case: Case, *, padded: bool) -> float:
    """Multiply-adds of a forward pass, up to a constant: verl's padded rows, or the trie."""
    rows = [np.concatenate(row) for row in case.rows]
    if padded:
        longest = max(map(len, rows))
        tokens, predictions, pairs = (len(rows) * each for each in (longest, longest, longest * (longest + 1) / 2))
    else:
        trie = Trie(rows)
        asked = trie.predictions([np.arange(len(p) - 1, len(p) + len(r) - 1) for p, r in case.rows])
        tokens, predictions = len(trie), len(asked.label)
        pairs = sum((b - a) * (b - a + 1) / 2 + (end - b) * (b - a) for a, b, end in trie.stretches)
    each = 4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _WIDE
    return _LAYERS * (tokens * each + 2 * pairs * _HIDDEN) + predictions * _HIDDEN * _VOCABULARY


def main() -> int:
    options = arguments(__doc__ or "", lambda parser: parser.add_argument("--unit", type=int, default=96))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "WG_BACKEND": "ray"}
    os.environ |= {"MASTER_PORT": str(port), "DIST_INIT_METHOD": f"tcp://127.0.0.1:{port}", "VERL_PLATFORM": "cpu"}
    import torch

    torch.set_num_threads(1)
    import verl  # noqa: F401  (its plug-ins: the CPU platform, our engines)

    from benchmarks.training_workers import data_of, model_folder, worker_of

    records = []
    shape = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "vocab_size": _VOCABULARY,
    }
    with tempfile.TemporaryDirectory() as folder:
        model_folder(folder, **shape)
        workers = {name: worker_of(folder, ours=name == "ours", budget=10**6) for name in ("verl", "ours")}
        for case in cases(options.unit):
            tried: dict[str, tuple[Any, Case]] = {"verl": (workers["verl"], case), "ours": (workers["ours"], case)}
            if case.shares:
                tried["ours, nothing shared"] = (workers["ours"], apart(case))
            seconds: dict[str, list[float]] = {name: [] for name in tried}
            for turn in range(2 if options.quick else 6):
                for name, (worker, rows) in tried.items():
                    taken = update(worker, data_of(rows.rows))
                    if turn:  # the first warms up
                        seconds[name].append(taken)
            records += judged(case, {name: statistics.median(times) for name, times in seconds.items()})
    return report(records, options.json)


def update(worker: Any, data: Any) -> float:
    """CPU seconds of one forward and backward pass of a whole batch through verl's engine."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=10**6)
    with worker.engine.train_mode(zero_grad_on_exit=True):
        worker.engine.optimizer_zero_grad()
        began = time.process_time()
        worker.engine.forward_backward_batch(data, worker.loss_fn)
        return time.process_time() - began


def judged(case: Case, median: dict[str, float]) -> list[Record]:
    ratio = median["verl"] / median["ours"]
    ideal = work(case, padded=True) / work(case, padded=False)
    records = [
        Record(name=f"{case.name}: verl's engine", value=median["verl"], unit="s"),
        Record(name="  ours", value=median["ours"], unit="s"),
        Record(name="  verl's time over ours", value=ratio, unit="x"),
        Record(name="  the same by multiply-adds", value=ideal, unit="x"),
    ]
    if not case.shares:
        return [
            *records,
            Record(name="  slower than verl's", value=1 / ratio - 1, unit="", bar="<= 0.02", holds=ratio >= 0.98),
        ]
    sharing = median["ours, nothing shared"] / median["ours"]
    best = work(apart(case), padded=False) / work(case, padded=False)
    name = f"  of the ideal ratio of sharing, {best:.2f}"
    records += [
        Record(name="  nothing shared, over shared", value=sharing, unit="x"),
        Record(name=name, value=sharing / best, unit="", bar=f">= {_BAR}", holds=sharing >= _BAR * best),
    ]
    return records


if __name__ == "__main__":
    sys.exit(main())

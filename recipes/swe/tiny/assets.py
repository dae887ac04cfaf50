"""Model, tokenizer and data of the tiny recipe, built once on this machine and kept in a cache.

The folder's name holds a digest of everything that decides its contents, the generator's source included, so a change
of either gives a new folder and never a stale one. A build happens in a temporary folder, under a lock, and appears by
a rename: whoever finds the folder finds it whole.

``python -m seamless_verl.recipes.swe.tiny.assets [--cache DIR]`` builds with the defaults and says where things are.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from seamless_verl.errors import SeamlessError
from seamless_verl.recipes.swe.tiny import edit
from seamless_verl.recipes.swe.tiny.imitation import CLEAN_IMITATION
from seamless_verl.recipes.swe.tiny.tasks import Task, generate

Progress = Callable[[str], None]

AGENT_NAME = "seamless_agent"
_MODULE = "seamless_verl.recipes.swe.tiny.assets"
_SOURCES = (
    "assets.py", "chat_template.jinja", "demonstrations.py", "edit.py", "execution.py", "model.py", "mutations.py",
    "tasks.py", "templates.py", "tokenizer.py", "warm_start.py",
)  # fmt: skip
_MAX_THREADS = 4
# glibc gives big buffers back to the kernel after every step otherwise, and threads that spin while they wait for each
# other stall on a machine that is busy with something else: both cost more than the arithmetic.
_QUICK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "GOMP_SPINCOUNT": "2000"}


class BuildFailed(SeamlessError):
    """The build's process ended with an error; the message holds the last of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is built.

    Attributes:
        seed: seed of everything random.
        train_size, held_out_size, held_out_templates_size: number of tasks per split.
        warm_start_share: share of the warm start's tokens to train on; below 1 for a model that need not know much.
    """

    seed: int = 0
    train_size: int = 2048
    held_out_size: int = 200
    held_out_templates_size: int = 60
    warm_start_share: float = 1.0

    def digest(self) -> str:
        """12 hexadecimal digits over the parameters and the source of the generator."""
        folder = Path(__file__).parent
        hashed = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for name in _SOURCES:
            hashed.update((folder / name).read_bytes())
        return hashed.hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """Where the built things lie; ``metadata`` holds lengths in tokens, seconds, and the score to compare with."""

    model_dir: Path
    train_parquet: Path
    val_parquet: Path
    metadata: Mapping[str, Any]


def default_cache() -> Path:
    """``$SEAMLESS_CACHE``, else ``~/.cache/seamless_verl``."""
    return Path(os.environ.get("SEAMLESS_CACHE") or Path.home() / ".cache" / "seamless_verl")


def build(cache_dir: Path | None = None, *, recipe: Recipe | None = None, progress: Progress | None = None) -> Assets:
    """The assets of a recipe, from the cache or built now (about a minute and a half on two cores).

    Raises:
        BuildFailed: the build ended with an error; the cache is as before.
    """
    recipe = recipe or Recipe()
    cache = (cache_dir or default_cache()).expanduser().resolve()
    digest = recipe.digest()
    folder = cache / f"swe-tiny-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".swe-tiny-{digest}.lock", progress or _say):
            if not folder.is_dir():
                _build_into(folder, recipe, progress or _say)
    return _assets(folder)


def folder(cache: str | None = None) -> Path:
    """Where the assets of the default recipe are, or will be once built; imports nothing heavy."""
    root = Path(cache).expanduser() if cache else default_cache()
    return root.resolve() / f"swe-tiny-{Recipe().digest()}"


def _assets(folder: Path) -> Assets:
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    return Assets(
        model_dir=folder / "model",
        train_parquet=folder / "train.parquet",
        val_parquet=folder / "val.parquet",
        metadata={**metadata, "clean_imitation": CLEAN_IMITATION},
    )


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building the assets; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(folder: Path, recipe: Recipe, progress: Progress) -> None:
    """Build in a process of its own: the caller's threads, random state and GPU are none of its business."""
    for abandoned in folder.parent.glob(f".{folder.name}.building-*"):  # the lock is ours, so nobody works there
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = folder.parent / f".{folder.name}.building-{os.getpid()}"
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    environment = {**os.environ, **_QUICK, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", _MODULE, "--into", str(temporary), "--recipe", json.dumps(asdict(recipe))]
    progress(f"building model and data of the tiny recipe in {folder} (once)")
    said: list[str] = []
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    said.append(line.rstrip())
                    progress(line.rstrip())
            except BaseException:  # leaving waits for it
                process.kill()
                raise
        if process.returncode != 0:
            raise BuildFailed(f"status {process.returncode}: " + " | ".join(said[-12:]))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rows(split: str, tasks: list[Task], first_index: int = 0) -> list[dict[str, Any]]:
    """Dataset rows as verl reads them; the prompt is the first thing that the agent will say."""
    return [
        {
            "data_source": "swe_tiny" if split == "train" else split,
            "prompt": [{"role": "user", "content": edit.user_message(task.source, task.run(task.source)[0])}],
            "agent_name": AGENT_NAME,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": first_index + index, "split": split, "task": task.to_json()},
        }
        for index, task in enumerate(tasks)
    ]


def _build_here(folder: Path, recipe: Recipe) -> None:
    """The build proper, run in its own process by ``_build_into``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from seamless_verl.recipes.swe.tiny import warm_start
    from seamless_verl.recipes.swe.tiny.tokenizer import render

    started = time.monotonic()

    def progress(text: str) -> None:
        _say(f"[{time.monotonic() - started:4.0f} s] {text}")

    sizes = {
        "train": recipe.train_size,
        "held_out": recipe.held_out_size,
        "held_out_templates": recipe.held_out_templates_size,
    }
    data = {split: rows(split, list(islice(generate(split, recipe.seed), size))) for split, size in sizes.items()}
    held_out = data["held_out"] + data["held_out_templates"]
    for index, row in enumerate(held_out):
        row["extra_info"]["index"] = index
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(data["train"]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(held_out), folder / "val.parquet")
    progress(f"{len(data['train'])} training tasks, {len(held_out)} validation tasks")
    phases = [replace(p, tokens=int(p.tokens * recipe.warm_start_share)) for p in warm_start.SHIPPED]
    model, tokenizer = warm_start.train(phases, recipe.seed, progress)
    warm_start.save(model, tokenizer, folder / "model")
    first_turns = [[row["prompt"][0]["content"]] for split in data.values() for row in split]
    lengths = [len(tokenizer.encode(render(texts, open_turn=True), add_special_tokens=False)) for texts in first_turns]
    metadata = {
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompt_tokens_mean": round(sum(lengths) / len(lengths), 1),
        "prompt_tokens_max": max(lengths),
        "seconds": round(time.monotonic() - started, 1),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    progress("done")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the assets of the tiny recipe and say where they are.")
    parser.add_argument("--cache", type=Path, help="folder of the cache (default: $SEAMLESS_CACHE or ~/.cache)")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="{}", help="JSON with seed, train_size and the like, if not the defaults")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `_build_into` removes what it had
    recipe = Recipe(**json.loads(arguments.recipe))
    if arguments.into is not None:
        _build_here(arguments.into, recipe)
        return
    assets = build(arguments.cache, recipe=recipe)
    for name in ("model_dir", "train_parquet", "val_parquet"):
        _say(f"{name}: {getattr(assets, name)}")
    _say(json.dumps(dict(assets.metadata)))


if __name__ == "__main__":
    main()

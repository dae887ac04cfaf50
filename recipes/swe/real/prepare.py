"""SWE-bench / SWE-Gym / SWE-smith JSONL → the parquet files that verl's ``RLHFDataset`` reads.

::

    python -m seamless_verl.recipes.swe.real.prepare --input tasks.jsonl --output DIR
    python -m seamless_verl.recipes.swe.real.prepare --input tasks.jsonl --check

Invariants: memory does not grow with the size of the records (only their ids are kept); the split depends on the
instance id alone, so adding tasks moves none from one side to the other; files appear under their final names only
when all of them are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.recipes.swe.real.dataset import SplitWriter
from seamless_verl.recipes.swe.real.records import IMAGE_PRESETS, TEST_FILES, Defaults, Problem, read_tasks
from seamless_verl.recipes.swe.real.task import SweTask

MAX_SHOWN = 20
"""Problems printed in full; the rest is counted."""
_WARNINGS = (
    "test_patch: is missing and no test's name holds a file, so agents can rewrite tests. Fix: add test_patch, or the "
    "tests' files to seamless.agent.kwargs.protected_paths, beside its defaults.",
    "FAIL_TO_PASS: is missing, so that an untouched repository is rewarded where its tests pass. Fix: add it.",
    "image: is missing, so that only sandboxes of kind remote or local can run them. Fix: pass --image-template.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to prepare.

    Attributes:
        inputs: JSONL files.
        output: folder to write to; ``None`` only checks.
        val_share: share of the instances that goes to ``val.parquet``; unused with ``val_input``.
        val_input: JSONL file with the validation tasks.
        limit: stop after so many good tasks of the training input; 0 takes all.
        skip_invalid: leave bad records out instead of refusing the whole input.
        defaults: what fills the gaps of records.
    """

    inputs: tuple[Path, ...]
    output: Path | None
    val_share: float = 0.02
    val_input: Path | None = None
    limit: int = 0
    skip_invalid: bool = False
    defaults: Defaults = field(default_factory=Defaults)

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_share < 1.0:
            raise ConfigError("--val-share", self.val_share, "must be at least 0 and below 1", "write for example 0.02")
        if self.limit < 0:
            raise ConfigError("--limit", self.limit, "is negative", "write 0 for all tasks")
        for path in (*self.inputs, *((self.val_input,) if self.val_input else ())):
            if not path.is_file():
                raise ConfigError("--input", path, "is not a file", "name a JSONL file, one record per line")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was read and written.

    Attributes:
        num_train: tasks on the training side.
        num_val: tasks on the validation side.
        problems: the first bad lines, at most `MAX_SHOWN`.
        num_problems: all bad lines.
        unprotected: ids of tasks whose tests nothing keeps the agent from rewriting.
        unlisted: ids of tasks that list no test to repair.
        no_image: ids of tasks without an image.
        images: each image once.
    """

    num_train: int
    num_val: int
    problems: tuple[Problem, ...]
    num_problems: int
    unprotected: tuple[str, ...]
    unlisted: tuple[str, ...]
    no_image: tuple[str, ...]
    images: tuple[str, ...]


def split_of(instance_id: str, val_share: float) -> str:
    """``train`` or ``val``, by a hash of the id: the same on every machine and for every set of other tasks."""
    draw = int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:8], "big") / 2**64
    return "val" if draw < val_share else "train"


def prepare(options: Options) -> Summary:
    """Check every record and, unless ``output`` is ``None``, write both parquet files and ``manifest.json``.

    With bad records and ``skip_invalid`` off nothing is written; the summary tells.

    Raises:
        ConfigError: a side of the split would be empty.
    """
    writers = {split: SplitWriter(options.output, split) for split in ("train", "val")}
    problems: list[Problem] = []
    num_problems = 0
    unprotected: list[str] = []
    unlisted: list[str] = []
    no_image: list[str] = []
    images: dict[str, None] = {}
    progress = _Progress()
    try:
        for split, item in _items(options):
            if isinstance(item, Problem):
                num_problems += 1
                problems += [item] if len(problems) < MAX_SHOWN else []
            else:
                writers[split].add(item)
                if not item.test_patch and not any("::" in name for name in item.expected):
                    unprotected.append(item.view.instance_id)
                unlisted += [] if item.fail_to_pass else [item.view.instance_id]
                no_image += [] if item.view.image else [item.view.instance_id]
                images.update({item.view.image: None} if item.view.image else {})
            progress.show(writers["train"].num_rows, writers["val"].num_rows, num_problems)
        progress.show(writers["train"].num_rows, writers["val"].num_rows, num_problems, last=True)
        summary = Summary(
            num_train=writers["train"].num_rows,
            num_val=writers["val"].num_rows,
            problems=tuple(problems),
            num_problems=num_problems,
            unprotected=tuple(unprotected),
            unlisted=tuple(unlisted),
            no_image=tuple(no_image),
            images=tuple(images),
        )
        if num_problems and not options.skip_invalid:
            return summary
        _refuse_empty_side(options, summary)
        if options.output is not None:
            _finish(options, writers, summary)
        return summary
    finally:
        for writer in writers.values():
            writer.discard()


def main(argv: list[str] | None = None) -> int:
    """Command line; exit code 0 when everything asked for was done, 1 for bad records, 2 for a bad command line."""
    try:
        options = _options(argv)
        summary = prepare(options)
    except SeamlessError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for problem in summary.problems:
        sys.stderr.write(f"{problem}\n")
    if summary.num_problems > len(summary.problems):
        sys.stderr.write(f"... and {summary.num_problems - len(summary.problems)} more\n")
    if summary.num_problems and not options.skip_invalid:
        sys.stderr.write(
            f"{summary.num_problems} bad records, nothing written. Fix: correct them, or leave them out with "
            "--skip-invalid.\n"
        )
        return 1
    for tasks, story in zip((summary.unprotected, summary.unlisted, summary.no_image), _WARNINGS, strict=True):
        if tasks:
            sys.stderr.write(f"warning: {len(tasks)} tasks ({', '.join(tasks[:3])}): {story}\n")
    where = f"written to {options.output}" if options.output else "checked, nothing written (--check)"
    left_out = f", {summary.num_problems} left out" if summary.num_problems else ""
    sys.stdout.write(f"{summary.num_train} train + {summary.num_val} val tasks {where}{left_out}\n")
    return 0


def _items(options: Options) -> Iterator[tuple[str, SweTask | Problem]]:
    seen: set[str] = set()
    # The validation file goes first: a task that is in both files must not be trained on.
    if options.val_input is not None:
        for item in read_tasks(options.val_input, options.defaults, seen):
            yield "val", item
    taken = 0
    for path in options.inputs:
        for item in read_tasks(path, options.defaults, seen):
            if isinstance(item, Problem):
                yield "train", item
                continue
            share = 0.0 if options.val_input is not None else options.val_share
            yield split_of(item.view.instance_id, share), item
            taken += 1
            if options.limit and taken >= options.limit:
                return


def _refuse_empty_side(options: Options, summary: Summary) -> None:
    total = summary.num_train + summary.num_val
    if not summary.num_train:
        raise ConfigError("--input", options.inputs[0], f"leaves no training task ({total} read)", "add records")
    if not summary.num_val and options.val_input is not None:
        raise ConfigError("--val-input", options.val_input, "holds no task", "add records or use --val-share")
    if not summary.num_val and options.val_share > 0:
        raise ConfigError(
            "--val-share",
            options.val_share,
            f"leaves no validation task out of {total}",
            "raise it, give --val-input, or write 0 to have no val.parquet",
        )


def _finish(options: Options, writers: dict[str, SplitWriter], summary: Summary) -> None:
    assert options.output is not None
    manifest = {
        "format": "seamless_verl.swe.1",
        "inputs": [path.name for path in options.inputs],
        "val_input": options.val_input.name if options.val_input else None,
        "val_share": None if options.val_input else options.val_share,
        "limit": options.limit,
        "num_train": summary.num_train,
        "num_val": summary.num_val,
        "num_left_out": summary.num_problems,
        "digest": {split: writer.digest for split, writer in writers.items()},
    }
    for writer in writers.values():
        writer.publish()
    if summary.images:
        (options.output / "images.txt").write_text("".join(f"{name}\n" for name in summary.images), encoding="utf-8")
    (options.output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class _Progress:
    """One line on stderr: rewritten in place on a terminal, at most every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._next_s = time.monotonic()
        self._period_s = 0.2 if self._tty else 10.0

    def show(self, num_train: int, num_val: int, num_problems: int, *, last: bool = False) -> None:
        now = time.monotonic()
        if now < self._next_s and not last:
            return
        self._next_s = now + self._period_s
        line = f"read {num_train + num_val + num_problems}: {num_train} train, {num_val} val, {num_problems} bad"
        sys.stderr.write(f"\r{line}\033[K" + ("\n" if last else "") if self._tty else f"{line}\n")
        sys.stderr.flush()


def _options(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m seamless_verl.recipes.swe.real.prepare",
        description="Turn SWE-bench / SWE-Gym / SWE-smith JSONL into train.parquet and val.parquet for verl.",
    )
    parser.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE", help="JSONL, one task a line")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the parquet files and manifest.json")
    side = parser.add_mutually_exclusive_group()
    side.add_argument("--val-share", type=float, default=0.02, metavar="X", help="share for validation (0.02)")
    side.add_argument("--val-input", type=Path, metavar="FILE", help="JSONL with the validation tasks")
    parser.add_argument(
        "--image-template", default="", metavar="T", help=f"image name; presets: {', '.join(IMAGE_PRESETS)}"
    )
    parser.add_argument("--test-command", default="", metavar="C", help=f"for records without; may hold {TEST_FILES}")
    parser.add_argument(
        "--test-commands", type=Path, metavar="FILE", help="JSON object: repo or repo@version to such a command"
    )
    parser.add_argument("--workdir", default="/testbed", metavar="PATH", help="repository inside the image (/testbed)")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="stop after N good tasks")
    parser.add_argument("--skip-invalid", action="store_true", help="leave bad records out instead of refusing")
    parser.add_argument("--check", action="store_true", help="only check the records; write nothing")
    args = parser.parse_args(argv)
    if args.output is None and not args.check:
        parser.error("--output DIR is required unless --check is given")
    return Options(
        inputs=tuple(args.input),
        output=None if args.check else args.output,
        val_share=args.val_share,
        val_input=args.val_input,
        limit=args.limit,
        skip_invalid=args.skip_invalid,
        defaults=Defaults(
            image_template=args.image_template,
            test_command=args.test_command,
            test_commands=_read_commands(args.test_commands),
            workdir=args.workdir,
        ),
    )


def _read_commands(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        commands = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--test-commands", path, f"cannot be read ({error})", "write a JSON object") from error
    if not isinstance(commands, dict) or not all(isinstance(value, str) for value in commands.values()):
        raise ConfigError("--test-commands", path, "is not an object of strings", 'write {"owner/name": "pytest"}')
    return commands


if __name__ == "__main__":
    raise SystemExit(main())

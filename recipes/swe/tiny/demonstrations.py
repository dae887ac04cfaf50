"""Conversations to imitate: a developer who makes the right edit with some probability, else a plausible wrong one.

``python -m seamless_verl.recipes.swe.tiny.demonstrations --seed 1 --count 100 --right 0.3`` writes one conversation
per line, a JSON list of alternating user and assistant texts.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Iterator
from itertools import islice
from random import Random

from seamless_verl.recipes.swe.tiny import edit
from seamless_verl.recipes.swe.tiny.mutations import Lines, draw_mutation
from seamless_verl.recipes.swe.tiny.tasks import Task, generate, reserved

MAX_TURNS = 3
_TURNS = (1, 1, 1, MAX_TURNS)
_ATTEMPTS = 20
_MEMORY_BYTES = 1 << 30


def demonstrate(rng: Random, task: Task, right: float, turns: int) -> list[str]:
    """Alternating user and assistant texts, at most ``turns`` of each; ends early once every test passes.

    Args:
        right: probability, at each turn, of the edit that brings one line back to the correct file.
    """
    lines, texts = task.source, list[str]()
    for _ in range(turns):
        outcome, share = task.run(lines)
        if share == 1.0:
            break
        edited = _repaired(rng, task, lines) if rng.random() < right else None
        edited = edited or _worsened(rng, lines)
        if edited is None:
            break
        texts += [edit.user_message(lines, outcome), edit.edit_between(lines, edited)]
        lines = edited
    return texts


def _repaired(rng: Random, task: Task, lines: Lines) -> Lines | None:
    """``lines`` with one wrong line corrected; ``None`` when that gives a body reserved for evaluation."""
    index = rng.choice([i for i, line in enumerate(lines) if line != task.fixed[i]])
    repaired = (*lines[:index], task.fixed[index], *lines[index + 1 :])
    return None if reserved(repaired) else repaired


def _worsened(rng: Random, lines: Lines) -> Lines | None:
    """``lines`` after a random mutation whose result may occur in training data."""
    for _ in range(_ATTEMPTS):
        mutation = draw_mutation(rng, lines)
        if mutation is None:
            return None
        mutated = mutation.apply(lines)
        if not reserved(mutated):
            return mutated
    return None


def conversations(seed: int, right: float) -> Iterator[list[str]]:
    """An endless stream of conversations over training tasks."""
    rng = Random(f"demonstrations/{seed}")
    for task in generate("train", seed):
        yield demonstrate(rng, task, right, rng.choice(_TURNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--right", type=float, required=True, help="probability of the right edit at each turn")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))  # several bugs at once can multiply lists
    for texts in islice(conversations(arguments.seed, arguments.right), arguments.count):
        sys.stdout.write(json.dumps(texts) + "\n")


if __name__ == "__main__":
    main()

"""What categories and tags are called on the page, and their classes in its style sheet."""

from __future__ import annotations

from collections.abc import Mapping

from seamless_verl.observe.ledger import Category

LABELS: Mapping[Category, str] = {
    Category.TRAIN: "training",
    Category.GENERATE: "generating",
    Category.PREFILL_AGAIN: "prefilling again",
    Category.SYNC: "weight sync",
    Category.SWITCH: "switching",
    Category.WAIT_DATA: "waiting for data or work",
    Category.WAIT_STRAGGLER: "waiting for stragglers",
    Category.FAILED: "failed",
    Category.VALIDATION: "waiting for validation",
    Category.CHECKPOINT: "checkpoint",
    Category.OTHER: "other",
}


def style_of(category: Category) -> str:
    return f"c-{category.value.replace('_', '-')}"

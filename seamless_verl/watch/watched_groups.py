"""Steps and groups of a run, out of its attempts: which groups teach nothing, which drifted, which are stale. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from seamless_verl.observe.flight import GIVEN_UP, SURPLUS, UNWANTED
from seamless_verl.observe.page.words import REALIGNED
from seamless_verl.trajectory.tokens import DriftReason

Attempt = Mapping[str, Any]
NO_STEP = "none"
"""The step of attempts that no step is known to have trained."""
# How agents work by design, and what keeps its row.
_HARMLESS = {reason.value for reason in (*REALIGNED, DriftReason.BRANCHED, DriftReason.RESAMPLED)}
SILENT_S = 300.0
_STALE = 2  # versions; one is how every run that overlaps rollout and training works
FLAGS: Mapping[str, str] = {
    "zero variance": "every attempt of the group has the same reward, so that GRPO learns nothing from it",
    "cut off": "an answer ended at its limit of tokens",
    "drifted": "a request did not continue its session: another row began (docs/report.md lists the reasons)",
    "interrupted": "new weights or a reclaim came in the middle of an answer, which went on with them",
    "stale": "its first tokens are from weights two or more versions older than those that its step changed",
    "cut off by redundancy": "the trainer had taken as many attempts of its group as it needs, and ended this one "
    "(seamless.staleness.group_redundancy above 1)",
    "given up": "the trainer ended it: its group was surplus (seamless.staleness.redundancy above 1), failed, or was "
    "begun anew; or its runner raised",
    "silent": "under way, and for five minutes without an answer: its agent or a tool hangs, or its request waits",
    "under way": "an attempt of it has not ended",
    "not finished": "an agent ended otherwise than by finishing",
}


def flags_of(attempt: Attempt, now: float) -> list[str]:
    """What is odd about one attempt, in the words of `FLAGS`; what its sources do not say is not odd.

    Args:
        now: seconds since 1970.
    """
    step, oldest = attempt.get("step"), attempt.get("oldest")
    is_given_up, is_surplus = attempt.get("state") == GIVEN_UP, attempt.get("status") == SURPLUS
    oddities = {
        "cut off": bool(attempt.get("cut")),
        "drifted": any(reason not in _HARMLESS for reason in attempt["drift"]),
        "interrupted": bool(attempt.get("seams")),
        "stale": step is not None and oldest is not None and step - 1 - oldest >= _STALE,
        "silent": is_silent(attempt, now),
        "under way": attempt.get("state") == "open",
        "not finished": attempt.get("status") not in (None, "finished", *UNWANTED),
        "cut off by redundancy": is_given_up and is_surplus,
        "given up": is_given_up and not is_surplus,
    }
    return [flag for flag, holds in oddities.items() if holds]


def is_silent(attempt: Attempt, now: float) -> bool:
    latest = attempt.get("latest")
    return attempt.get("state") == "open" and latest is not None and now - latest > SILENT_S


def groups_of(attempts: Iterable[Attempt], now: float = 0.0) -> list[dict[str, Any]]:
    """Attempts by their group, each with its flags; in the order in which the groups began.

    Args:
        now: as `flags_of`.
    """
    members: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for attempt in attempts:
        members[attempt["group"]].append({**attempt, "flags": flags_of(attempt, now)})
    return [_group(name, found) for name, found in members.items()]


def _group(name: str, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    attempts.sort(key=lambda attempt: (attempt["index"] is None, attempt["index"] or 0, attempt["key"]))
    rewards = [attempt["reward"] for attempt in attempts if attempt["reward"] is not None]
    wanted = [attempt for attempt in attempts if attempt.get("state") != GIVEN_UP]
    flags = [flag for flag in FLAGS if any(flag in attempt["flags"] for attempt in attempts)]
    if len(rewards) > 1 and len(rewards) == len(wanted) and max(rewards) == min(rewards):
        flags.insert(0, "zero variance")
    seconds = [attempt["seconds"] for attempt in attempts if attempt.get("seconds") is not None]
    return {
        "group": name,
        "attempts": attempts,
        "reward": fmean(rewards) if rewards else None,
        "spread": max(rewards) - min(rewards) if rewards else None,
        "seconds": max(seconds, default=None),
        "tokens": sum(attempt.get("tokens") or 0 for attempt in attempts) or None,
        "flags": flags,
    }


SORTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "as begun": lambda group: 0,
    "reward, lowest first": lambda group: _last(group["reward"]),
    "reward, highest first": lambda group: _last(group["reward"], -1),
    "slowest first": lambda group: _last(group["seconds"], -1),
    "most tokens first": lambda group: _last(group["tokens"], -1),
    "largest spread first": lambda group: _last(group["spread"], -1),
}


def _last(value: float | None, sign: int = 1) -> tuple[bool, float]:
    """Sorts what nobody knows to the end."""
    return value is None, 0.0 if value is None else sign * value


def chosen(
    groups: Iterable[Mapping[str, Any]], *, sort: str = "as begun", flag: str = "", text: str = ""
) -> list[Mapping[str, Any]]:
    """Groups with a flag, and with ``text`` in the name of the group, of a session, or in a status; sorted.

    Raises:
        KeyError: no such order.
    """
    wanted = text.casefold()
    return sorted(
        (g for g in groups if (not flag or flag in g["flags"]) and (not wanted or wanted in _named(g))), key=SORTS[sort]
    )


def _named(group: Mapping[str, Any]) -> str:
    words = [group["group"]]
    for attempt in group["attempts"]:
        words += [
            attempt["key"],
            *(attempt.get(name) or "" for name in ("status", "detail", "task")),
            *attempt["drift"],
        ]
    return " ".join(words).casefold()


def summary(step: Any, attempts: Sequence[Attempt], now: float = 0.0) -> dict[str, Any]:
    """What one line of the list of steps says of its attempts; ``now`` as `flags_of`."""
    groups = groups_of(attempts, now)
    rewards = [attempt["reward"] for attempt in attempts if attempt["reward"] is not None]
    counts = {flag: sum(flag in group["flags"] for group in groups) for flag in FLAGS}
    return {
        "step": step,
        "groups": len(groups),
        "attempts": len(attempts),
        "reward": fmean(rewards) if rewards else None,
        "flags": {flag: count for flag, count in counts.items() if count},
    }


def uncounted(step: Any) -> dict[str, Any]:
    """The line of a step whose attempts have not been counted yet."""
    return {"step": step, "groups": None, "attempts": None, "reward": None, "flags": {}}


def with_record(line: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The line with what ``steps.jsonl`` says of the step; an empty record says nothing."""
    return {
        **line,
        "reward": record.get("reward", line["reward"]),
        **{name: record.get(name) for name in ("step_s", "staleness_max", "tokens_per_s")},
    }

"""Single-token mutations of a function's body, and the canonical forms by which bodies are told apart.

A function is a tuple of source lines: the ``def`` line, a one-line docstring, then the body (from ``BODY_START`` on).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

BODY_START = 2
Lines = tuple[str, ...]

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|'[^']*'|\+=|-=|\*=|//|<=|>=|==|!=|\s+|.")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LITERAL = re.compile(r"'[^']*'")
_WORDS = frozenset(
    ("def", "return", "for", "in", "if", "while", "not", "and", "or", "range", "len", "max", "min", "append", "True",
     "False")
)  # fmt: skip
_SWAPS: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",),
    "+": ("-", "*"), "-": ("+",), "*": ("+",), "+=": ("-=", "*="), "-=": ("+=",), "*=": ("+=",),
    "//": ("%", "*"), "%": ("//",), "and": ("or",), "or": ("and",), "max": ("min",), "min": ("max",),
    "True": ("False",), "False": ("True",), "not": ("",),
}  # fmt: skip
_OPERATOR_OF = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), "comparison"),
    **dict.fromkeys(("and", "or", "True", "False"), "boolean"),
    **dict.fromkeys(("max", "min"), "extremum"),
    "not": "negation",
}
OPERATORS = ("arithmetic", "boolean", "comparison", "constant", "extremum", "negation", "variable")


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace token ``token`` of line ``line`` (both 0-based) by ``new``; an empty ``new`` also drops the blank after.

    ``operator`` is the kind of mistake, one of ``OPERATORS``.
    """

    operator: str
    line: int
    token: int
    new: str

    def apply(self, lines: Lines) -> Lines:
        tokens = _TOKEN.findall(lines[self.line])
        tokens[self.token : self.token + (2 if self.new == "" else 1)] = [self.new] if self.new else []
        return (*lines[: self.line], "".join(tokens), *lines[self.line + 1 :])


def variables(lines: Lines) -> tuple[str, ...]:
    """Variable names used in the body, in order of first appearance."""
    body = _LITERAL.sub("", "\n".join(lines[BODY_START:]))
    return tuple(dict.fromkeys(name for name in _NAME.findall(body) if name not in _WORDS))


def mutations(lines: Lines) -> list[Mutation]:
    """Every single-token mutation of the body, in a stable order."""
    names = sorted(variables(lines))
    found = []
    for index in range(BODY_START, len(lines)):
        tokens: list[str] = _TOKEN.findall(lines[index])
        for position in range(len(tokens)):
            for operator, new in _replacements(tokens, position, names):
                found.append(Mutation(operator, index, position, new))
    return found


def _replacements(tokens: list[str], position: int, names: list[str]) -> list[tuple[str, str]]:
    """What may stand instead of one token: ``(operator, new token)``."""
    token, before = tokens[position], "".join(tokens[:position]).strip()
    if token in _SWAPS:
        if token == "-" and before == "return":  # `return -1` means "not found": its sign is no bug worth a task
            return []
        return [(_OPERATOR_OF.get(token, "arithmetic"), new) for new in _SWAPS[token]]
    if token.isdigit():
        return [("constant", str(new)) for new in (int(token) - 1, int(token) + 1) if new >= 0]
    if token in names:
        if before == "" or before.endswith("for"):  # targets of assignments and loops keep their name
            return []
        return [("variable", new) for new in names if new != token]
    if token == "in" and "if" in tokens and "not" not in tokens:
        return [("negation", "not in")]
    return []


def draw_mutation(rng: Random, lines: Lines) -> Mutation | None:
    """One mutation, operators first so that the frequent ones (names) do not crowd out the rest."""
    candidates = mutations(lines)
    if not candidates:
        return None
    operator = rng.choice(sorted({mutation.operator for mutation in candidates}))
    return rng.choice([mutation for mutation in candidates if mutation.operator == operator])


def body_key(lines: Lines) -> str:
    """The body as it stands, blanks at line ends apart: two functions with one key have the same body."""
    return "\n".join(line.rstrip() for line in lines[BODY_START:])


def renamed_body_key(lines: Lines) -> str:
    """The body with its variables numbered by first appearance: equal for bodies that differ in names only."""
    number = {name: f"v{index}" for index, name in enumerate(variables(lines))}
    return _NAME.sub(lambda name: number.get(name[0], name[0]), body_key(lines))

"""The functions that a task can be about: 34 templates, the names they are dressed in, and arguments to call them with.

A template is text with holes: ``$role`` is a variable name drawn from ``IDENTIFIERS[role]``, ``#`` the constant. The
arguments of a call are drawn near the values where an off-by-one or a flipped comparison shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Value = int | str | bool | list["Value"]
Arguments = tuple[Value, ...]
DrawArguments = Callable[[Random, int], Arguments]

CONSTANTS = range(2, 10)
HELD_OUT_TEMPLATES = frozenset({"any_above", "outside", "running", "shorten", "sum_mult"})

IDENTIFIERS: dict[str, tuple[str, ...]] = {
    "xs": ("values", "items", "nums", "scores", "prices", "sizes", "marks", "points", "rows", "data"),
    "ys": ("others", "extra", "rest", "more", "second"),
    "x": ("x", "v", "n", "item", "num", "cur"),
    "y": ("y", "u", "m", "other"),
    "k": ("limit", "bound", "cut", "level", "mark"),
    "lo": ("low", "lo", "start", "left"),
    "hi": ("high", "hi", "stop", "right"),
    "a": ("total", "result", "acc", "s", "count", "best"),
    "out": ("out", "kept", "found", "new"),
    "i": ("i", "j", "idx"),
    "t": ("text", "word", "line", "name"),
    "c": ("ch", "c", "letter"),
}
# Function names are a verb of the template and one of these nouns.
NOUNS = (
    "users", "orders", "cars", "books", "files", "days", "games", "trips", "teams", "rooms", "tasks", "cells", "stars",
    "coins", "cards", "steps", "jobs", "logs", "keys", "boxes",
)  # fmt: skip
HELD_OUT_NOUNS = ("plants", "votes", "ships", "songs", "tiles", "posts", "goats", "bills")


def _ints(rng: Random, count: int | None = None, low: int = 0, high: int = 9) -> list[Value]:
    return [rng.randint(low, high) for _ in range(count or rng.randint(3, 5))]


def _near(rng: Random, numbers: list[Value]) -> int:
    """A threshold on or next to one of the numbers, where boundary bugs show."""
    chosen = rng.choice(numbers)
    assert isinstance(chosen, int)
    return max(0, chosen + rng.choice([0, 0, 0, 1, -1]))


def _word(rng: Random, length: int | None = None) -> str:
    return "".join(rng.choice("abcd") for _ in range(length or rng.randint(3, 6)))


def _list(rng: Random, constant: int) -> Arguments:
    return (_ints(rng),)


def _list_and_threshold(rng: Random, constant: int) -> Arguments:
    numbers = _ints(rng)
    return numbers, _near(rng, numbers)


def _list_with_constant(rng: Random, constant: int) -> Arguments:
    numbers = _ints(rng)
    numbers[rng.randrange(len(numbers))] = constant
    if rng.random() < 0.5:
        numbers[rng.randrange(len(numbers))] = min(9, constant + rng.choice([-1, 1, 0]))
    return (numbers,)


def _list_and_bound_below(rng: Random, constant: int) -> Arguments:
    numbers = _ints(rng, None, 1)
    return numbers, max(0, min(n for n in numbers if isinstance(n, int)) + rng.choice([-1, -1, 0, 1]))


def _list_and_bound_above(rng: Random, constant: int) -> Arguments:
    numbers = _ints(rng)
    return numbers, max(0, max(n for n in numbers if isinstance(n, int)) + rng.choice([-1, -1, 0, 1]))


def _list_and_member(rng: Random, constant: int) -> Arguments:
    numbers = _ints(rng)
    return numbers, rng.choice([*numbers, *numbers, 9])


def _factors(rng: Random, constant: int) -> Arguments:
    return (_ints(rng, 3, 1, 5),)


def _small(rng: Random, constant: int) -> Arguments:
    return (rng.randint(0, 6),)


def _near_constant(rng: Random, constant: int) -> Arguments:
    return (rng.choice([constant, constant * 2, constant - 1, constant + 1, rng.randint(0, 20)]),)


def _pair(rng: Random, constant: int) -> Arguments:
    return rng.randint(0, 9), rng.randint(0, 9)


def _multiples(rng: Random, constant: int) -> Arguments:
    divisor = rng.randint(1, 4)
    return divisor * rng.randint(1, 5), divisor * rng.randint(1, 5)


def _value_and_interval(rng: Random, constant: int) -> Arguments:
    low = rng.randint(0, 5)
    high = low + rng.randint(1, 4)
    return rng.choice([low, high, low + 1, low - 1, high + 1, rng.randint(0, 9)]), low, high


def _two_lists(rng: Random, constant: int) -> Arguments:
    length = rng.randint(2, 3)
    return _ints(rng, length, 0, 5), _ints(rng, length, 0, 5)


def _two_overlapping_lists(rng: Random, constant: int) -> Arguments:
    return _ints(rng, 4, 0, 5), _ints(rng, 3, 0, 5)


def _text_and_letter(rng: Random, constant: int) -> Arguments:
    text = _word(rng)
    return text, rng.choice(text)


def _text_and_length(rng: Random, constant: int) -> Arguments:
    text = _word(rng)
    return text, max(1, len(text) + rng.choice([-2, -1, 0, 1]))


@dataclass(frozen=True, slots=True)
class Template:
    """One function with holes.

    Attributes:
        name: stable key of the template.
        verbs: first words that a function name may take.
        parameters: comma-separated parameter list.
        doc: docstring of the function.
        body: lines after the docstring, without their first indentation.
        draw_arguments: arguments of one call, given randomness and the constant.
    """

    name: str
    verbs: tuple[str, ...]
    parameters: str
    doc: str
    body: tuple[str, ...]
    draw_arguments: DrawArguments

    def dress(self, function: str, names: dict[str, str], constant: int) -> tuple[str, ...]:
        """Source lines of the correct function; ``names`` maps every role of the template to a variable name."""

        def fill(text: str) -> str:
            return re.sub(r"\$([a-z]+)", lambda hole: names[hole[1]], text).replace("#", str(constant))

        head = (f"def {function}({fill(self.parameters)}):", f'    """{fill(self.doc)}"""')
        return head + tuple("    " + fill(line) for line in self.body)

    def roles(self) -> tuple[str, ...]:
        """Roles of the template's variables, in order of first appearance."""
        return tuple(dict.fromkeys(re.findall(r"\$([a-z]+)", " ".join((self.parameters, *self.body)))))


def _template(name: str, verbs: str, parameters: str, doc: str, body: str, draw: DrawArguments) -> Template:
    """``body`` holds the lines, separated by `` / ``; each leading ``>`` is one level of indentation."""
    lines = []
    for line in body.split(" / "):
        text = line.lstrip(">")
        lines.append("    " * (len(line) - len(text)) + text)
    return Template(name, tuple(verbs.split()), parameters, doc, tuple(lines), draw)


_TABLE: tuple[tuple[str, str, str, str, str, DrawArguments], ...] = (
    ("count_above", "count number", "$xs, $k", "Count the $xs above $k.",
     "$a = 0 / for $x in $xs: / >if $x > $k: / >>$a += 1 / return $a", _list_and_threshold),
    ("count_min", "count number", "$xs", "Count the $xs that are at least #.",
     "$a = 0 / for $x in $xs: / >if $x >= #: / >>$a += 1 / return $a", _list_with_constant),
    ("sum_below", "sum add", "$xs, $k", "Sum the $xs below $k.",
     "$a = 0 / for $x in $xs: / >if $x < $k: / >>$a += $x / return $a", _list_and_threshold),
    ("sum_mult", "sum add", "$xs", "Sum the $xs divisible by #.",
     "$a = 0 / for $x in $xs: / >if $x % # == 0: / >>$a += $x / return $a", _list_with_constant),
    ("maximum", "max biggest", "$xs", "Return the largest of $xs.",
     "$a = $xs[0] / for $x in $xs: / >if $x > $a: / >>$a = $x / return $a", _list),
    ("minimum", "min smallest", "$xs", "Return the smallest of $xs.",
     "$a = $xs[0] / for $x in $xs: / >if $x < $a: / >>$a = $x / return $a", _list),
    ("clamp", "clamp limit", "$x, $lo, $hi", "Clamp $x between $lo and $hi.",
     "if $x < $lo: / >return $lo / if $x > $hi: / >return $hi / return $x", _value_and_interval),
    ("index_of", "find index", "$xs, $k", "Return the first index of $k in $xs or -1.",
     "for $i in range(len($xs)): / >if $xs[$i] == $k: / >>return $i / return -1", _list_and_member),
    ("keep_below", "keep filter", "$xs, $k", "Keep the $xs below $k.",
     "$out = [] / for $x in $xs: / >if $x < $k: / >>$out.append($x) / return $out", _list_and_threshold),
    ("keep_min", "keep filter", "$xs", "Keep the $xs that are at least #.",
     "$out = [] / for $x in $xs: / >if $x >= #: / >>$out.append($x) / return $out", _list_with_constant),
    ("scale", "scale grow", "$xs", "Multiply all $xs by #.",
     "$out = [] / for $x in $xs: / >$out.append($x * #) / return $out", _list),
    ("shift", "shift raise", "$xs", "Add # to all $xs.",
     "$out = [] / for $x in $xs: / >$out.append($x + #) / return $out", _list),
    ("inside", "inside within", "$x, $lo, $hi", "Tell if $x is at least $lo and below $hi.",
     "if $x >= $lo and $x < $hi: / >return True / return False", _value_and_interval),
    ("outside", "outside beyond", "$x, $lo, $hi", "Tell if $x is below $lo or above $hi.",
     "if $x < $lo or $x > $hi: / >return True / return False", _value_and_interval),
    ("product", "product multiply", "$xs", "Return the product of $xs.",
     "$a = 1 / for $x in $xs: / >$a *= $x / return $a", _factors),
    ("factorial", "factorial ways", "$x", "Return the factorial of $x.",
     "$a = 1 / for $i in range(1, $x + 1): / >$a *= $i / return $a", _small),
    ("sum_to", "sum triangle", "$x", "Sum the numbers from 1 to $x.",
     "$a = 0 / for $i in range(1, $x + 1): / >$a += $i / return $a", _small),
    ("fizz", "fizz name", "$x", "Return fizz if $x is divisible by # else $x.",
     "if $x % # == 0: / >return 'fizz' / return $x", _near_constant),
    ("count_char", "count number", "$t, $k", "Count how often $k is in $t.",
     "$a = 0 / for $c in $t: / >if $c == $k: / >>$a += 1 / return $a", _text_and_letter),
    ("drop_char", "drop remove", "$t, $k", "Drop every $k from $t.",
     "$out = '' / for $c in $t: / >if $c != $k: / >>$out += $c / return $out", _text_and_letter),
    ("shorten", "shorten trim", "$t, $x", "Cut $t to at most $x letters.",
     "if len($t) > $x: / >return $t[:$x] / return $t", _text_and_length),
    ("all_above", "all every", "$xs, $k", "Tell if all $xs are above $k.",
     "for $x in $xs: / >if $x <= $k: / >>return False / return True", _list_and_bound_below),
    ("any_above", "any some", "$xs, $k", "Tell if any of $xs is above $k.",
     "for $x in $xs: / >if $x > $k: / >>return True / return False", _list_and_bound_above),
    ("spread", "spread range", "$xs", "Return the largest minus the smallest of $xs.",
     "return max($xs) - min($xs)", _list),
    ("mean", "mean average", "$xs", "Return the mean of $xs rounded down.",
     "$a = 0 / for $x in $xs: / >$a += $x / return $a // len($xs)", _list),
    ("last", "last final", "$xs", "Return the last of $xs.",
     "$i = len($xs) - 1 / return $xs[$i]", _list),
    ("distance", "distance gap", "$x, $y", "Return the distance of $x and $y.",
     "if $x > $y: / >return $x - $y / return $y - $x", _pair),
    ("dot", "dot cross", "$xs, $ys", "Sum the products of $xs and $ys.",
     "$a = 0 / for $i in range(len($xs)): / >$a += $xs[$i] * $ys[$i] / return $a", _two_lists),
    ("gcd", "gcd divisor", "$x, $y", "Return the greatest common divisor of $x and $y.",
     "while $y != 0: / >$x, $y = $y, $x % $y / return $x", _multiples),
    ("running", "running partial", "$xs", "Return the running sums of $xs.",
     "$a = 0 / $out = [] / for $x in $xs: / >$a += $x / >$out.append($a) / return $out", _list),
    ("minus", "without exclude", "$xs, $ys", "Keep the $xs that are not in $ys.",
     "$out = [] / for $x in $xs: / >if $x not in $ys: / >>$out.append($x) / return $out", _two_overlapping_lists),
    ("common", "common shared", "$xs, $ys", "Keep the $xs that are also in $ys.",
     "$out = [] / for $x in $xs: / >if $x in $ys: / >>$out.append($x) / return $out", _two_overlapping_lists),
    ("discount", "discount price", "$x", "Take # off $x if $x is above #.",
     "if $x > #: / >return $x - # / return $x", _near_constant),
    ("larger", "larger pick", "$x, $y", "Return the larger of $x and $y.",
     "if $x > $y: / >return $x / return $y", _pair),
)  # fmt: skip
TEMPLATES: tuple[Template, ...] = tuple(_template(*row) for row in _TABLE)

"""What a test run says, test by test, and the score it makes. Pure: text in, numbers out.

Names are compared in one form, `test_key`: dotted, without the file suffix. A pytest id
``a/test_b.py::TestC::test_d[x]``, JUnit's ``classname="a.test_b.TestC" name="test_d[x]"`` and unittest's
``test_d (a.test_b.TestC)`` all become ``a.test_b.TestC.test_d`` (plus the parameters).

Invariant: a test that the run does not mention has not passed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from xml.etree import ElementTree

MAX_REPORT_CHARS = 64 * 1024 * 1024
"""Reports above this are refused: they come out of a sandbox that runs code nobody has read."""


class Outcome(Enum):
    """How one test ended. An expected failure counts as passed, as in SWE-bench."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class ReportError(ValueError):
    """A test report that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of one graded attempt.

    Attributes:
        num_passed: tests that had to pass and did.
        num_tests: tests that had to pass.
        missing: those of them that the run does not mention, at most ten.
    """

    num_passed: int
    num_tests: int
    missing: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the tests that passed; 0.0 where there were none."""
        return self.num_passed / self.num_tests if self.num_tests else 0.0

    @property
    def all_passed(self) -> bool:
        """True where there was something to pass and all of it did."""
        return 0 < self.num_tests == self.num_passed


_UNITTEST_NAME = re.compile(r"^(?P<test>\w+) \((?P<path>[\w.]+)\)$")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORDS = {
    "PASSED": Outcome.PASSED,
    "XFAIL": Outcome.PASSED,
    "FAILED": Outcome.FAILED,
    "ERROR": Outcome.FAILED,
    "XPASS": Outcome.FAILED,
    "SKIPPED": Outcome.SKIPPED,
    "ok": Outcome.PASSED,
    "expected failure": Outcome.PASSED,
    "FAIL": Outcome.FAILED,
    "unexpected success": Outcome.FAILED,
    "skipped": Outcome.SKIPPED,
    "f": Outcome.PASSED,
    "F": Outcome.FAILED,
    "E": Outcome.FAILED,
    "X": Outcome.FAILED,
    "s": Outcome.SKIPPED,
}
# Behind a name may come " - " and a message; parameters, too, may hold such a dash.
_PYTEST_SUMMARY = re.compile(
    r"^(?P<word>PASSED|XFAIL|FAILED|ERROR|XPASS|SKIPPED) (?P<name>\S+?::(?:[^\[]+?|[^\[]+?\[.+?\]))(?: - .*)?$"
)
_PYTEST_VERBOSE = re.compile(r"^(?P<name>\S+?::.+?) (?P<word>PASSED|XFAIL|FAILED|ERROR|XPASS|SKIPPED)\b")
_SYMPY = re.compile(r"^(?P<name>test_\w+) (?P<word>ok|[fFEsX])(?= |$)")
_UNITTEST_HEAD = re.compile(r"^\w+ \([\w.]+\)")
_UNITTEST_WORD = re.compile(r"^(?:ok|FAIL|ERROR|skipped|expected failure|unexpected success)\b")


def test_key(name: str) -> str:
    """The form in which a test's name is compared (see the module's docstring)."""
    if match := _UNITTEST_NAME.match(name):
        path, test = match["path"], match["test"]
        return path if path.rsplit(".", 1)[-1] == test else f"{path}.{test}"
    address, bracket, parameters = name.partition("[")
    parts = address.split("::")
    if len(parts) > 1:
        parts[0] = re.sub(r"\.py$", "", parts[0].removeprefix("./")).replace("/", ".")
    return ".".join(parts) + bracket + parameters


# pytest collects functions called test_*; this one is imported into test modules.
test_key.__test__ = False  # type: ignore[attr-defined]


def parse_junit(xml: str) -> dict[str, Outcome]:
    """Outcomes by `test_key` from a JUnit report as pytest writes it.

    Raises:
        ReportError: not XML, too large, or with a document type (entities could blow up).
    """
    if len(xml) > MAX_REPORT_CHARS:
        raise ReportError(f"report of {len(xml)} characters is above the limit of {MAX_REPORT_CHARS}")
    if "<!DOCTYPE" in xml[:1024]:
        raise ReportError("report declares a document type")
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ReportError(f"report is not XML: {error}") from error
    outcomes: dict[str, Outcome] = {}
    for case in root.iter("testcase"):
        classname, name = case.get("classname", ""), case.get("name", "")
        _record(outcomes, f"{classname}.{name}" if classname else name, _junit_outcome(case))
    return outcomes


def parse_log(text: str) -> dict[str, Outcome]:
    """Outcomes by `test_key` from what pytest (``-v``, ``-rA``), unittest (``-v``) or sympy (``--verbose``) printed."""
    outcomes: dict[str, Outcome] = {}
    lines = [_ANSI.sub("", raw).strip() for raw in text.splitlines()]
    for line in lines:
        if match := _PYTEST_SUMMARY.match(line) or _PYTEST_VERBOSE.match(line) or _SYMPY.match(line):
            _record(outcomes, test_key(match["name"]), _WORDS[match["word"]])
    for name, word in _unittest_results(lines):
        _record(outcomes, test_key(name), _WORDS[word])
    return outcomes


def _unittest_results(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Name and word of each result. A docstring stands on a line of its own and is a name, too: SWE-bench's lists hold
    it as the id. What the test prints comes between the dots and the word, which then begins a line."""
    names: tuple[str, ...] = ()
    for before, line in itertools.pairwise(["", *lines]):
        text, dots, rest = line.partition(" ... ")
        if head := _UNITTEST_HEAD.match(line):
            names = (head[0],)
        elif dots and _UNITTEST_NAME.match(before):
            names = (before, text)
        else:
            rest = line if line in _WORDS else ""
        if word := _UNITTEST_WORD.match(rest):
            yield from ((name, word[0]) for name in names)


def score(expected: Iterable[str], outcomes: Mapping[str, Outcome], *, exit_code: int | None) -> Score:
    """Count what passed.

    Args:
        expected: names of the tests that have to pass. Empty: every test of the run counts, skipped ones aside, and a
            run that mentions no test counts as one test that passed when the command exited with 0.
        outcomes: what the run said, by `test_key`.
        exit_code: of the test command; ``None`` when it was stopped by the time limit.
    """
    names = tuple(expected)
    if names:
        short = _by_first_word(outcomes)
        missing = tuple(n for n in names if test_key(n) not in outcomes and test_key(n) not in short)
        passed = sum(1 for n in names if _lookup(test_key(n), outcomes, short) is Outcome.PASSED)
        return Score(num_passed=passed, num_tests=len(names), missing=missing[:10])
    counted = [outcome for outcome in outcomes.values() if outcome is not Outcome.SKIPPED]
    if not counted:
        return Score(num_passed=int(exit_code == 0), num_tests=1)
    passed = sum(outcome is Outcome.PASSED for outcome in counted)
    # A run that failed as a whole (crash at exit, collection error) is not a full pass whatever its lines say.
    extra = int(exit_code != 0 and passed == len(counted))
    return Score(num_passed=passed, num_tests=len(counted) + extra)


def _lookup(key: str, outcomes: Mapping[str, Outcome], short: Mapping[str, Outcome]) -> Outcome | None:
    return outcomes.get(key, short.get(key))


def _by_first_word(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """SWE-bench's lists hold names cut at the first blank; such a name passes when every test it stands for does."""
    short: dict[str, Outcome] = {}
    for key, outcome in outcomes.items():
        word = key.split(" ", 1)[0]
        if word != key:
            _record(short, word, outcome)
    return short


def _record(outcomes: dict[str, Outcome], key: str, outcome: Outcome) -> None:
    """Keep the worst of several outcomes: a test whose teardown failed is reported twice."""
    order = (Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED)
    outcomes[key] = max(outcomes.get(key, outcome), outcome, key=order.index)


def _junit_outcome(case: ElementTree.Element) -> Outcome:
    if case.find("failure") is not None or case.find("error") is not None:
        return Outcome.FAILED
    skipped = case.find("skipped")
    if skipped is None:
        return Outcome.PASSED
    return Outcome.PASSED if skipped.get("type") == "pytest.xfail" else Outcome.SKIPPED

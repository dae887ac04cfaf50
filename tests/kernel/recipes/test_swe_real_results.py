"""Names, reports, logs and scores of a test run."""

from __future__ import annotations

import pytest

from seamless_verl.recipes.swe.real import results
from seamless_verl.recipes.swe.real.results import Outcome, ReportError, parse_junit, parse_log, score

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="a.test_b.TestC" name="test_d[x::y]" time="0.1" />
<testcase classname="a.test_b" name="test_failed"><failure message="no">x</failure></testcase>
<testcase classname="a.test_b" name="test_error"><error message="no">x</error></testcase>
<testcase classname="a.test_b" name="test_skipped"><skipped type="pytest.skip" message="m" /></testcase>
<testcase classname="a.test_b" name="test_xfail"><skipped type="pytest.xfail" message="m" /></testcase>
<testcase classname="a.test_b" name="test_teardown" />
<testcase classname="a.test_b" name="test_teardown"><error message="failed on teardown" /></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a/test_b.py::test_c", "a.test_b.test_c"),
        ("./a/test_b.py::TestC::test_d[x::y/z.py]", "a.test_b.TestC.test_d[x::y/z.py]"),
        ("test_x (pkg.tests.Case)", "pkg.tests.Case.test_x"),
        ("test_x (pkg.tests.Case.test_x)", "pkg.tests.Case.test_x"),
        ("some free text", "some free text"),
    ],
)
def test_names_of_all_runners_meet_in_one_form(name: str, key: str) -> None:
    assert results.test_key(name) == key


def test_junit_outcomes_keep_the_worst_of_a_test() -> None:
    assert parse_junit(JUNIT) == {
        "a.test_b.TestC.test_d[x::y]": Outcome.PASSED,
        "a.test_b.test_failed": Outcome.FAILED,
        "a.test_b.test_error": Outcome.FAILED,
        "a.test_b.test_skipped": Outcome.SKIPPED,
        "a.test_b.test_xfail": Outcome.PASSED,
        "a.test_b.test_teardown": Outcome.FAILED,
    }


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("<testsuites>", "not XML"),
        ("<!DOCTYPE x [<!ENTITY a 'a'>]><x>&a;</x>", "document type"),
        ("x" * (results.MAX_REPORT_CHARS + 1), "above the limit"),
    ],
)
def test_a_report_that_cannot_be_trusted_is_refused(report: str, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        parse_junit(report)


def test_pytest_logs_in_both_spellings() -> None:
    log = """\
tests/test_a.py::test_one PASSED                     [ 25%]
tests/test_a.py::test_two[a b] \x1b[31mFAILED\x1b[0m [ 50%]
=== short test summary info ===
PASSED tests/test_a.py::TestX::test_three
FAILED tests/test_a.py::test_four[x - y] - AssertionError: [1 - 2] - [3]
PASSED tests/test_a.py::test_four[x - z]
ERROR tests/test_a.py::test_five - OSError: [a] - b
SKIPPED [1] tests/test_a.py:3: no
"""
    assert parse_log(log) == {
        "tests.test_a.test_one": Outcome.PASSED,
        "tests.test_a.test_two[a b]": Outcome.FAILED,
        "tests.test_a.TestX.test_three": Outcome.PASSED,
        "tests.test_a.test_four[x - y]": Outcome.FAILED,
        "tests.test_a.test_four[x - z]": Outcome.PASSED,
        "tests.test_a.test_five": Outcome.FAILED,
    }


def test_unittest_logs() -> None:
    log = """\
test_a (app.tests.Case) ... ok
test_b (app.tests.Case.test_b) ... FAIL
test_c (app.tests.Case) ... skipped 'slow'
test_d (app.tests.Case) ... expected failure
test_e (app.tests.Case) The first line of its docstring. ... ERROR
"""
    assert parse_log(log) == {
        "app.tests.Case.test_a": Outcome.PASSED,
        "app.tests.Case.test_b": Outcome.FAILED,
        "app.tests.Case.test_c": Outcome.SKIPPED,
        "app.tests.Case.test_d": Outcome.PASSED,
        "app.tests.Case.test_e": Outcome.FAILED,
    }


def test_unittest_logs_with_docstrings_and_what_tests_print() -> None:
    log = """\
test_a (utils.Old)
A docstring is the id in SWE-bench's lists. ... ok
test_a (m.New.test_a)
Doc line ... FAIL
test_b (m.New) ... System check identified no issues (0 silenced).
Applying a migration ... ok
ok
test_c (m.New) ... test_d (m.New) ... ok
"""
    assert parse_log(log) == {
        "utils.Old.test_a": Outcome.PASSED,
        "A docstring is the id in SWE-bench's lists.": Outcome.PASSED,
        "m.New.test_a": Outcome.FAILED,
        "Doc line": Outcome.FAILED,
        "m.New.test_b": Outcome.PASSED,
    }, "and nothing of test_c, whose failed subtest leaves its line open"


def test_sympy_logs() -> None:
    log = "sympy/core/tests/test_x.py[7] \ntest_a ok\ntest_b f\ntest_c F\ntest_d E\ntest_e s - slow\ntest_f X\n[FAIL]\n"

    passed, failed, skipped = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED
    assert list(parse_log(log).items()) == [
        ("test_a", passed),
        ("test_b", passed),
        ("test_c", failed),
        ("test_d", failed),
        ("test_e", skipped),
        ("test_f", failed),
    ]


def test_a_test_that_was_not_run_has_not_passed() -> None:
    graded = score(["t.py::a", "t.py::b"], {"t.a": Outcome.PASSED}, exit_code=0)

    assert (graded.num_passed, graded.num_tests, graded.share, graded.all_passed) == (1, 2, 0.5, False)
    assert graded.missing == ("t.py::b",)


def test_expected_tests_decide_whatever_else_fails() -> None:
    graded = score(["t.py::a"], {"t.a": Outcome.PASSED, "t.other": Outcome.FAILED}, exit_code=1)

    assert graded.all_passed


def test_a_name_cut_at_a_blank_stands_for_all_its_tests() -> None:
    outcomes = {"t.a[x 1]": Outcome.PASSED, "t.a[x 2]": Outcome.PASSED, "t.b[y 1]": Outcome.PASSED}

    assert score(["t.py::a[x", "t.py::b[y"], outcomes, exit_code=0).all_passed
    outcomes["t.a[x 2]"] = Outcome.FAILED
    assert score(["t.py::a[x", "t.py::b[y"], outcomes, exit_code=1).num_passed == 1


@pytest.mark.parametrize(
    ("outcomes", "exit_code", "share", "all_passed"),
    [
        ({"a": Outcome.PASSED, "b": Outcome.FAILED, "c": Outcome.SKIPPED}, 1, 0.5, False),
        ({"a": Outcome.PASSED}, 0, 1.0, True),
        ({"a": Outcome.PASSED}, 3, 0.5, False),  # crashed after the last test
        ({}, 0, 1.0, True),
        ({}, 1, 0.0, False),
        ({}, None, 0.0, False),
    ],
)
def test_without_a_list_the_run_as_a_whole_counts(
    outcomes: dict[str, Outcome], exit_code: int | None, share: float, all_passed: bool
) -> None:
    graded = score([], outcomes, exit_code=exit_code)

    assert (graded.share, graded.all_passed) == (share, all_passed)

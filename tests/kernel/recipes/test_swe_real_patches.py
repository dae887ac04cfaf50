"""Diffs taken apart by file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.recipes.swe.real.patches import looks_like_patch, split_patch, touched_paths, without_paths

EDIT = "diff --git a/src/a.py b/src/a.py\nindex 1..2 100644\n--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-x\n+y\n"
NEW = "diff --git a/conftest.py b/conftest.py\nnew file mode 100644\n"
NEW += "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n"
EMPTY = "diff --git a/tests/b.py b/tests/b.py\nnew file mode 100644\nindex 0000000..e69de29\n"
RENAME = "diff --git a/old.py b/tests/new.py\nsimilarity index 100%\nrename from old.py\nrename to tests/new.py\n"
QUOTED = 'diff --git "a/\\303\\244.py" "b/\\303\\244.py"\n'
QUOTED += '--- "a/\\303\\244.py"\n+++ "b/\\303\\244.py"\n@@ -1 +1 @@\n-x\n+y\n'
PLAIN = "--- a/one.py\n+++ b/one.py\n@@ -1 +1 @@\n--- looks like a header\n+y\n"
PLAIN += "--- a/two.py\n+++ b/two.py\n@@ -1 +1 @@\n-x\n+y\n"


def test_every_kind_of_section_names_its_paths() -> None:
    sections = split_patch(EDIT + NEW + EMPTY + RENAME + QUOTED)

    assert [sorted(section.paths) for section in sections] == [
        ["src/a.py"],
        ["conftest.py"],
        ["tests/b.py"],
        ["old.py", "tests/new.py"],
        ["ä.py"],
    ]


def test_a_diff_without_git_headers() -> None:
    assert touched_paths(PLAIN) == {"one.py", "two.py"}


def test_protected_files_are_left_out_and_the_rest_is_untouched() -> None:
    rest, dropped = without_paths(EDIT + NEW + EMPTY + RENAME, ["conftest.py", "tests/*"])

    assert rest == EDIT
    assert dropped == ("conftest.py", "tests/b.py", "tests/new.py")


def test_a_pattern_without_a_folder_holds_everywhere() -> None:
    deep = NEW.replace("conftest.py", "a/b/conftest.py")

    assert without_paths(deep, ["conftest.py"]) == ("", ("a/b/conftest.py",))
    assert without_paths(deep + NEW, ["/conftest.py"]) == (deep, ("conftest.py",))


def test_prose_is_no_patch() -> None:
    assert not looks_like_patch("")
    assert not looks_like_patch("I changed a.py.\n--- see above\n")
    assert looks_like_patch("Here it is:\n" + EDIT)


@given(st.lists(st.sampled_from([EDIT, NEW, EMPTY, RENAME, QUOTED]), max_size=6))
def test_sections_joined_are_the_patch(parts: list[str]) -> None:
    patch = "".join(parts)

    assert "".join(section.text for section in split_patch(patch)) == patch


@given(st.text(alphabet='-+ ab/@\n"\\diffgit', max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    sections = split_patch(text)

    assert text.endswith("".join(section.text for section in sections))

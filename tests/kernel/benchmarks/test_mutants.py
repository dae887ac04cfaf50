"""Mutants of the kernels do not rot: what each changes still stands in the package, and stands there once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutants import Mutant, MutantError, kernels, mutants_of, mutated


@pytest.mark.parametrize("kernel", kernels())
def test_every_mutant_can_be_made(kernel: str) -> None:
    mutants = mutants_of(kernel)
    assert len(mutants) >= 10
    for mutant in mutants:
        assert mutant.path.startswith("seamless_verl/")
        assert mutant.what
        compile(mutated(mutant), mutant.path, "exec")


@pytest.mark.parametrize(
    ("old", "new", "story"),
    [("x = 2", "x = 3", "0 times"), ("x", "y", "2 times"), ("x = 1", "x = 1", "changes nothing")],
)
def test_a_mutant_whose_text_is_gone_or_not_unique_says_so(tmp_path: Path, old: str, new: str, story: str) -> None:
    (tmp_path / "m.py").write_text("x = 1\nprint(x)\n")
    with pytest.raises(MutantError, match=story):
        mutated(Mutant(path="m.py", old=old, new=new, what="a promise"), tmp_path)

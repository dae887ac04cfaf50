"""Whether the tests of a kernel notice when it is broken.

``benchmarks/mutants/NAME.json`` lists small changes of the package, each of which breaks a promise of kernel ``NAME``::

    {"path": "seamless_verl/NAME/file.py", "old": "a <= b", "new": "a < b", "what": "the promise that this breaks"}

Each is made alone in a copy of the package, and ``tests/kernel/NAME`` runs against that copy. A failing test catches
the mutant; if all pass, it survives and a test is missing. ``--quick`` takes the first two mutants of each kernel.

``recording`` is no kernel: its mutants break what leads from an engine's answer to a trained row, wherever that is, and
each names the ``tests`` that are to notice. With ``--audit``, `benchmarks.audit` is to notice them instead.

Before the mutants the tests must pass in the unchanged copy, and fail in one whose kernel cannot be imported: else it
would not be the copy that they test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from hypothesis import Phase, settings

from benchmarks.records import Record, arguments, report

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "benchmarks" / "mutants"
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "results")
_RECORDING = "recording"
_AUDIT = ("-m", "benchmarks.audit", "--turns", "900", "--until-broken")
_AUDITED = 20  # of the mutants that the audit is to find
_LIMIT_S = 1800  # for the tests of one kernel; a mutant that hangs is ended by pytest's own limit per test
_PASSED, _FAILED = 0, 1  # pytest's exit codes; any other means that the tests did not run


class Mutant(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One change. ``old`` stands exactly once in the file at ``path``; ``what`` says which promise is broken.

    ``tests``, separated by spaces, are run where those of the kernel would not notice.
    """

    path: str
    old: str
    new: str
    what: str
    tests: str = ""


class MutantError(Exception):
    """A mutant that cannot be made, or tests that do not tell whether they noticed it."""


def kernels() -> list[str]:
    """Kernels that have mutants."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def mutants_of(kernel: str) -> list[Mutant]:
    return msgspec.json.decode((_FOLDER / f"{kernel}.json").read_bytes(), type=list[Mutant])


def mutated(mutant: Mutant, root: Path = _ROOT) -> str:
    """The text of the mutant's file after the change.

    Raises:
        MutantError: the text to replace is not there, or stands there more than once.
    """
    path = root / mutant.path
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (count := text.count(mutant.old)) != 1:
        raise MutantError(f"{mutant.path} holds {mutant.old!r} {count} times, not once: write the mutant anew")
    if mutant.new == mutant.old:
        raise MutantError(f"{mutant.path}: the mutant of {mutant.old!r} changes nothing")
    return text.replace(mutant.old, mutant.new)


def pytest_configure() -> None:
    """pytest calls this where the module is its plugin: a failure counts here, its smallest example does not."""
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", settings.default, phases=phases, database=None)
    settings.load_profile("mutants")


def _tests_pass(kernel: str, copy: Path, changed: str = "", chosen: str = "") -> bool:
    """Whether the tests of a kernel pass in a copy; the same examples of Hypothesis each time.

    Args:
        changed: the module that was; its own tests run first, since they are the likeliest to fail.
        chosen: these tests instead.
    """
    tests = sorted((copy / "tests/kernel" / kernel).glob("test_*.py"), key=lambda path: path.stem != f"test_{changed}")
    command = ["-m", "pytest", *(chosen.split() or map(str, tests)), "-x", "-q", "-n", "0"]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.mutants", "--hypothesis-seed=0", "--timeout=300"]
    done = _python(copy, command)
    if done.returncode not in (_PASSED, _FAILED) or "ERROR collecting" in done.stdout:
        raise MutantError(f"the tests of {kernel} did not run:\n{done.stdout[-2000:]}")
    return done.returncode == _PASSED


def _python(copy: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def _is_clean(kernel: str, copy: Path, mutant: Mutant, *, audited: bool) -> bool:
    """Whether nothing is noticed of a mutant in its copy."""
    if not audited:
        return _tests_pass(kernel, copy, Path(mutant.path).stem, mutant.tests)
    return _python(copy, _AUDIT).returncode == 0


def _check_copy(kernel: str, copy: Path) -> None:
    """See the module's last paragraph."""
    if not _tests_pass(kernel, copy):
        raise MutantError(f"the tests of {kernel} fail without any mutant")
    start = copy / "seamless_verl" / kernel / "__init__.py"
    text = start.read_text(encoding="utf-8")
    start.write_text("raise RuntimeError('this is the copy')\n", encoding="utf-8")
    try:
        _tests_pass(kernel, copy)
    except MutantError as error:
        if "this is the copy" not in str(error):
            raise
    else:
        raise MutantError(f"the tests of {kernel} do not import the copy in {copy}")
    finally:
        start.write_text(text, encoding="utf-8")


def _survivors(kernel: str, mutants: list[Mutant], copy: Path, *, audited: bool) -> list[Mutant]:
    survivors = []
    for number, mutant in enumerate(mutants, start=1):
        path = copy / mutant.path
        text = path.read_text(encoding="utf-8")
        path.write_text(mutated(mutant, copy), encoding="utf-8")
        survived = _is_clean(kernel, copy, mutant, audited=audited)
        path.write_text(text, encoding="utf-8")
        if survived:
            survivors.append(mutant)
        verdict = "SURVIVED" if survived else "caught"
        print(f"{kernel} {number}/{len(mutants)} {verdict:<8} {mutant.path}: {mutant.what}", flush=True)
    return survivors


def _run(kernel: str, mutants: list[Mutant], *, audited: bool) -> Record:
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "copy")
        shutil.copytree(_ROOT, copy, ignore=_NOT_COPIED)
        if audited and _python(copy, _AUDIT).returncode:
            raise MutantError("the audit finds something without any mutant")
        if kernel != _RECORDING:
            _check_copy(kernel, copy)
        elif not audited and not _tests_pass(kernel, copy, chosen=" ".join({mutant.tests for mutant in mutants})):
            raise MutantError("the tests fail without any mutant")
        caught = len(mutants) - len(_survivors(kernel, mutants, copy, audited=audited))
    wanted = min(len(mutants), _AUDITED) if audited else len(mutants)
    return Record(
        name=f"mutants of {kernel} that {'the audit finds' if audited else 'its tests catch'}",
        value=caught,
        unit=f"of {len(mutants)}",
        bar=f">= {wanted}" if audited else "all",
        holds=caught >= wanted,
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", choices=kernels(), metavar="NAME", help="of this kernel only")
    parser.add_argument("--audit", action="store_true", help=f"let benchmarks.audit find those of {_RECORDING}")


def main() -> int:
    options = arguments(__doc__ or "", _options)
    names = [_RECORDING] if options.audit else [options.kernel] if options.kernel else kernels()
    chosen = {name: mutants_of(name) for name in names}
    for mutant in (mutant for mutants in chosen.values() for mutant in mutants):
        mutated(mutant)  # one that cannot be made is an error at once, not after minutes
    found = [
        _run(name, mutants[:2] if options.quick else mutants, audited=options.audit) for name, mutants in chosen.items()
    ]
    return report(found, options.json)


if __name__ == "__main__":
    sys.exit(main())

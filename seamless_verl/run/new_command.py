"""``seamless-verl new NAME``: a folder with a small task of one's own, ready to be tried and trained."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shutil
import sys
import tempfile
from pathlib import Path

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.places import is_own
from seamless_verl.run.compose import known

_TEMPLATE, _SUFFIX = Path(__file__).with_name("template"), ".template"
_NAME = "my_task"
"""What the template's files call the task."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="a Python package's name, for example my_task")
    command.set_defaults(run=new)


def new(parsed: argparse.Namespace) -> int:
    """Write the folder into the current one; 2 when it cannot be."""
    try:
        folder = write(parsed.name, Path.cwd())
    except SeamlessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {folder}: an agent, a reward, a data maker, a recipe, a test, a README. Next, from here:")
    print(f"  pytest {parsed.name}")
    print(f"  seamless-verl try {parsed.name}")
    print(f"  python -m seamless_verl.main --config-dir {parsed.name} +recipe={parsed.name}")
    return 0


def write(name: str, parent: Path) -> Path:
    """The new folder, below ``parent``; it appears whole or not at all.

    Raises:
        ConfigError: the name cannot be used, or the folder cannot be written.
    """
    _check_name(name)
    target = parent / name
    if target.exists():
        raise ConfigError("NAME", name, f"{target} exists", "choose another name, or remove it")
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
        for file, text in sorted(_files(name).items()):
            path = temporary / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError as error:
        raise ConfigError(
            "NAME", name, f"{target} cannot be written ({error})", "change to a folder of yours"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _files(name: str) -> dict[str, str]:
    """What is written, by path."""
    return {
        str(path.relative_to(_TEMPLATE)).removesuffix(_SUFFIX).replace(_NAME, name): path.read_text(
            encoding="utf-8"
        ).replace(_NAME, name)
        for path in _TEMPLATE.rglob(f"*{_SUFFIX}")
    }


def _check_name(name: str) -> None:
    """A package of that name must be importable, and the recipe's name free.

    Raises:
        ConfigError: it is not.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        near = re.sub(r"\W+", "_", name.strip().lower()).strip("_").lstrip("0123456789_")
        good = near if near and near.isascii() and not keyword.iskeyword(near) else _NAME
        problem = "is no name of a Python package in lower case"
        raise ConfigError("NAME", name, problem, f"letters, digits and _ only, for example {good}")
    if name in known("recipe"):
        raise ConfigError("NAME", name, "is a recipe of ours, which would hide yours", f"for example my_{name}")
    spec = importlib.util.find_spec(name)
    if name in sys.stdlib_module_names or (spec is not None and spec.origin and not is_own(spec.origin)):
        problem = "is an installed module, which would be imported instead of yours"
        raise ConfigError("NAME", name, problem, f"for example my_{name}")

"""Benchmarks and recipes run once in weeks: whatever they import of ours must be there, also what they import late."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FILES = sorted(path for folder in ("benchmarks", "recipes") for path in (_ROOT / folder).rglob("*.py"))
_PLACES = {"seamless_verl.recipes": "recipes", "seamless_verl.hydra_configs": "hydra_configs"}


def _file_of(module: str) -> Path | None:
    """Where a module of ours lies; None: there is none of that name."""
    for name, folder in _PLACES.items():
        if module == name or module.startswith(f"{name}."):
            module = folder + module.removeprefix(name)
    path = _ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@cache
def _names(file: Path) -> frozenset[str]:
    """What a module defines at its top, or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def _lacking(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [node.module]
        else:
            continue
        for module in modules:
            if module.partition(".")[0] not in ("seamless_verl", "benchmarks", "recipes", "tests"):
                continue
            found = _file_of(module)
            if found is None and not _ROOT.joinpath(*module.split(".")).is_dir():
                yield f"line {node.lineno}: {module}"
            elif isinstance(node, ast.ImportFrom):
                known = _names(found) if found is not None else frozenset()
                for alias in node.names:
                    if alias.name not in known and _file_of(f"{module}.{alias.name}") is None:
                        yield f"line {node.lineno}: {module}.{alias.name}"


@pytest.mark.parametrize("file", _FILES, ids=lambda file: str(file.relative_to(_ROOT)))
def test_what_is_imported_of_ours_is_there(file: Path) -> None:
    assert not list(_lacking(file))


def test_what_has_gone_is_found(tmp_path: Path) -> None:
    source = tmp_path / "late.py"
    source.write_text(
        "from seamless_verl.staleness.groups import GroupProgress, has_no_signal\n"
        "def main():\n    import seamless_verl.nowhere\n    from seamless_verl import errors, gone\n"
    )
    assert list(_lacking(source)) == [
        "line 1: seamless_verl.staleness.groups.has_no_signal",
        "line 3: seamless_verl.nowhere",
        "line 4: seamless_verl.gone",
    ]

"""Which of the names that we touch a checkout of verl still has, read from its source: nothing of it is imported.

    python -m tests.contract.moved PATH/TO/verl      # the folder that holds verl/trainer, verl/workers, …

So a version whose vLLM or torch is not installed here can be looked at, too. What it says of a name is where it was
looked for, what is there instead, and which of our files use it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

OURS = Path(__file__).resolve().parents[2] / "seamless_verl"
_BUILT_IN = ("__init__", "__ray_actor_class__")  # of every class, or of every actor
_EMPTY = ("ABC", "Enum", "Generic", "Protocol", "object")  # bases that bring no name of verl's


class Checkout:
    """The modules below the folder that holds the package ``verl``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cache  # noqa: B019 - one checkout per process
    def module(self, dotted: str) -> ast.Module | None:
        path = self.root / Path(*dotted.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"), str(file))
        return None

    def missing(self, name: str) -> str | None:
        """What of ``module:part.part`` is not there; None: all of it is."""
        dotted, _, path = name.partition(":")
        tree = self.module(dotted)
        if tree is None:
            return f"no module {dotted}{self._elsewhere(path.split('.')[0])}"
        first, *rest = path.split(".")
        found = self._top_level(dotted, first)
        if found is None:
            near = _near(first, _names(tree.body))
            return f"{dotted} has no {first}{near}{self._elsewhere(first)}"
        for part in rest:
            holder, node = found
            if not isinstance(node, ast.ClassDef) or part in _BUILT_IN:
                continue  # of an object or another package: only importing it would tell
            member = self._member(holder, node, part)
            if member is None:
                return f"{dotted}:{first} has no {part}{_near(part, _names(node.body))}"
            found = member
        return None

    def _top_level(self, dotted: str, name: str) -> tuple[str, ast.AST] | None:
        """A definition, with the module that holds it; imports within the checkout are followed."""
        tree = self.module(dotted)
        for node in _flat(tree.body) if tree else ():
            if name in _bound(node):
                if isinstance(node, ast.ImportFrom):
                    return self._imported(dotted, node, name) or (dotted, node)
                return dotted, node
        return None

    def _imported(self, dotted: str, node: ast.ImportFrom, name: str) -> tuple[str, ast.AST] | None:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        package = dotted.split(".")
        if node.level:
            is_package = (self.root / Path(*package) / "__init__.py").is_file()
            package = package[: len(package) - node.level + is_package]
        target = ".".join([*(package if node.level else []), *([node.module] if node.module else [])])
        return self._top_level(target, original) if self.module(target) else None

    def _member(self, dotted: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        for statement in _flat(node.body):
            if name in _bound(statement):
                return dotted, statement
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in _EMPTY:
                continue
            found = self._top_level(dotted, base.id) if isinstance(base, ast.Name) else None
            if found is None or not isinstance(found[1], ast.ClassDef):
                return dotted, node  # a base of another package, or one made on the spot: it may have it
            inherited = self._member(found[0], found[1], name)
            if inherited is not None:
                return inherited
        return None

    def _elsewhere(self, name: str) -> str:
        pattern = re.compile(rf"^(class|def|async def) {re.escape(name)}\b|^{re.escape(name)}\b.* = ", re.MULTILINE)
        files = sorted((self.root / "verl").rglob("*.py"))
        places = [str(f.relative_to(self.root)) for f in files if pattern.search(f.read_text(encoding="utf-8"))]
        return f"; defined in {', '.join(places[:3])}" if places else ""


def users(name: str) -> list[str]:
    """Files of ours that say the last part of a name, as far as they also say where it is from."""
    *outer, last = re.split(r"[.:]", name)
    last = outer[-1] if last in _BUILT_IN else last
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(OURS.rglob("*.py"))}
    using = [file for file, text in texts.items() if re.search(rf"\b{re.escape(last)}\b", text)]
    hints = [part for part in outer if part not in ("verl", "trainer", "workers", "rollout", "utils", "experimental")]
    close = [file for file in using if any(re.search(rf"\b{re.escape(hint)}\b", texts[file]) for hint in hints)]
    return [str(file.relative_to(OURS.parent)) for file in close or using]


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with those of ``if`` and ``try``."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                for inner in getattr(node, field, []):
                    yield from _flat(inner.body) if isinstance(inner, ast.ExceptHandler) else _flat([inner])


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _names(body: list[ast.stmt]) -> list[str]:
    return [name for node in _flat(body) for name in _bound(node)]


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (it has {near[0]})" if near else ""


def main(folder: str) -> int:
    from tests.contract.test_verl_contract import NAMES, ONLY_READ

    names = [name for name in (*NAMES, *ONLY_READ) if name.startswith("verl.")]
    checkout = Checkout(Path(folder))
    if checkout.module("verl") is None:
        sys.stderr.write(f"{folder}: no folder verl with an __init__.py in it\n")
        return 2
    gone = {name: story for name in names if (story := checkout.missing(name)) is not None}
    for story, name in sorted((story, name) for name, story in gone.items()):
        sys.stdout.write(f"{name}\n    {story}\n    used in {', '.join(users(name)) or 'no file by that word'}\n")
    sys.stdout.write(f"{len(names) - len(gone)} of {len(names)} names are there\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)

"""What is installed is what is here: a package that setup.cfg forgets is missing in the wheel and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = {
    "seamless_verl": "seamless_verl",
    "recipes": "seamless_verl/recipes",
    "hydra_configs": "seamless_verl/hydra_configs",
}
LEFT_OUT = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in PLACES:
        shutil.copytree(ROOT / name, tree / name, ignore=_not_ours)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=tree, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {
        f"{place}/{file.relative_to(tree / name)}"
        for name, place in PLACES.items()
        for file in (tree / name).rglob("*")
        if file.is_file() and file.parts[len(tree.parts)] == name
    }
    assert packed == {name for name in here if not name.endswith(".md")}


def _not_ours(folder: str, names: list[str]) -> set[str]:
    """Caches, and the links by which a checkout is one package."""
    return {name for name in names if name in LEFT_OUT or (Path(folder) / name).is_symlink()}

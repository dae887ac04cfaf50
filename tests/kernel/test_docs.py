"""Files, links, headings and modules that the pages name exist; the page of keys says what `config` says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from seamless_verl.config import SeamlessConfig
from seamless_verl.run.compose import our_config_dir
from tests import configuration_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Paths may be written from the root, from the package or from the page's own folder.
BASES = (ROOT, ROOT / "examples", ROOT / "seamless_verl", ROOT / "tests")
# What a page shows of a run folder, of another project or of another time is not here.
ELSEWHERE = re.compile(r"RUN/|runs/|verl/|proxy/ID|rows/|logs/|/|flight/|checkpoints/|signals/")
FOLDERS = ("benchmarks", "examples", "recipes", "seamless_verl", "tests")
EXAMPLES = {"tests/test_a.py", "benchmarks/mutants/NAME.json", "conf/recipe/mine.yaml", "usercustomize.py"}
OURS = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
HISTORY = {ROOT / "CHANGELOG.md"}


def named_paths(text: str) -> set[str]:
    words = re.findall(r"`([\w./-]+/[\w.-]*)(?:::\w+)?`", text)
    return {
        word for word in words if not ELSEWHERE.match(word) and re.search(r"(\.(py|md|yaml|toml|json|cfg)|/)$", word)
    }


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page in HISTORY:
        return
    gone = {word for word in named_paths(text) if not any((base / word).exists() for base in (*BASES, page.parent))}
    assert not gone - EXAMPLES
    bare = set(re.findall(r"`(\w+\.py)(?:::\w+)?`", text))
    assert not bare - OURS - EXAMPLES
    modules = set(re.findall(r"\b(?:seamless_verl|benchmarks|tests)(?:\.\w+)+", text))
    assert not {name for name in modules if not is_module(name)}


def is_module(name: str) -> bool:
    """Whether a dotted name is a package, a module, or something in a module; recipes and configurations lie beside the
    package."""
    path = ROOT / re.sub(r"^seamless_verl\.(recipes|hydra_configs)\b", r"\1", name).replace(".", "/")
    return path.is_dir() or any(place.with_suffix(".py").is_file() for place in (path, path.parent, path.parent.parent))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_overrides_of_the_commands_that_a_page_shows_are_hydras_grammar(page: Path) -> None:
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    words = [word for block in blocks if "seamless_verl.main" in block for word in shlex.split(block, comments=True)]
    overrides = [word for word in words if re.match(r"[+~]*[a-z][\w./]*=", word)]
    OverridesParser.create().parse_overrides(overrides)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not heading or heading in headings(file), target


def headings(file: Path) -> set[str]:
    """As GitHub names them."""
    lines = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    shown = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line).lower() for line in lines]
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in shown}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page})" not in index}


def test_the_page_of_keys_is_what_make_docs_writes() -> None:
    assert configuration_page.PAGE.read_text(encoding="utf-8") == configuration_page.page()


def test_the_defaults_that_hydra_composes_are_those_of_the_dataclasses() -> None:
    file = our_config_dir() / "seamless" / "default.yaml"
    section = yaml.safe_load(file.read_text(encoding="utf-8"))["seamless"]
    del section["run_dir"]  # Hydra's own folder
    assert SeamlessConfig.from_mapping(section) == SeamlessConfig()


def test_every_key_is_described_and_can_be_set_without_a_plus() -> None:
    composed = yaml.safe_load((our_config_dir() / "seamless" / "default.yaml").read_text(encoding="utf-8"))["seamless"]
    page = configuration_page.page()
    for path, cls in configuration_page.sections(SeamlessConfig, "seamless"):
        if "[]" in path:
            continue
        section = composed
        for name in path.split(".")[1:]:
            section = section[name]
        assert set(section) == set(cls.__dataclass_fields__)
        assert f"## `{path}`" in page

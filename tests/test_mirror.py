"""The tests mirror the product: their folders, and the places of tests with a module's name. Named test files exist."""

import re
from pathlib import Path

import pytest

from tests.conftest import SLOW, WITH_TRANSFORMERS
from tests.gateway.conftest import ON_UVLOOP

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "engine", "adapters", "kernels", "wire", "loraplex")
# A folder with as many modules has a test folder. Smaller ones may be tested through their neighbours.
MANY_MODULES = 3


def modules(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"]


def folders(root: Path) -> list[Path]:
    """Return the folder and all below it that have Python files, relative to the folder's parent."""
    every = [root, *(path for path in root.rglob("*") if path.is_dir())]
    return [path.relative_to(root.parent) for path in every if list(path.glob("*.py"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_test_folder_is_a_folder_of_the_product(package):
    found = folders(ROOT / "tests" / package)
    assert found
    assert not [str(folder) for folder in found if not list((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_of_several_modules_has_tests(package):
    large = [folder for folder in folders(ROOT / package) if len(modules(ROOT / folder)) >= MANY_MODULES]
    assert large
    assert not [str(folder) for folder in large if not list((ROOT / "tests" / folder).glob("test_*.py"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_test_with_the_name_of_a_single_module_lies_in_its_folder(package):
    """A name that several modules have, or one beside the test, tells nothing of another folder."""
    homes: dict[str, set[Path]] = {}
    for folder in folders(ROOT / package):
        for path in modules(ROOT / folder):
            homes.setdefault(path.stem, set()).add(folder)
    found = {}
    for path in sorted((ROOT / "tests" / package).rglob("test_*.py")):
        here = path.parent.relative_to(ROOT / "tests")
        home = homes.get(path.stem.removeprefix("test_"), set())
        if len(home) == 1 and here not in home:
            found[str(path.relative_to(ROOT))] = f"the module is in {home.pop()}"
    assert not found


def test_files_that_the_fixtures_list_exist():
    """A moved file would lose its place in the order, its process or its event loop without a word."""
    listed = {*(f"tests/{name}" for name in SLOW), *WITH_TRANSFORMERS}
    assert not [name for name in listed if not (ROOT / name).is_file()]
    assert {path.stem for path in (ROOT / "tests" / "gateway").rglob("test_*.py")} >= ON_UVLOOP


def test_files_that_the_documents_name_exist():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {name for path in documents for name in re.findall(r"(?<![\w/.])tests/[\w/]+\.py\b", path.read_text())}
    assert len(named) > 50
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]

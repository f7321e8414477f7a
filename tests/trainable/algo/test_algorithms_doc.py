"""docs/algorithms.md has an entry for every public function of trainable/algo and names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
MODULES = sorted(path for path in (ROOT / "trainable" / "algo").glob("*.py") if path.stem != "__init__")
FUNCTION, CLASS = ast.FunctionDef, ast.ClassDef


def list_definitions(path: Path, *kinds: type) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, kinds)}  # type: ignore[attr-defined]


def list_public_names(*kinds: type) -> set[str]:
    """List `module.name` of each public definition of these kinds."""
    names = {(path.stem, name) for path in MODULES for name in list_definitions(path, *kinds)}
    return {f"{module}.{name}" for module, name in names if not name.startswith("_")}


def read_entries() -> dict[str, str]:
    """Read the body of each entry, by its `module.name` heading."""
    pieces = re.split(r"^### `([\w.]+)`$", DOC, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def test_every_public_function_has_an_entry_and_every_entry_is_a_public_name() -> None:
    assert list_public_names(FUNCTION) <= set(read_entries()) <= list_public_names(FUNCTION, CLASS)


@pytest.mark.parametrize("name", read_entries())
def test_every_entry_names_tests_that_exist(name: str) -> None:
    test_ids = re.findall(r"`(test_\w+\.py)::(test_\w+)`", read_entries()[name])
    assert test_ids
    for file, test in test_ids:
        assert test in list_definitions(Path(__file__).parent / file, FUNCTION)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_algo_imports_only_torch_and_the_standard_library(path: Path) -> None:
    allowed = {"torch", "typing", "dataclasses", "collections", "math", "trainable"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= allowed
    assert all(name.startswith("trainable.algo.") for name in imported if name.startswith("trainable"))

"""Each public function of trainable/algo has an entry in docs/algorithms.md that names tests, and a running example."""

import ast
import doctest
import importlib
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


def has_public_method(path: Path, name: str) -> bool:
    """Whether a function or class is a function, or has a public method other than a property."""
    (node,) = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if getattr(node, "name", "") == name)
    methods = [item for item in node.body if isinstance(item, FUNCTION)]  # type: ignore[attr-defined]
    is_public = any(not method.name.startswith("_") and not method.decorator_list for method in methods)
    return isinstance(node, FUNCTION) or is_public


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_public_function_has_an_example_and_examples_give_what_they_show(path: Path) -> None:
    module = importlib.import_module(f"trainable.algo.{path.stem}")
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
    for name in list_definitions(path, FUNCTION, CLASS):
        if not name.startswith("_") and has_public_method(path, name):
            text = getattr(module, name).__doc__
            examples = doctest.DocTestParser().get_examples(text)
            assert any(name in example.source for example in examples), (
                f"{path.stem}.{name} has no example that uses it"
            )
            assert any(example.want for example in examples), f"the examples of {path.stem}.{name} show no result"
            assert "\n    Example:\n" in text

"""Every public function of trainable/algo has a worked example in its docstring, and every example runs correctly."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "trainable" / "algo"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def list_public_functions(module: str) -> list[str]:
    """List the functions of the module, and its classes that have a public method other than a property."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) or has_public_method(node)]
    return [name for name in names if not name.startswith("_")]


def has_public_method(node: ast.stmt) -> bool:
    methods = [item for item in getattr(node, "body", ()) if isinstance(item, ast.FunctionDef)]
    return isinstance(node, ast.ClassDef) and any(
        not method.name.startswith("_") and not method.decorator_list for method in methods
    )


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_the_results_that_they_show(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"trainable.algo.{module}"))
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_has_an_example(module: str) -> None:
    functions = importlib.import_module(f"trainable.algo.{module}")
    for name in list_public_functions(module):
        text = getattr(functions, name).__doc__
        examples = doctest.DocTestParser().get_examples(text)
        assert any(name in example.source for example in examples), f"{module}.{name} has no example that uses it"
        assert any(example.want for example in examples), f"the examples of {module}.{name} show no result"
        assert "\n    Example:\n" in text


def test_search_for_public_functions_is_not_blind() -> None:
    assert {"apply_kl_penalty", "adapt_kl_coef"} < set(list_public_functions("losses"))
    assert sum(len(list_public_functions(module)) for module in MODULES) > 40

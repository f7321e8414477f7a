"""Look up the function of every update rule from the records of `trainable.sandbox.config.rules`."""

from importlib import import_module

from trainable.sandbox.config.rules import RULES
from trainable.sandbox.rules.rule import UpdateRule


def load_formula(formula: str) -> UpdateRule:
    """The function `<module>.<function>` of this folder that a record names.

    Raises ModuleNotFoundError or AttributeError if the module or the function does not exist.
    """
    module, _, name = formula.rpartition(".")
    function: UpdateRule = getattr(import_module(f"trainable.sandbox.rules.{module}"), name)
    return function


UPDATE_RULES: dict[str, UpdateRule] = {name: load_formula(rule.formula) for name, rule in RULES.items()}

"""The function of every update rule by name, from the records of `trainable.sandbox.config.rules`."""

from importlib import import_module

from trainable.sandbox.config.rules import RULES
from trainable.sandbox.rules.rule import UpdateRule


def load_formula(formula: str) -> UpdateRule:
    """The function that a record names as `<module>.<function>` of this folder.

    ModuleNotFoundError or AttributeError: there is no such module, or no such function in it.
    """
    module, _, name = formula.rpartition(".")
    function: UpdateRule = getattr(import_module(f"trainable.sandbox.rules.{module}"), name)
    return function


UPDATE_RULES: dict[str, UpdateRule] = {name: load_formula(rule.formula) for name, rule in RULES.items()}

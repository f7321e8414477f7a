"""Look up the function of every update rule from the records of `sandboxes.update_rules.config.rules`."""

from importlib import import_module

from sandboxes.update_rules.config.rules import RULES
from sandboxes.update_rules.rules.rule import UpdateRule


def load_formula(formula: str) -> UpdateRule:
    """The function `<module>.<function>` of this folder that a record names.

    Raises ModuleNotFoundError or AttributeError if the module or the function does not exist.
    """
    module, _, name = formula.rpartition(".")
    function: UpdateRule = getattr(import_module(f"sandboxes.update_rules.rules.{module}"), name)
    return function


UPDATE_RULES: dict[str, UpdateRule] = {name: load_formula(rule.formula) for name, rule in RULES.items()}

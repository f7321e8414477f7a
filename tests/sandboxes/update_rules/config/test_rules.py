"""Tests of the records of the update rules: their formulas, and that no other code names a rule."""

import inspect
from importlib import import_module

from sandboxes.update_rules.config.rules import METHODS, RULES
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.rule import RuleLoss
from sandboxes.update_rules.training.make import UPDATE_RULES

FORMULAS = ("delight", "grouped", "policy_gradient", "target_policy", "token_credit")


def test_every_function_that_is_a_rule_has_a_record_and_a_configuration_that_of_its_method() -> None:
    """Each function has exactly one record, except for DAPO, with two names, and DG, of which two vary the batch."""
    functions = set()
    for module in FORMULAS:
        for function in vars(import_module(f"sandboxes.update_rules.rules.{module}")).values():
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                signature = inspect.signature(function)
                is_rule = list(signature.parameters) == ["rollouts", "log_probs", "config"]
                if is_rule and signature.return_annotation is RuleLoss:
                    functions.add(function)
    assert set(UPDATE_RULES.values()) == functions
    assert len(functions) == len(METHODS) - 3
    assert UPDATE_RULES["DAPO"] is UPDATE_RULES["DAPOLite"]
    assert UPDATE_RULES["DG"] is UPDATE_RULES["ReplayDG"] is UPDATE_RULES["Kondo"]
    config = UpdateRuleConfig.model_validate({"method": "GRPO"})
    assert config.rule is RULES["GRPO"]
    assert "rule" not in config.model_dump()

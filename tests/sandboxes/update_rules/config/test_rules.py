"""Tests of the records of the update rules: their properties and formulas, and that no other code names a rule."""

import ast
import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from sandboxes.update_rules.config.rules import METHODS, RULES, Rule
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.rule import RuleLoss
from sandboxes.update_rules.training.make import UPDATE_RULES
from tests.oracles.update_rules import CANDIDATE, CLIPPED, DELIGHT, GROUPED, SEQUENCE_ONLY, TARGET

ROOT = Path(__file__).parents[4]
FORMULAS = ("delight", "grouped", "policy_gradient", "target_policy", "token_credit")

PROPERTIES: dict[tuple[str, object], tuple[str, ...]] = {
    ("has_groups", True): GROUPED,
    ("has_candidates", True): CANDIDATE,
    ("is_teacher_forced", True): ("CE",),
    ("screens_batch", True): ("Kondo",),
    ("needs_replay", True): ("ReplayDG",),
    ("discounts_age", True): ("FreshDG",),
    ("on_policy_rule", "DG"): ("ReplayDG", "FreshDG"),
    ("temperature", "gate"): DELIGHT,
    ("temperature", "target"): TARGET,
    ("temperature", "regression"): ("PMDMean",),
    ("clip", "clip_high"): ("ASPO", "DAPO", "DAPOLite"),
    ("clip", "clip_low"): tuple(name for name in CLIPPED if name not in ("ASPO", "DAPO", "DAPOLite")),
    ("needs_token_labels", True): SEQUENCE_ONLY,
    ("needs_token_rewards", True): (*CANDIDATE, "DGToken"),
    ("needs_one_action", True): ("LogGrowth",),
    ("needs_all_actions", True): ("TPOFullAction",),
    ("needs_success_rate", True): ("MaxRL",),
    ("needs_noise_free_rewards", True): ("LogGrowth", "MaxRL", "TPOFullAction"),
    ("needs_kl_free_rewards", True): ("LogGrowth", "DAPO", "DAPOLite"),
}


@pytest.mark.parametrize(("name", "value"), PROPERTIES, ids=str)
def test_the_rules_of_a_property(name: str, value: object) -> None:
    methods = {method for method, rule in RULES.items() if getattr(rule, name) == value}
    assert methods == set(PROPERTIES[name, value])


def test_no_property_is_without_a_rule_and_a_test() -> None:
    # The settings that a rule reads are tested with all others: tests/trainable/config/test_conditions.py.
    names = {field.name for field in fields(Rule)} - {"formula", "settings"}
    assert {name for name, _ in PROPERTIES} == names
    values = {(name, getattr(rule, name)) for rule in RULES.values() for name in names}
    assert {(name, value) for name, value in values if value not in (False, None)} == set(PROPERTIES)


def test_a_configuration_has_the_record_of_its_method() -> None:
    config = UpdateRuleConfig.model_validate({"method": "GRPO"})
    assert config.rule is RULES["GRPO"]
    assert "rule" not in config.model_dump()


def test_every_function_that_is_a_rule_has_a_record() -> None:
    """Each function has exactly one record, except for DAPO, which has two names."""
    functions = set()
    for module in FORMULAS:
        for function in vars(import_module(f"sandboxes.update_rules.rules.{module}")).values():
            if inspect.isfunction(function) and not function.__name__.startswith("_"):
                signature = inspect.signature(function)
                is_rule = list(signature.parameters) == ["rollouts", "log_probs", "config"]
                if is_rule and signature.return_annotation is RuleLoss:
                    functions.add(function)
    assert set(UPDATE_RULES.values()) == functions
    assert len(functions) == len(METHODS) - 1
    assert UPDATE_RULES["DAPO"] is UPDATE_RULES["DAPOLite"]


def read_strings(path: Path) -> set[str]:
    """Return the strings of a source file that are single constants."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.long
@pytest.mark.parametrize("package", ["trainable", "tune_study"])
def test_names_of_rules_are_only_in_the_records(package: str) -> None:
    """Studies in `search_spaces` and published results in `analysis` may name rules, as they are data."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if path != ROOT / "sandboxes/update_rules/config/rules.py":
            assert not read_strings(path) & set(METHODS), path

"""Which combinations of KL coefficient, entropy coefficient, reward filter and KL loss keep training stable?"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from search_spaces.declaration.study import Axis, NameTemplates, Study
from search_spaces.language_model.family import PPO
from trainable.config.choices import FILTER_STRATEGIES
from trainable.config.run_config import RunConfig
from trainable.families import Settings

COEFFICIENTS = ("0.001", "0.003", "0.01", "0.03")
FILTER_FRACTIONS = {"topk100": 1.0, "topk80": 0.8, "topk60": 0.6, "topk40": 0.4}
"""Fraction of groups that a filter keeps, by its published name; the same under every strategy."""

KL_TYPES = ("low_var_kl", "kl", "mse")

GROUPS = ("1", "2", "3", "4", "5")
GROUPS_BY_KL_TYPE = {"kl": ("1", "4", "5"), "mse": ("1", "4", "5"), "low_var_kl": GROUPS}
"""The groups of each KL loss, in the published order. Groups 2 and 3 have no KL loss and run once."""

_ZERO_COEFS = ("0",)


class GridGroup(NamedTuple):
    """One group of the grid."""

    filters: Mapping[str, float]
    """Fraction of groups that each filter keeps, by the filter's name."""
    kl_coefs: tuple[str, ...]
    """Coefficients of the KL loss; "0" turns it off."""
    entropy_coefs: tuple[str, ...]
    """Coefficients of the entropy bonus."""
    zero_task_advantage: bool = False
    """Whether task advantages are set to 0, so that only the regularizers train."""
    prefix: str = ""
    """Prefix of the filter's name in the names of the group's runs."""


GRID_GROUPS: dict[str, GridGroup] = {
    "1": GridGroup(FILTER_FRACTIONS, COEFFICIENTS, _ZERO_COEFS),
    "2": GridGroup(FILTER_FRACTIONS, _ZERO_COEFS, COEFFICIENTS),
    "3": GridGroup(FILTER_FRACTIONS, _ZERO_COEFS, _ZERO_COEFS),
    "4": GridGroup({"topk100": 1.0}, COEFFICIENTS, COEFFICIENTS, zero_task_advantage=True, prefix="ta-"),
    "5": GridGroup({"nofilter": 1.0}, COEFFICIENTS, COEFFICIENTS),
}


def make_arms(group: str, kl_type: str) -> dict[str, Settings]:
    """Make the arms of a group by their published names, without the collapse tag ({collapse} of `NameTemplates`)."""
    grid_group = GRID_GROUPS[group]
    settings_by_arm: dict[str, Settings] = {}
    for (name, fraction), kl_coef, entropy_coef in itertools.product(
        grid_group.filters.items(), grid_group.kl_coefs, grid_group.entropy_coefs
    ):
        label = f"kl{kl_coef.replace('.', '')}-ent{entropy_coef.replace('.', '')}-{kl_type}"
        settings = {
            "filter.rollout_filter_value": fraction,
            "actor.use_kl_loss": kl_coef != "0",
            "actor.kl_loss_coef": float(kl_coef),
            "actor.kl_loss_type": kl_type,
            "actor.entropy_coeff": float(entropy_coef),
            "algorithm.zero_task_advantage": grid_group.zero_task_advantage,
        }
        settings_by_arm[f"g{group}-smoke-ppo-sokoban-{grid_group.prefix}{name}-{label}"] = MappingProxyType(settings)
    return settings_by_arm


def convert_to_group_count(settings: Settings, base: RunConfig) -> Settings:
    """Convert the fraction of groups to a count if the strategy takes a count: max(1, int(fraction * groups)).

    At least 1, because a filter that keeps no group would leave nothing to train on.
    """
    if not FILTER_STRATEGIES[base.filter.rollout_filter_strategy].counts_groups:
        return settings
    fraction = float(str(settings["filter.rollout_filter_value"]))
    return {**settings, "filter.rollout_filter_value": max(1, int(fraction * base.env.env_groups))}


_ARMS = {(group, kl_type): make_arms(group, kl_type) for group in GROUPS for kl_type in KL_TYPES}

_FIXED_SETTINGS: Settings = MappingProxyType(
    {
        "algorithm.adv_estimator": "gae",
        "actor.filter_loss_scaling": "sqrt",
        "filter.rollout_filter_strategy": "top_p",
        "env.env_groups": 8,
        "env.group_size": 16,
        "trainer.total_training_steps": 50,
        "trainer.test_freq": 10,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "collapse_detection.first_turn_enabled": True,
        "collapse_detection.multi_turn_enabled": True,
        "collapse_detection.num_samples": 64,
    }
)


def _make_study(name: str, question: str, kl_types: Mapping[str, tuple[str, ...]], loss_tag: str) -> Study:
    """Make a study over groups of the grid.

    name, question: of the study. kl_types: for each KL loss, the groups of the grid that use it. loss_tag: stands for
    the KL losses in the study's file names.
    """
    pairs = [(group, kl_type) for kl_type, groups in kl_types.items() for group in groups]
    # Each arm sets a KL loss, but the base configuration's completes the name of the baseline, an arm of group 3. In
    # the published order, group 3 runs under the last loss.
    kl_type = pairs[-1][1]
    return Study(
        name=name,
        family=PPO,
        game="sokoban",
        question=question,
        axis=Axis(
            setting="KL and entropy coefficients, filter",
            option="--groups",
            grids=dict.fromkeys(("paper", "laptop"), tuple(arm for pair in pairs for arm in _ARMS[pair])),
            named_settings={arm: settings for arms in _ARMS.values() for arm, settings in arms.items()},
            value_groups={
                group: tuple(arm for pair in pairs if pair[0] == group for arm in _ARMS[pair]) for group in GROUPS
            },
            adapt=convert_to_group_count,
        ),
        fixed_settings={**_FIXED_SETTINGS, "actor.kl_loss_type": kl_type},
        presets={"paper": {"model.path": "Qwen/Qwen2.5-3B-Instruct"}},
        n_seeds=1,
        baseline_seeds=5,
        strategy_aliases={"top_k": "top_k_abs"},  # the published top_k takes a count of groups
        baseline="g3-smoke-ppo-sokoban-topk100-kl0-ent0-{kl_type}",
        published_templates=NameTemplates(
            run=f"smoke_test_{{strategy}}_{{size}}_{loss_tag}_{{collapse}}",
            experiment="{arm}-{collapse}",
            title="KL/Entropy Smoke Test",
            summary=(
                "{experiment} | filter={share} | kl={kl} | entropy={entropy} | "
                "collapse=first:{first},multi:{multi},samples:{samples}"
            ),
            wandb_project="ragen-smoke_test_{strategy}",
            log="smoke_test_{strategy}_details/{experiment}.log",
            summary_log=f"smoke_test_{{strategy}}/smoke_test_results_{{size}}_{loss_tag}_{{collapse}}.log",
            summary_times=("train", "eval", "collapse", "collapse_first", "collapse_multi", "total"),
        ),
    )


_VARIANTS = {kl_type: _make_study("smoke", __doc__, {kl_type: GROUPS}, "{kl_type}") for kl_type in KL_TYPES}

SMOKE_STUDY = replace(_VARIANTS[KL_TYPES[0]], variants=_VARIANTS, variant_setting="actor.kl_loss_type")
"""The five groups under one KL loss: 68 runs."""

SMOKE_ALL_STUDY = _make_study(
    "smoke-all",
    "Does the KL loss (low_var_kl, kl or mse) change which combinations of coefficients and filter train stably?",
    GROUPS_BY_KL_TYPE,
    "all",
)
"""The groups that depend on the KL loss under each of them, the others once: 164 runs."""

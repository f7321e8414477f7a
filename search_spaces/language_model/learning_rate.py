"""At which learning rate does training break, how wide is the safe band, and how far does a KL penalty move the edge?

The arms cross the learning rate of the policy, over a decade and a half, with the coefficient of the KL loss (0 and
0.1) and with the advantage estimator (PPO with a critic, GRPO without one). They differ in nothing else: the critic
keeps the preset's learning rate, and GRPO uses PPO's loss aggregation.
"""

import itertools

from search_spaces.declaration.study import Axis, Contrasts, Study
from search_spaces.language_model.common import PLAIN_SETTINGS, make_sweep_templates
from search_spaces.language_model.family import PPO
from trainable.families import Settings

RATES: dict[str, tuple[str, ...]] = {
    # sokoban-tiny learns at 3e-4 and collapses at 3e-3 without a KL loss, so rates are denser there.
    "laptop": ("1e-4", "3e-4", "1e-3", "1.7e-3", "3e-3"),
    # The published rate is 1e-6.
    "paper": ("1e-7", "3e-7", "1e-6", "1.7e-6", "3e-6"),
}
"""Learning rates of the policy under each preset, as they are typed."""

ESTIMATORS: dict[str, str] = {"ppo": "gae", "grpo": "grpo"}
"""Advantage estimators by the name of the algorithm."""

KL_COEFFICIENTS = ("0", "0.1")


def _name_arm(algorithm: str, coefficient: str, rate: str) -> str:
    return f"{algorithm}-kl{coefficient}-lr{rate}"


_ARMS_BY_PRESET: dict[str, dict[str, Settings]] = {
    preset: {
        _name_arm(algorithm, coefficient, rate): {
            "actor.lr": float(rate),
            "actor.use_kl_loss": coefficient != "0",
            "actor.kl_loss_coef": float(coefficient),
            "algorithm.adv_estimator": estimator,
        }
        for (algorithm, estimator), coefficient, rate in itertools.product(ESTIMATORS.items(), KL_COEFFICIENTS, rates)
    }
    for preset, rates in RATES.items()
}
_ALL_RATES = tuple(rate for rates in RATES.values() for rate in rates)

# All pairs are listed; a study uses the pairs of its preset, since other rates have no runs.
CONTRASTS: Contrasts = {
    **{
        f"KL 0.1 against KL 0, {algorithm.upper()}": tuple(
            (_name_arm(algorithm, "0.1", rate), _name_arm(algorithm, "0", rate)) for rate in _ALL_RATES
        )
        for algorithm in ESTIMATORS
    },
    **{
        f"GRPO against PPO, KL {coefficient}": tuple(
            (_name_arm("grpo", coefficient, rate), _name_arm("ppo", coefficient, rate)) for rate in _ALL_RATES
        )
        for coefficient in KL_COEFFICIENTS
    },
}

STUDY = Study(
    name="learning-rate",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=Axis(
        setting="learning rate x KL coefficient x advantage estimator",
        option="--arms",
        grids={preset: tuple(arms) for preset, arms in _ARMS_BY_PRESET.items()},
        named_settings={name: settings for arms in _ARMS_BY_PRESET.values() for name, settings in arms.items()},
        dose="actor.lr",
    ),
    fixed_settings=PLAIN_SETTINGS,
    # The arms set their rates themselves, so a preset's rate serves only to name the baseline.
    presets={"stress": {"actor.lr": PPO.presets["laptop"].settings["actor.lr"]}},
    n_seeds=3,
    baseline="ppo-kl0-lr{lr}",
    contrasts=CONTRASTS,
    published_templates=make_sweep_templates("learning_rate", "Learning Rate", "ragen_learning_rate"),
)

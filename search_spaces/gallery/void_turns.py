"""What should a reply without a valid action cost: a penalty, its episode, its own tokens, or nothing?

The arms change the penalty of a turn without a valid action, or keep the preset's and leave such an episode, or such a
turn, out of the loss. Each is tried under PPO with a critic and under GRPO, whose learning rate is 0.85 times the
preset's, as in the study remedies. Under the preset `stress` a rising share of such turns announces most collapses.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.gallery.remedies import ALGORITHMS
from search_spaces.language_model.common import PLAIN_SETTINGS, Times, resolve_settings
from search_spaces.language_model.family import PPO
from trainable.families import Settings

TREATMENTS: dict[str, Settings] = {
    "penalty-0.1": {},
    "no-penalty": {"env.format_penalty": 0.0},
    "penalty-0.5": {"env.format_penalty": -0.5},
    "penalty-1": {"env.format_penalty": -1.0},
    "masked-episode": {"filter.mask_void_turns": True},
    "masked-turn": {"filter.mask_void_turns": True, "filter.mask_only_void_turns": True},
}
BASELINE = "penalty-0.1"

_ARMS: dict[str, Settings] = {
    f"{algorithm}-{name}": {
        "env.format_penalty": -0.1,
        **treatment,
        "algorithm.adv_estimator": estimator,
        "actor.lr": Times(factor),
    }
    for algorithm, (estimator, factor) in ALGORITHMS.items()
    for name, treatment in TREATMENTS.items()
}

CONTRASTS: Contrasts = {
    f"{name} against a penalty of 0.1, {algorithm.upper()}": ((f"{algorithm}-{name}", f"{algorithm}-{BASELINE}"),)
    for algorithm in ALGORITHMS
    for name in TREATMENTS
    if name != BASELINE
}

STUDY = Study(
    name="void-turns",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("algorithm x treatment of turns without a valid action", _ARMS, adapt=resolve_settings),
    fixed_settings=PLAIN_SETTINGS,
    cpu_preset="stress",
    n_seeds=5,
    baseline=f"ppo-{BASELINE}",
    contrasts=CONTRASTS,
)

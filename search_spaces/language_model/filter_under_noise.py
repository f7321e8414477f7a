"""Does the reward-variance filter still help when luck, and not skill, spreads the rewards of a group?

The arms cross the strength of the filter with the slip of FrozenLake, the probability that a move goes elsewhere than
intended. Slips spread the rewards of a group without any signal, so a filter by reward variance selects groups by luck.
RAGEN-2 reports that its gain shrinks with slip, and is gone at 80 to 100 %. All other settings are taken from the study
top-p.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model import top_p
from search_spaces.language_model.family import PPO
from trainable.families import Settings

GAME = "frozenlake"
SLIPS = ("0", "0.3", "0.6", "0.9")
FILTERS: dict[str, Settings] = {
    "none": {"filter.rollout_filter_value": 1.0, "filter.rollout_filter_include_zero": True},
    "0.9": {"filter.rollout_filter_value": 0.9, "filter.rollout_filter_include_zero": False},
    "0.6": {"filter.rollout_filter_value": 0.6, "filter.rollout_filter_include_zero": False},
}
"""Settings of each filter, by the top-p mass that it keeps; `none` keeps all groups."""


def _name_arm(filter_name: str, slip: str) -> str:
    return f"slip{slip}-filter{filter_name}"


_ARMS: dict[str, Settings] = {
    _name_arm(filter_name, slip): {**settings, "env.frozenlake.success_rate": round(1 - float(slip), 3)}
    for slip in SLIPS
    for filter_name, settings in FILTERS.items()
}

CONTRASTS: Contrasts = {
    f"Filter {filter_name} against none, slip {slip}": ((_name_arm(filter_name, slip), _name_arm("none", slip)),)
    for filter_name in FILTERS
    if filter_name != "none"
    for slip in SLIPS
}

STUDY = Study(
    name="filter-under-noise",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("slip x top-p mass of the filter", _ARMS),
    fixed_settings={**top_p.STUDY.fixed_settings, "env.name": GAME},
    presets={preset: PPO.make_game_settings(GAME, preset) for preset in ("paper", "laptop", "small")},
    n_seeds=3,
    baseline=_name_arm("none", "0"),
    contrasts=CONTRASTS,
    game=GAME,
)

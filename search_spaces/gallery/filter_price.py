"""Does a reward-variance filter help by the signal that it selects, or does it only make fewer and other updates?

Filters drop groups, and with them optimizer steps. A filtered arm is therefore compared with no filter in four ways: at
the same number of training steps; at the same number of optimizer steps; at the same number of trained tokens; and
refilled with further groups until the batch is full again (dynamic sampling), which costs more rollouts. Filtered arms
train twice as long, so that one run gives the first three: its curve is read where its own budget is reached.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS, Times, resolve_settings
from search_spaces.language_model.family import PPO
from trainable.families import Settings

MASSES: dict[str, float] = {"zero": 1.0, "0.95": 0.95, "0.9": 0.9}
"""The top-p mass that each filter keeps of the groups whose rewards differ; `zero` drops only the others."""

_ARMS: dict[str, Settings] = {"none": {"filter.rollout_filter_include_zero": True}}
for _name, _mass in MASSES.items():
    _settings = {"filter.rollout_filter_value": _mass, "filter.rollout_filter_include_zero": False}
    _ARMS[f"{_name}-long"] = {**_settings, "trainer.total_training_steps": Times(2)}
    _ARMS[f"{_name}-refilled"] = {**_settings, "filter.max_num_gen_batches": 4}

CONTRASTS: Contrasts = {f"filter {name}, refilled, against none": ((f"{name}-refilled", "none"),) for name in MASSES}
"""The contrasts at equal budgets are read from the curves: `analysis.gallery.budgets`."""

STUDY = Study(
    name="filter-price",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("filter x budget", _ARMS, adapt=resolve_settings),
    fixed_settings=PLAIN_SETTINGS,
    n_seeds=5,
    baseline="none",
    contrasts=CONTRASTS,
)

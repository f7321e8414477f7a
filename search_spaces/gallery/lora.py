"""Do LoRA adapters learn as well as all weights, at which rank and learning rate, and do they break as early?

The arms cross the rank with multiples of the preset's learning rate, under PPO with a critic. The scale of the adapters
is fixed (alpha 32), as where the claim was made. The critic has adapters of the same rank, and keeps the preset's rate.
"""

import itertools

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS, Times, resolve_settings
from search_spaces.language_model.family import PPO
from trainable.families import Settings

RANKS = ("1", "8", "64", "full")
RATES = ("0.3", "1", "3", "10", "30")
"""Learning rates as multiples of the preset's."""


def _name_arm(rank: str, rate: str) -> str:
    return f"rank-{rank}-lr{rate}x"


_ARMS: dict[str, Settings] = {
    _name_arm(rank, rate): {
        "model.lora_rank": 0 if rank == "full" else int(rank),
        "actor.lr": Times(float(rate)),
    }
    for rank, rate in itertools.product(RANKS, RATES)
}

CONTRASTS: Contrasts = {
    **{
        f"rank {rank} at ten times the rate against all weights": ((_name_arm(rank, "10"), _name_arm("full", "1")),)
        for rank in RANKS
        if rank != "full"
    },
    **{
        f"rank {rank} at the same rate against all weights": ((_name_arm(rank, "1"), _name_arm("full", "1")),)
        for rank in RANKS
        if rank != "full"
    },
    **{
        f"rank {rank} against rank 64": tuple((_name_arm(rank, rate), _name_arm("64", rate)) for rate in ("3", "10"))
        for rank in ("1", "8")
    },
}

STUDY = Study(
    name="lora",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("rank x learning rate", _ARMS, adapt=resolve_settings, dose="actor.lr"),
    fixed_settings={**PLAIN_SETTINGS, "model.lora_alpha": 32.0},
    n_seeds=5,
    baseline=_name_arm("full", "1"),
    contrasts=CONTRASTS,
)

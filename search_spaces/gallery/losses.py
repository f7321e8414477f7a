"""Which policy loss makes the most of several updates per rollout: PPO's clip, CISPO, GSPO, or none of them?

The arms of GRPO cross the loss with the number of updates that one pass over a batch is split into. Episodes count
equally in all losses (seq-mean-token-mean). CISPO truncates importance weights on both sides, or at 5 from above alone;
GSPO has the clip range of its paper. All arms have the preset's learning rate, which was tuned for none of them.
"""

import itertools

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS, EpisodeShare, resolve_settings
from search_spaces.language_model.family import PPO
from trainable.families import Settings

LOSSES: dict[str, Settings] = {
    "ppo": {"actor.policy_loss": "ppo_clip", "actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.28},
    "cispo": {"actor.policy_loss": "cispo", "actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.28},
    "cispo-above": {"actor.policy_loss": "cispo", "actor.clip_ratio_low": 1.0, "actor.clip_ratio_high": 4.0},
    "gspo": {"actor.policy_loss": "gspo", "actor.clip_ratio_low": 3e-4, "actor.clip_ratio_high": 4e-4},
    # Bounds that no ratio reaches.
    "no-clip": {
        "actor.policy_loss": "ppo_clip",
        "actor.clip_ratio_low": 1.0,
        "actor.clip_ratio_high": 1e9,
        "actor.clip_ratio_c": 1e9,
    },
}
UPDATES = ("1", "4", "16")
"""Numbers of updates per rollout, each on as many episodes."""

_ARMS: dict[str, Settings] = {
    f"{loss}-{updates}": {
        **settings,
        "actor.ppo_mini_batch_size": EpisodeShare(1 / int(updates)),
        "actor.ppo_micro_batch_size_per_gpu": 4,  # divides all of them
    }
    for (loss, settings), updates in itertools.product(LOSSES.items(), UPDATES)
}

CONTRASTS: Contrasts = {
    **{
        f"{loss} against ppo, {updates} updates": ((f"{loss}-{updates}", f"ppo-{updates}"),)
        for loss in LOSSES
        for updates in UPDATES
        # In a single update all ratios are 1, so only the losses that do not clip there could differ.
        if loss != "ppo" and updates != "1"
    },
    **{f"16 updates against 4, {loss}": ((f"{loss}-16", f"{loss}-4"),) for loss in LOSSES},
}

STUDY = Study(
    name="losses",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("loss x updates per rollout", _ARMS, adapt=resolve_settings),
    fixed_settings={
        **PLAIN_SETTINGS,
        "algorithm.adv_estimator": "grpo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
    },
    n_seeds=5,
    baseline="ppo-4",
    contrasts=CONTRASTS,
)

"""Should advantages be divided by the standard deviation of their group, of the batch, or not at all?

The arms of GRPO cross the normalization with the clip: 0.2 on both sides, or 0.28 above as in DAPO. RLOO and
REINFORCE++, which center and normalize in their own ways, stand beside them under the wider clip.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO
from trainable.families import Settings

SCALES = ("group", "batch", "none")
CLIPS = ("0.2", "0.28")

_ARMS: dict[str, Settings] = {
    **{
        f"{scale}-clip{clip}": {
            "algorithm.adv_estimator": "grpo",
            "algorithm.scale_rewards": scale,
            "algorithm.norm_adv_by_std_in_grpo": scale != "none",
            "actor.clip_ratio_high": float(clip),
        }
        for scale in SCALES
        for clip in CLIPS
    },
    **{
        name: {"algorithm.adv_estimator": name.replace("-", "_"), "actor.clip_ratio_high": 0.28}
        for name in ("rloo", "reinforce-plus-plus")
    },
}


def _pair_scales(first: str, second: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{first}-clip{clip}", f"{second}-clip{clip}") for clip in CLIPS)


CONTRASTS: Contrasts = {
    "no std against the group's": _pair_scales("none", "group"),
    "the batch's std against the group's": _pair_scales("batch", "group"),
    "no std against the batch's": _pair_scales("none", "batch"),
    "clip 0.28 against 0.2": tuple((f"{scale}-clip0.28", f"{scale}-clip0.2") for scale in SCALES),
    "RLOO against the group's std": (("rloo", "group-clip0.28"),),
    "REINFORCE++ against the group's std": (("reinforce-plus-plus", "group-clip0.28"),),
}

STUDY = Study(
    name="normalisation",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("standard deviation that divides advantages x clip", _ARMS),
    fixed_settings=PLAIN_SETTINGS,
    n_seeds=5,
    baseline="group-clip0.28",
    contrasts=CONTRASTS,
)

"""Does GRPO's entropy decay more slowly without the division by the group's std, and does it with a tighter clip?

The documents say that the division drives the decay and that the clip, downstream of it, does not matter; they ran
neither ablation. Here every rule of the family is crossed with the division, three clips, and the KL to the sampling
policy. DAPO has no such KL; its upper clip stays 1.4 times the lower one. The primary outcome is the mean entropy over
the run. Without the division a KL coefficient weighs about 1 / std times more relative to the surrogate, so only the
pairs without KL isolate the division. DrGRPO equals GRPO without division, multiplied by the number of tokens; only
gradient clipping and Adam's epsilon distinguish the two.
"""

from sandboxes.update_rules.family import GROUP_SETTINGS, REVERSAL_SETTINGS, make_sandbox_study
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

CLIPS = ("0.05", "0.1", "0.2")
BETAS = ("0.04", "0")

_GRPO_RULES: dict[str, Settings] = {
    "GRPO": {"method": "GRPO"},
    "GRPO-nostd": {"method": "GRPO", "std_normalization": False},
    "DrGRPO": {"method": "DrGRPO"},
}
_DAPO_RULES: dict[str, Settings] = {
    "DAPO": {"method": "DAPO"},
    "DAPO-nostd": {"method": "DAPO", "std_normalization": False},
}

ARMS: dict[str, Settings] = {
    **{
        f"{name}-clip{clip}-beta{beta}": {**rule, "clip_low": float(clip), "grpo_beta": float(beta)}
        for name, rule in _GRPO_RULES.items()
        for clip in CLIPS
        for beta in BETAS
    },
    **{
        # 1.4 is DAPO's ratio of bounds, 0.28 / 0.2. Rounding removes the float error from names and settings.
        f"{name}-clip{clip}": {**rule, "clip_low": float(clip), "clip_high": round(1.4 * float(clip), 3)}
        for name, rule in _DAPO_RULES.items()
        for clip in CLIPS
    },
}

_GRPO_SUFFIXES = tuple(f"clip{clip}-beta{beta}" for clip in CLIPS for beta in BETAS)
_ARM_SUFFIXES = {"GRPO": _GRPO_SUFFIXES, "GRPO-nostd": _GRPO_SUFFIXES, "DrGRPO": _GRPO_SUFFIXES} | dict.fromkeys(
    _DAPO_RULES, tuple(f"clip{clip}" for clip in CLIPS)
)


def _make_clip_pairs(tight_clip: str, wide_clip: str) -> tuple[tuple[str, str], ...]:
    """Pair every arm that has the tight clip with the same arm with the wide clip."""
    tight_arms = [
        f"{name}-{suffix}"
        for name, suffixes in _ARM_SUFFIXES.items()
        for suffix in suffixes
        if suffix.split("-")[0] == f"clip{tight_clip}"
    ]
    return tuple((arm, arm.replace(f"clip{tight_clip}", f"clip{wide_clip}")) for arm in tight_arms)


CONTRASTS: Contrasts = {
    "GRPO without the division by the deviation": tuple((f"GRPO-nostd-{end}", f"GRPO-{end}") for end in _GRPO_SUFFIXES),
    "the same where no KL acts": tuple(
        (f"GRPO-nostd-{end}", f"GRPO-{end}") for end in _GRPO_SUFFIXES if end.endswith("beta0")
    ),
    "DAPO without the division by the deviation": tuple(
        (f"DAPO-nostd-{end}", f"DAPO-{end}") for end in _ARM_SUFFIXES["DAPO"]
    ),
    "DrGRPO (no division, sum over tokens) against GRPO": tuple(
        (f"DrGRPO-{end}", f"GRPO-{end}") for end in _GRPO_SUFFIXES
    ),
    "clip 0.05 against 0.2": _make_clip_pairs("0.05", "0.2"),
    "clip 0.1 against 0.2": _make_clip_pairs("0.1", "0.2"),
    "without the KL to the sampling policy": tuple(
        (f"{name}-clip{clip}-beta0", f"{name}-clip{clip}-beta0.04") for name in _GRPO_RULES for clip in CLIPS
    ),
}

STUDY = make_sandbox_study(
    name="entropy-mechanism",
    question=__doc__,
    arms=ARMS,
    baseline="GRPO-clip0.2-beta0.04",
    setting="rule, clip and KL coefficient",
    contrasts=CONTRASTS,
    fixed_settings={**REVERSAL_SETTINGS, **GROUP_SETTINGS, "method": "GRPO", "entropy_diagnostics": True},
)

"""Does GRPO's entropy decay more slowly without the division by the group's std, and does it with a tighter clip?

The documents say that the division drives the decay and that the clip does not matter; they ran neither ablation. Here
every rule of the family is crossed with the division, three clips, and the KL to the sampling policy, which DAPO has
not. Without the division a KL coefficient weighs about 1 / std times more relative to the surrogate, so only the pairs
without KL isolate the division. DrGRPO equals GRPO without division, times the number of tokens; only gradient clipping
and Adam's epsilon distinguish the two.
"""

from collections.abc import Iterable

from sandboxes.update_rules.family import GROUP_SETTINGS, REVERSAL_SETTINGS, make_sandbox_study
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

CLIPS = ("0.05", "0.1", "0.2")
BETAS = ("0.04", "0")

_NO_STD: Settings = {"std_normalization": False}
_GRPO, _DAPO, _DR_GRPO = ({"method": method} for method in ("GRPO", "DAPO", "DrGRPO"))
_GRPO_RULES: dict[str, Settings] = {"GRPO": _GRPO, "GRPO-nostd": {**_GRPO, **_NO_STD}, "DrGRPO": _DR_GRPO}
_DAPO_RULES: dict[str, Settings] = {"DAPO": _DAPO, "DAPO-nostd": {**_DAPO, **_NO_STD}}

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


def _make_clip_pairs(tight_clip: str, wide_clip: str) -> tuple[tuple[str, str], ...]:
    """Pair every arm that has the tight clip with the same arm with the wide clip."""
    tight, wide = f"clip{tight_clip}", f"clip{wide_clip}"
    return tuple((arm, arm.replace(tight, wide)) for arm in ARMS if tight in arm.split("-"))


def _pair_rules(first: str, second: str, suffixes: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{first}-{suffix}", f"{second}-{suffix}") for suffix in suffixes)


CONTRASTS: Contrasts = {
    "GRPO without the division by the deviation": _pair_rules("GRPO-nostd", "GRPO", _GRPO_SUFFIXES),
    "the same where no KL acts": _pair_rules("GRPO-nostd", "GRPO", [f"clip{clip}-beta0" for clip in CLIPS]),
    "DAPO without the division by the deviation": _pair_rules("DAPO-nostd", "DAPO", [f"clip{clip}" for clip in CLIPS]),
    "DrGRPO (no division, sum over tokens) against GRPO": _pair_rules("DrGRPO", "GRPO", _GRPO_SUFFIXES),
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

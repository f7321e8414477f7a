"""Does dropping the division by a group's deviation slow the entropy decay of GRPO, and does tightening the clip?

The documents say that the division drives the decay and that the clip, downstream of it, does not matter; they ran
neither ablation. Here all rules of the family cross the division, three clips, and the KL to the sampling policy. DAPO
has no such KL; its upper clip stays 1.4 times the lower one.
"""

from search_spaces.family import Settings
from search_spaces.sandbox import GROUPED, REVERSAL, sandbox_study

CLIPS = ("0.05", "0.1", "0.2")
BETAS = ("0.04", "0")

_RULES: dict[str, Settings] = {
    "GRPO": {"method": "GRPO"},
    "GRPO-nostd": {"method": "GRPO", "std_normalization": False},
    "DrGRPO": {"method": "DrGRPO"},
}
_DAPO: dict[str, Settings] = {
    "DAPO": {"method": "DAPO"},
    "DAPO-nostd": {"method": "DAPO", "std_normalization": False},
}

ARMS: dict[str, Settings] = {
    **{
        f"{name}-clip{clip}-beta{beta}": {**rule, "clip_low": float(clip), "grpo_beta": float(beta)}
        for name, rule in _RULES.items()
        for clip in CLIPS
        for beta in BETAS
    },
    **{
        f"{name}-clip{clip}": {**rule, "clip_low": float(clip), "clip_high": round(1.4 * float(clip), 3)}
        for name, rule in _DAPO.items()
        for clip in CLIPS
    },
}

STUDY = sandbox_study(
    name="entropy-mechanism",
    question=__doc__,
    arms=ARMS,
    baseline="GRPO-clip0.2-beta0.04",
    setting="rule, clip and KL coefficient",
    fixed={**REVERSAL, **GROUPED, "method": "GRPO", "entropy_diagnostics": True},
)

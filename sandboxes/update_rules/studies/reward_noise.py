"""When 20 % of failures are falsely rewarded, what does each noise-robust rule cost in error and entropy?

The noise rewards the rare token (the separator), so it is an incentive that can be exploited, not neutral noise.
"""

from sandboxes.update_rules.family import REVERSAL_SETTINGS, make_sandbox_study

STUDY = make_sandbox_study(
    name="reward-noise",
    question=__doc__,
    arms={
        "DG": {"method": "DG"},
        "UncertaintyDG": {"method": "UncertaintyDG"},
        "FilteredDG": {"method": "FilteredDG"},
        "FilteredDG-0.2": {"method": "FilteredDG", "uncertainty_threshold": 0.2},
        "FilteredDG-0.3": {"method": "FilteredDG", "uncertainty_threshold": 0.3},
        "RewardVarianceDG": {"method": "RewardVarianceDG"},
        "ASPO": {"method": "ASPO"},
        "R2VPO": {"method": "R2VPO"},
    },
    baseline="DG",
    fixed_settings={**REVERSAL_SETTINGS, "reward_noise": 0.2, "reward_noise_mode": "false_positive_rare_token"},
)

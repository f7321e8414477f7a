"""What does each way of distrusting a noisy reward pay, in error and in entropy, when a fifth of failures may earn 1?

The noise pays for the rare token, the separator: an incentive that can be exploited, not neutral noise.
"""

from search_spaces.sandbox.family import REVERSAL_SETTINGS, make_sandbox_study

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

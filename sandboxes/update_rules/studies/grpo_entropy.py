"""Which update rules lose entropy, how fast, and on which samples of a batch?"""

from sandboxes.update_rules.family import GROUP_SETTINGS, REVERSAL_SETTINGS, make_sandbox_study

STUDY = make_sandbox_study(
    name="grpo-entropy",
    question=__doc__,
    arms={
        "DG": {"method": "DG"},
        "DGEntropyGuard": {"method": "DGEntropyGuard"},
        "ASPO": {"method": "ASPO"},
        "R2VPO": {"method": "R2VPO"},
        "GRPO": {"method": "GRPO", **GROUP_SETTINGS},
        "TPO": {"method": "TPO", **GROUP_SETTINGS},
    },
    baseline="GRPO",
    fixed_settings={**REVERSAL_SETTINGS, "entropy_diagnostics": True},
)

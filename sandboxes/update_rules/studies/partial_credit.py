"""Does per-token credit teach the positions that the reward scores, and how does it affect the unscored positions?"""

from sandboxes.update_rules.family import GROUP_SETTINGS, REVERSAL_SETTINGS, make_sandbox_study

STUDY = make_sandbox_study(
    name="partial-credit",
    question=__doc__,
    arms={
        "CE": {"method": "CE"},
        "DG": {"method": "DG"},
        "DGToken": {"method": "DGToken"},
        "TEMPO": {"method": "TEMPO", "group_size": 8},
        "TPOToken": {"method": "TPOToken", **GROUP_SETTINGS},
        "GRPOToken": {"method": "GRPOToken", **GROUP_SETTINGS},
    },
    baseline="DG",
    fixed_settings={**REVERSAL_SETTINGS, "task": "masked_reversal"},
)

"""Does a target distribution over a group's candidates learn more from the same rollouts than normalized advantages?"""

from sandboxes.update_rules.family import GROUP_SETTINGS, make_sandbox_study

STUDY = make_sandbox_study(
    name="influence",
    question=__doc__,
    arms={
        "DG": {"method": "DG"},
        "GRPO": {"method": "GRPO", **GROUP_SETTINGS},
        "TPO": {"method": "TPO", **GROUP_SETTINGS},
    },
    baseline="GRPO",
)

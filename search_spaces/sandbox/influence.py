"""Does a target over the candidates of a group extract more from the same rollouts than normalised advantages do?"""

from search_spaces.sandbox.family import GROUP_SETTINGS, make_sandbox_study

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

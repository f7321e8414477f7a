"""Does a target over the candidates of a group extract more from the same rollouts than normalised advantages do?"""

from search_spaces.sandbox.family import GROUPED, sandbox_study

STUDY = sandbox_study(
    name="influence",
    question=__doc__,
    arms={
        "DG": {"method": "DG"},
        "GRPO": {"method": "GRPO", **GROUPED},
        "TPO": {"method": "TPO", **GROUPED},
    },
    baseline="GRPO",
)

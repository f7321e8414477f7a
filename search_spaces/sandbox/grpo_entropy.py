"""Which update rules lose their entropy, how fast, and on which samples of a batch is it lost?"""

from search_spaces.sandbox.family import GROUPED, REVERSAL, sandbox_study

STUDY = sandbox_study(
    name="grpo-entropy",
    question=__doc__,
    arms={
        "DG": {"method": "DG"},
        "DGEntropyGuard": {"method": "DGEntropyGuard"},
        "ASPO": {"method": "ASPO"},
        "R2VPO": {"method": "R2VPO"},
        "GRPO": {"method": "GRPO", **GROUPED},
        "TPO": {"method": "TPO", **GROUPED},
    },
    baseline="GRPO",
    fixed={**REVERSAL, "entropy_diagnostics": True},
)

"""Does credit a token teach the positions that the reward scores, and what does it do to those that it does not?"""

from search_spaces.sandbox.family import GROUPED, REVERSAL, sandbox_study

STUDY = sandbox_study(
    name="partial-credit",
    question=__doc__,
    arms={
        "CE": {"method": "CE"},
        "DG": {"method": "DG"},
        "DGToken": {"method": "DGToken"},
        "TEMPO": {"method": "TEMPO", "group_size": 8},
        "TPOToken": {"method": "TPOToken", **GROUPED},
        "GRPOToken": {"method": "GRPOToken", **GROUPED},
    },
    baseline="DG",
    fixed={**REVERSAL, "task": "masked_reversal"},
)

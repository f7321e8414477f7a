"""When importance ratios are not 1, do the rules that correct for them differ from REINFORCE, and are they better?

On policy and with one update per batch, REINFORCE, PG, TrajPG, ASPO and R2VPO are the same algorithm, and every
published run of them was of this kind. Here each is run with batches that are one and four updates old, and with four
updates per batch. PMDMean, whose baseline is the batch mean, and DG, which corrects nothing, are run for comparison.
The contrasts compare each rule with REINFORCE at the same staleness. REINFORCE-onpolicy shows the cost of staleness.
"""

from sandboxes.toys.study import SMOKE_SETTINGS
from sandboxes.update_rules.family import make_sandbox_study
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

RULES = ("REINFORCE", "PG", "TrajPG", "ASPO", "R2VPO", "PMDMean", "DG")
ON_POLICY_RULES = ("REINFORCE", "PMDMean", "DG")
"""Rules that differ on policy; REINFORCE stands for the five that do not."""
REGIMES: dict[str, Settings] = {"delay1": {"delay": 1}, "delay4": {"delay": 4}, "epochs4": {"inner_epochs": 4}}

ARMS: dict[str, Settings] = {
    **{f"{rule}-onpolicy": {"method": rule} for rule in ON_POLICY_RULES},
    **{f"{rule}-{name}": {"method": rule, **regime} for name, regime in REGIMES.items() for rule in RULES},
}

CONTRASTS: Contrasts = {
    f"{rule} against REINFORCE off policy": tuple((f"{rule}-{name}", f"REINFORCE-{name}") for name in REGIMES)
    for rule in RULES[1:]
} | {
    f"{rule}, {name} against on policy": ((f"{rule}-{name}", f"{rule}-onpolicy"),)
    for rule in ON_POLICY_RULES
    for name in REGIMES
}

STUDY = make_sandbox_study(
    name="off-policy",
    question=__doc__,
    arms=ARMS,
    baseline="REINFORCE-onpolicy",
    setting="rule and staleness",
    contrasts=CONTRASTS,
    smoke_settings={**SMOKE_SETTINGS, "trainer.total_training_steps": 6, "trainer.test_freq": 6},
)

"""The studies of the source: any combination, delays, and the six whose numbers are compared with published tables."""

from sandboxes.toys.study import SMOKE_SETTINGS, set_length
from sandboxes.update_rules.family import GROUP_SETTINGS, REVERSAL_SETTINGS, make_sandbox_study
from trainable.families import Settings

_RULES = ("REINFORCE", "PG", "ASPO", "TrajPG", "DG", "Kondo")
_DELAYS = (0, 1, 3, 10, 30, 100)


def _name_arms(*methods: str, **settings: object) -> dict[str, Settings]:
    return {method: {"method": method, **settings} for method in methods}


# Any combination: `--set task=token_reversal --set method=TPO`.
SINGLE = make_sandbox_study(
    name="sandbox",
    question="How does one update rule behave on one task?",
    arms={"single": {}},
    baseline="single",
    fixed_settings={},
    setting="combination",
    run_template="sandbox_{task}_{method}",
)

DELAYS = make_sandbox_study(
    name="sandbox-delays",
    question="How much staleness does each update rule tolerate?",
    arms={f"{rule}-delay{delay}": {"method": rule, "delay": delay} for rule in _RULES for delay in _DELAYS},
    baseline="REINFORCE-delay0",
    fixed_settings={},
    setting="rule and delay",
    run_template="sandbox_delays_{task}",
    # Longer than the largest delay, so that every arm trains on a batch.
    smoke_settings={**SMOKE_SETTINGS, **set_length(102, 102, 102)},
)

INFLUENCE = make_sandbox_study(
    name="influence",
    question="Does a target distribution over a group's candidates learn more from the same rollouts than "
    "normalized advantages?",
    arms={**_name_arms("DG"), **_name_arms("GRPO", "TPO", **GROUP_SETTINGS)},
    baseline="GRPO",
)

# The noise rewards the rare token (the separator), so it is an exploitable incentive, not neutral noise.
REWARD_NOISE = make_sandbox_study(
    name="reward-noise",
    question="When 20 % of failures are falsely rewarded, what does each noise-robust rule cost in error and entropy?",
    arms={
        **_name_arms("DG", "UncertaintyDG", "FilteredDG"),
        **{f"FilteredDG-{level}": {"method": "FilteredDG", "uncertainty_threshold": level} for level in (0.2, 0.3)},
        **_name_arms("RewardVarianceDG", "ASPO", "R2VPO"),
    },
    baseline="DG",
    fixed_settings={**REVERSAL_SETTINGS, "reward_noise": 0.2, "reward_noise_mode": "false_positive_rare_token"},
)

REPLAY = make_sandbox_study(
    name="replay",
    question="When all samples are old, what breaks learning from a replay buffer: the samples' age or the "
    "buffer's capacity?",
    arms={
        **_name_arms("DG"),
        **{
            f"{method}-{size}": {"method": method, "replay_capacity": size}
            for size in (5, 32)
            for method in ("ReplayDG", "FreshDG")
        },
        "FreshDG-32-decay0.5": {"method": "FreshDG", "replay_capacity": 32, "replay_age_decay": 0.5},
    },
    baseline="DG",
    setting="rule and buffer",
    fixed_settings={**REVERSAL_SETTINGS, "delay": 4},
    # Longer than the delay of 4, since a delay without effect is rejected.
    smoke_settings={**SMOKE_SETTINGS, "trainer.total_training_steps": 7},
)

PARTIAL_CREDIT = make_sandbox_study(
    name="partial-credit",
    question="Does per-token credit teach the positions that the reward scores, and how does it affect the "
    "unscored positions?",
    arms={
        **_name_arms("CE", "DG", "DGToken"),
        **_name_arms("TEMPO", group_size=8),
        **_name_arms("TPOToken", "GRPOToken", **GROUP_SETTINGS),
    },
    baseline="DG",
    fixed_settings={**REVERSAL_SETTINGS, "task": "masked_reversal"},
)

DENSE_CORRECTION = make_sandbox_study(
    name="dense-correction",
    question="Does correcting a policy along its own prefixes solve a chain of rewards faster than imitating "
    "correct sequences?",
    arms=_name_arms("CE", "SelfDistillDG", "SCOPELite"),
    baseline="CE",
    fixed_settings={**REVERSAL_SETTINGS, "task": "chain_reversal", **set_length(1500, 50, 250)},
)

GRPO_ENTROPY = make_sandbox_study(
    name="grpo-entropy",
    question="Which update rules lose entropy, how fast, and on which samples of a batch?",
    arms={**_name_arms("DG", "DGEntropyGuard", "ASPO", "R2VPO"), **_name_arms("GRPO", "TPO", **GROUP_SETTINGS)},
    baseline="GRPO",
    fixed_settings={**REVERSAL_SETTINGS, "entropy_diagnostics": True},
)

EVIDENCE = (INFLUENCE, REWARD_NOISE, REPLAY, PARTIAL_CREDIT, DENSE_CORRECTION, GRPO_ENTROPY)
"""Studies whose numbers are compared with published tables."""

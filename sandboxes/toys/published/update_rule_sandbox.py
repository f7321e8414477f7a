"""The tables of the update-rule sandbox (github.com/deepakvijaykee/rl-experiments, rl_sandbox), each cell once.

Each row has three seeds. The number after "+/-" is the sample standard deviation, although newer documents of the same
source call it a standard error: 53.3333 +/- 11.5470 comes from the steps 40, 60 and 60, whose standard error is 6.667.
Ages and entropy changes are pooled: their standard deviation is over 15 logged rows of each of 3 seeds. It does not
measure variation between seeds, so no test between seeds can use it. `expected_verdict` and `rationale` were written
down before any of our runs was compared with a cell.
"""

from collections.abc import Mapping

from sandboxes.toys.published.cells import read_cells

SOURCE = "the documents of the update-rule sandbox"

_SHARED_SETTINGS: Mapping[str, object] = {
    "method": "DG", "delay": 0, "lr": 1e-3, "inner_epochs": 1, "batch_size": 96, "group_size": 4,
    "baseline": "expected", "std_normalization": True, "eta": 1.0, "tpo_eta": 1.0, "grpo_beta": 0.04, "iw_cap": 10.0,
    "clip_low": 0.2, "clip_high": 0.28, "kondo_keep": 0.5, "guard_strength": 0.5, "uncertainty_scale": 1.0,
    "uncertainty_threshold": 0.5, "distill_alpha": 0.5, "fallback_patience": 10,
    "replay_capacity": 0, "replay_priority": "fresh_delight", "replay_age_decay": 0.02,
    "reward_noise": 0.0, "reward_noise_mode": "none", "binary_reward": False,
    "vocab_size": 2, "seq_len": 10, "score_len": 5, "d_model": 64, "nhead": 2, "num_layers": 2,
    "trainer.total_training_steps": 300, "trainer.test_freq": 20,
}  # fmt: skip
"""Settings of the published runs, unless a study or an arm changes them: the source's defaults, except for batch size,
steps and evaluation interval, which its sweeps set."""
STUDY_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "influence": {"task": "token_reversal"},
    "reward-noise": {"task": "token_reversal", "reward_noise": 0.2, "reward_noise_mode": "false_positive_rare_token"},
    "replay": {"task": "token_reversal", "delay": 4},
    "partial-credit": {"task": "masked_reversal"},
    "dense-correction": {"task": "chain_reversal", "trainer.total_training_steps": 1500, "trainer.test_freq": 50},
    "grpo-entropy": {"task": "token_reversal"},
}
# The documents call this condition "grouped": 12 prompts with 8 rollouts, and four optimizer steps per batch.
_GROUPED_SETTINGS: Mapping[str, object] = {"group_size": 8, "inner_epochs": 4}
ARM_SETTINGS: Mapping[str, Mapping[str, object]] = {
    **{name: {"method": name} for name in ("DG", "UncertaintyDG", "FilteredDG", "RewardVarianceDG", "ASPO", "R2VPO")},
    **{name: {"method": name} for name in ("CE", "SelfDistillDG", "SCOPELite", "DGToken", "DGEntropyGuard")},
    **{name: {"method": name, **_GROUPED_SETTINGS} for name in ("GRPO", "TPO", "TPOToken", "GRPOToken")},
    "TEMPO": {"method": "TEMPO", "group_size": 8},
    "FilteredDG-0.2": {"method": "FilteredDG", "uncertainty_threshold": 0.2},
    "FilteredDG-0.3": {"method": "FilteredDG", "uncertainty_threshold": 0.3},
    **{
        f"{name}-{size}": {"method": name, "replay_capacity": size}
        for name in ("ReplayDG", "FreshDG")
        for size in (5, 32)
    },
    "FreshDG-32-decay0.5": {"method": "FreshDG", "replay_capacity": 32, "replay_age_decay": 0.5},
}


def make_conditions(study: str, arm: str) -> Mapping[str, object]:
    """Return all settings of the published runs of an arm."""
    return {**_SHARED_SETTINGS, **STUDY_SETTINGS[study], **ARM_SETTINGS[arm]}


CELLS = read_cells("update_rule_sandbox.csv", make_conditions)
"""All distinct cells of the six tables, in their order."""

"""The family of update-rule studies, the conditions that they share, and the columns of their rows.

`columns.csv` lists the columns. A row is one evaluation. `step` is the number of batches trained on so far: the row of
step 0 describes the initial weights, the last row the final ones. With a delay, the first row has step `delay`. Columns
of a batch describe the batch that is trained on after the evaluation; the last row has no such columns.
"""

from functools import partial
from types import MappingProxyType

from sandboxes.toys.study import (
    BYTES_PER_PARAMETER,
    BYTES_PER_ROW,
    Description,
    make_summary_columns,
    make_toy_family,
    make_toy_study,
    set_length,
)
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from trainable.families import OutcomeColumn, Settings
from trainable.runs.records import TOY_TIME_COLUMNS, Column, read_columns

_TABLES = read_columns(__file__)
RULE_COLUMNS = _TABLES["rule"]
"""Metrics of the rules and of Kondo's screen."""
STEP_COLUMNS: tuple[Column, ...] = (*_TABLES["step"], *RULE_COLUMNS, *_TABLES["step_end"], *TOY_TIME_COLUMNS)
TRIAL_COLUMNS: tuple[Column, ...] = (
    *_TABLES["late"],
    *make_summary_columns(
        STEP_COLUMNS,
        "final_test_error final_entropy final_test_error_unscored final_chain_reward final_perplexity "
        "final_greedy_separator_rate",
    ),
    *_TABLES["trial"],
)

GROUP_SETTINGS: Settings = MappingProxyType({"group_size": 8, "inner_epochs": 4})
"""The condition that the documents call grouped: 12 prompts with 8 rollouts, four optimizer steps per batch."""

REVERSAL_SETTINGS: Settings = MappingProxyType({"task": "token_reversal", "batch_size": 96, **set_length(300, 20, 100)})
"""The shared conditions of the published sweeps."""

_STATE_OVERHEAD_BYTES = 200_000
"""Headers, counters and settings of a checkpoint."""


def estimate_bytes(config: UpdateRuleConfig, n_parameters: int) -> tuple[int, int]:
    """See `Family.estimate_bytes`. n_parameters: of the model that the run loads; 0 if it loads none."""
    sequence_length = 2 * config.seq_len + 1  # prompt, separator, answer
    # A block's matrices have 12 d^2 weights, and its biases and norms fewer than d^2. The rest is embedding and head of
    # at most V + 2 tokens, positions, and the last norm.
    rest = (2 * config.vocab_size + 8 + sequence_length) * config.d_model
    transformer_parameters = config.num_layers * 13 * config.d_model**2 + rest
    # 784 pixels; 12: the weights to ten classes, and the biases of the two hidden layers.
    mlp_parameters = (784 + config.hidden + 12) * config.hidden
    # A checkpoint contains the batches yet to be trained on: the replay buffer, or the delayed batches.
    n_batches = max(config.replay_capacity, config.delay + 1)
    # An observation is pixels (float32) or tokens (int64). 40 bytes per token: action, label, log-prob, baseline, mask.
    batch_bytes = config.batch_size * (max(784 * 4, sequence_length * 8, config.context_len * 8) + config.seq_len * 40)
    # Upper bound: the largest model that any task could train.
    weight_bytes = BYTES_PER_PARAMETER * max(transformer_parameters, mlp_parameters, n_parameters)
    return weight_bytes + n_batches * batch_bytes + _STATE_OVERHEAD_BYTES, BYTES_PER_ROW


def estimate_step_seconds(config: UpdateRuleConfig) -> float | None:
    """Estimate seconds per step, see `Family`. Assumes networks of default size."""
    if config.task == "mnist":
        return 4e-3 * config.batch_size / 100
    if config.task == "lm_bandit":
        return None
    return (13e-3 + 17e-3 * config.inner_epochs) * config.batch_size / 96


UPDATE_RULES = make_toy_family(
    name="update_rules",
    trainable="sandboxes.update_rules.trial:UpdateRules",
    config_class=UpdateRuleConfig,
    step_columns=STEP_COLUMNS,
    trial_columns=TRIAL_COLUMNS,
    outcomes=(
        OutcomeColumn("late_test_error", 0.05, "it is the outcome that a rule should improve", is_common=True),
        OutcomeColumn("final_entropy", 0.1, "it shows how much exploration is left at the end", is_common=True),
        OutcomeColumn(
            "mean_entropy", 0.1, "it shows how long entropy lasted, even if it never gets low", is_common=True
        ),
        OutcomeColumn(
            "final_test_error_unscored", 0.05, "in masked_reversal, it shows what is learned where nothing is scored"
        ),
        OutcomeColumn("final_chain_reward", contrast="it is the reward that chain tasks give"),
        OutcomeColumn("final_perplexity", contrast="in lm_bandit, it shows whether the model still knows the language"),
        OutcomeColumn("mean_replay_age", contrast="it checks that ages meant to be equal are", is_compared=False),
    ),
    is_higher_better=False,
    summarize="sandboxes.update_rules.read:summarize_run",
    description=Description(
        label="update-rule sandbox",
        outcome="test error at the end",
        panels={
            "test_error": "test error (fraction)",
            "entropy": "entropy (nats)",
            "test_error_unscored": "test error, not scored (fraction)",
            "chain_reward": "chain reward (reward)",
            "replay_age": "age of the batch (updates)",
        },
    ),
    part_checks={"method": "sandboxes.update_rules.training.make:check_update_rule"},
    get_model_path=lambda config: config.model_name if config.task == "lm_bandit" else None,
    estimate_bytes=estimate_bytes,
    estimate_step_seconds=estimate_step_seconds,
    progress_columns={"test_error": "test error", "entropy": "entropy", "loss": "loss"},
    log_columns=("test_error", "test_error_unscored", "chain_reward", "entropy", "reward", "loss"),
)


make_sandbox_study = partial(
    make_toy_study,
    family=UPDATE_RULES,
    fixed_settings=REVERSAL_SETTINGS,
    setting="update rule",
    stop_rules=("uniform_groups",),
    wandb_project="update_rule_sandbox",
)
"""Make a study of update rules whose arms are named conditions; see `make_toy_study`."""

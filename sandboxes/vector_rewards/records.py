"""Columns that a run of Vector Policy Optimization may write: name, unit, meaning. docs/metrics.md lists them too.

A row is one evaluation, of the weights before the step. Columns of a batch describe the batch of that step; the last
row has none. Deployment scores are means over the task's deployment weights, of which the published front has one.
"""

from trainable.runs.records import TOY_TIME_COLUMNS, Column

STEP_COLUMNS: tuple[Column, ...] = (
    Column("simplex_score", "reward", "expected best score of a set, mean over 2,048 weights that cover the simplex"),
    Column("simplex_gap", "reward", "the largest simplex_score of any set of that size, by enumeration, minus ours"),
    Column("mean_scalar_reward", "reward", "mean score of sampled candidates at the gold weights"),
    Column("best_at_1", "reward", "score of the first sampled candidate of a prompt, at deployment"),
    Column("best_at_3", "reward", "best score of the first three sampled candidates of a prompt, at deployment"),
    Column("best_at_9", "reward", "best score of the first nine sampled candidates of a prompt, at deployment"),
    Column("pool_diversity_l1", "reward", "mean L1 distance of the reward vectors of two candidates of a set"),
    Column("entropy", "nats", "mean entropy of the policy over prompts and slots"),
    Column("loss", "1", "the loss of the last inner epoch"),
    Column("reward", "reward", "mean score of the sets that are trained on"),
    Column("gold_set_reward", "reward", "mean of the best gold score in these sets"),
    Column("adv_abs_mean", "1", "mean absolute advantage"),
    Column("ratio_mean", "1", "mean ratio of the new to the sampling probability in the last inner epoch"),
    *TOY_TIME_COLUMNS,
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("late_simplex_score", "reward", "mean of simplex_score over the last 4 planned evaluations"),
    Column("final_simplex_gap", "reward", "simplex_gap of the last row"),
    Column("late_best_at_1", "reward", "mean of best_at_1 over the last 4 planned evaluations"),
    Column("late_best_at_3", "reward", "mean of best_at_3 over the last 4 planned evaluations"),
    Column("late_best_at_9", "reward", "mean of best_at_9 over the last 4 planned evaluations"),
    Column("late_mean_scalar_reward", "reward", "mean of mean_scalar_reward over the last 4 planned evaluations"),
    Column("late_pool_diversity_l1", "reward", "mean of pool_diversity_l1 over the last 4 planned evaluations"),
    Column("final_entropy", "nats", "entropy of the last row"),
)

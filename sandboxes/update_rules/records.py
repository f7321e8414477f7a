"""Columns that a run of the update-rule sandbox may write: name, unit, meaning. docs/metrics.md lists them too.

A row is one evaluation. `step` is the number of batches trained on so far: the row of step 0 describes the initial
weights, the last row the final ones. With a delay, the first row has step `delay`. Columns of a batch describe the
batch that is trained on after the evaluation; the last row has no such columns.
"""

from sandboxes.toys.study import make_summary_columns
from trainable.runs.records import TOY_TIME_COLUMNS, Column

EVALUATION_COLUMNS: tuple[Column, ...] = (
    Column("test_error", "fraction", "1 - accuracy of greedy decoding on new prompts, over tokens or whole sequences"),
    Column("entropy", "nats", "mean entropy of the policy along the greedy sequences"),
    Column("test_error_unscored", "fraction", "masked_reversal: token error at positions that are not scored"),
    Column("chain_reward", "reward", "chain tasks: mean reward of the greedy sequences"),
    Column("perplexity", "1", "lm_bandit: exp of the mean surprisal of the true next token"),
    Column("error_easy", "fraction", "lm_bandit: test_error of the windows' easiest third for the initial weights"),
    Column("error_medium", "fraction", "test_error of the middle third of those windows"),
    Column("error_hard", "fraction", "test_error of the hardest third of those windows"),
    Column("greedy_separator_rate", "fraction", "separators (never correct) among the greedily decoded tokens"),
    Column("synthetic_data", "1", "mnist: 1 if the images are synthetic, 0 if they are those of MNIST"),
)

RULE_COLUMNS: tuple[Column, ...] = (
    Column("reward", "reward", "mean reward, with noise, of the rollouts trained on, so without uniform groups"),
    Column("iw_mean", "1", "PG, TrajPG, MaxRL: mean capped importance weight"),
    Column("ratio_mean", "1", "rules with ratios: mean of new / sampling probability; ASPO: of the flipped ratio"),
    Column("weight_mean", "1", "ASPO, LogGrowth: mean sample weight"),
    Column("pos_frac", "fraction", "ASPO: samples with a positive advantage"),
    Column("var_penalty_mean", "1", "R2VPO: mean of lambda (ratio - 1)^2"),
    Column("gate_mean", "1", "rules with a delight gate: mean gate"),
    Column("freshness_weight", "1", "FreshDG: exp(-replay_age_decay age)"),
    Column("batch_age", "updates", "FreshDG: age of the batch"),
    Column("entropy_guard_mean", "1", "DGEntropyGuard: mean guard"),
    Column("uncertainty_mean", "reward", "rules with an uncertainty: mean uncertainty"),
    Column("kept_frac", "fraction", "FilteredDG and Kondo: samples that are trained on"),
    Column("gate_prob_mean", "1", "Kondo: mean probability of being kept"),
    Column("rtg_mean", "fraction", "DGToken: mean fraction of correct tokens from a position onwards"),
    Column("distill_loss", "nats", "SelfDistillDG: mean gated cross-entropy of the labels"),
    Column("first_error_frac", "fraction", "SCOPELite: positions from the first wrong token onwards"),
    Column("correction_loss", "nats", "SCOPELite: mean cross-entropy of the labels at these positions"),
    Column("adv_abs_mean", "1", "GRPO, DrGRPO, DAPO, GRPOToken: mean absolute advantage"),
    Column(
        "reverse_kl_mean",
        "nats",
        "GRPO, DrGRPO, GRPOToken: mean of 1/ratio + log ratio - 1 over samples of the sampling policy mu; its "
        "expectation, E_mu[mu / pi] - 1 - KL(mu || pi), equals KL(pi || mu) only to second order in the log-ratio",
    ),
    Column("tpo_target_entropy", "nats", "TPO, TPOFullAction, TPOToken: mean entropy of the target"),
    Column("tpo_target_top_prob", "1", "TPO: mean largest probability of the target"),
    Column("tpo_skill_abs_mean", "1", "GroupPG: mean absolute value of the standardized rewards"),
    Column("tpo_sample_adv_mean", "reward", "TPOFullAction: mean advantage of the taken action"),
    Column("candidate_reward", "reward", "TPOToken, GRPOToken: mean reward of all candidates"),
    Column("behavior_token_reward", "reward", "mean reward of the candidates that were taken"),
    Column("td_nonzero_frac", "fraction", "TEMPO: positions whose prefix value changes"),
    Column("log_ratio_mean", "nats", "PMDMean: mean log-ratio of a sequence"),
)

RATIO_COLUMNS: tuple[Column, ...] = (
    Column("importance_ratio_mean", "1", "mean of pi(a) / pi_actor(a) at trained tokens before the last inner epoch"),
    Column("importance_ratio_std", "1", "standard deviation of that ratio over those tokens (divisor N)"),
    Column("importance_ratio_max", "1", "largest value of that ratio"),
    Column(
        "clip_frac",
        "fraction",
        "trained tokens with a ratio outside [1 - clip_low, 1 + clip_low], with clip_high outside [1 - clip_low, 1 + "
        "clip_high]",
    ),
)

SAMPLE_COLUMNS: tuple[Column, ...] = (
    Column("mixed_group_rate", "fraction", "groups whose rewards differ / groups"),
    Column("retained_group_rate", "fraction", "groups that are trained on / groups"),
    Column("group_fallback", "1", "1 if the rewards of no group differ and all groups are kept, otherwise 0"),
    Column("replay_age", "updates", "age of the batch that was trained on"),
    Column("replay_size", "batches", "batches in the replay buffer"),
    Column("replay_priority", "1", "priority of the drawn batch"),
    Column("age_mean", "updates", "mean age of the batches trained on since the last row"),
    Column("age_std", "updates", "standard deviation of the ages of those batches (divisor N)"),
    Column("effective_age", "updates", "mean age of those batches, weighted by the freshness weight in the loss"),
)

DIAGNOSTIC_COLUMNS: tuple[Column, ...] = (
    Column("batch_entropy_before", "nats", "mean entropy on the batch before the step's updates"),
    Column("batch_entropy_after", "nats", "mean entropy on the batch after the step's updates"),
    Column("batch_delta_entropy", "nats", "mean of entropy after - before"),
    Column("cov_prob_delta_logit", "1", "covariance of the taken token's probability and the change in its logit"),
    Column("entropy_drop_pos_adv", "nats", "mean of entropy before - after at tokens with a positive advantage"),
    Column("entropy_drop_neg_adv", "nats", "as entropy_drop_pos_adv, at tokens with a negative advantage"),
    *(
        Column(f"entropy_drop_{name}_{third}", "nats", f"as entropy_drop_pos_adv, in the {word} third of {quantity}")
        for name, quantity in (("surprisal", "surprisal"), ("delight", "advantage x surprisal"))
        for third, word in (("low", "lowest"), ("mid", "middle"), ("high", "highest"))
    ),
    Column(
        "cos_method_ce",
        "1",
        "cosine between the gradients of the rule and of the oracle's cross-entropy on the batch of the step, at the "
        "weights after the step's updates",
    ),
    Column("grad_norm", "1", "norm of that gradient of the rule, before clipping"),
    Column(
        "oracle_fit_delight_correlation",
        "1",
        "Pearson correlation over trained tokens between advantage x surprisal and the inner product of the gradients "
        "of the token's log-probability and of the oracle's cross-entropy; negative if delight selects the tokens "
        "that help the oracle",
    ),
    Column("oracle_fit_advantage_correlation", "1", "as oracle_fit_delight_correlation, for the advantage alone"),
    Column("oracle_fit_surprisal_correlation", "1", "as oracle_fit_delight_correlation, for the surprisal alone"),
    Column("oracle_fit_gate_correlation", "1", "as oracle_fit_delight_correlation, for sigmoid(delight / eta)"),
)

STEP_COLUMNS: tuple[Column, ...] = (
    *EVALUATION_COLUMNS,
    Column("loss", "1", "the update rule's loss in the last inner epoch"),
    *RULE_COLUMNS,
    *RATIO_COLUMNS,
    *SAMPLE_COLUMNS,
    *DIAGNOSTIC_COLUMNS,
    *TOY_TIME_COLUMNS,
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column(
        "late_test_error",
        "fraction",
        "mean of test_error over the last 4 planned evaluations; a stopped run keeps its last value for those missed. "
        "Without any, test_error before training",
    ),
    *make_summary_columns(
        STEP_COLUMNS,
        "final_test_error final_entropy final_test_error_unscored final_chain_reward final_perplexity "
        "final_greedy_separator_rate",
    ),
    Column("first_step_entropy_low", "steps", "first evaluated step with an entropy of at most 0.1; missing: none"),
    Column("first_step_error_zero", "steps", "first evaluated step with test_error 0; missing: none"),
    Column(
        "mean_entropy",
        "nats",
        "area under the curve of entropy over steps (trapezoids between rows, from the first with a value), divided "
        "by its length; for a run that a rule stopped the last value counts up to steps_total, other runs end at "
        "their last row",
    ),
    Column("mean_replay_age", "updates", "mean age of all batches trained on, from age_mean"),
    Column("mean_effective_age", "updates", "mean effective age of all batches trained on, from effective_age"),
)

"""The columns that a run of the update-rule sandbox may write: name, unit, formula. docs/metrics.md has them too.

A row is one evaluation: `step` is the number of batches trained on so far, so the first row, of step 0, is of the first
weights, and the last is that of the trained ones; with a delay, the first row is that of step `delay`. Columns of a
batch are of the batch of that step, after the evaluation; the last row has none.
"""

from trainable.runs.records import Column

EVALUATION_COLUMNS: tuple[Column, ...] = (
    Column("test_error", "share", "1 - accuracy of greedy decoding on fresh prompts: of tokens, or of whole sequences"),
    Column("entropy", "nats", "mean entropy of the policy along the greedy sequences"),
    Column("test_error_unscored", "share", "masked_reversal: token error of positions that do not count"),
    Column("chain_reward", "reward", "chain tasks: mean reward of the greedy sequences"),
    Column("perplexity", "1", "lm_bandit: exp of the mean surprisal of the true next token"),
    Column("error_easy", "share", "lm_bandit: test_error of the third of windows that the first weights find easiest"),
    Column("error_medium", "share", "the same of the middle third"),
    Column("error_hard", "share", "the same of the hardest third"),
    Column("greedy_separator_rate", "share", "separators among the greedily decoded tokens, which are never right"),
    Column("stand_in_data", "1", "mnist: 1 where the images are generated, 0 where they are those of MNIST"),
)

RULE_COLUMNS: tuple[Column, ...] = (
    Column("reward", "reward", "mean reward, noise included, of the rollouts trained on: without uniform groups"),
    Column("iw_mean", "1", "PG, TrajPG, MaxRL: mean capped importance weight"),
    Column("ratio_mean", "1", "rules with ratios: mean ratio of new to sampling probability; ASPO: the flipped one"),
    Column("weight_mean", "1", "ASPO, LogGrowth: mean weight of a sample"),
    Column("pos_frac", "share", "ASPO: samples with a positive advantage"),
    Column("var_penalty_mean", "1", "R2VPO: mean of lambda (ratio - 1)^2"),
    Column("gate_mean", "1", "rules with a delight gate: its mean"),
    Column("freshness_weight", "1", "FreshDG: exp(-replay_age_decay age)"),
    Column("batch_age", "updates", "FreshDG: age of the batch"),
    Column("entropy_guard_mean", "1", "DGEntropyGuard: mean guard"),
    Column("uncertainty_mean", "reward", "rules with an uncertainty: its mean"),
    Column("kept_frac", "share", "FilteredDG and Kondo: samples that are trained on"),
    Column("gate_prob_mean", "1", "Kondo: mean probability to be kept"),
    Column("rtg_mean", "share", "DGToken: mean share of right tokens from a position on"),
    Column("distill_loss", "nats", "SelfDistillDG: mean gated cross-entropy of the labels"),
    Column("first_error_frac", "share", "SCOPELite: positions from the first wrong token on"),
    Column("correction_loss", "nats", "SCOPELite: mean cross-entropy of the labels there"),
    Column("adv_abs_mean", "1", "GRPO, DrGRPO, DAPO, GRPOToken: mean size of the advantage"),
    Column("reverse_kl_mean", "nats", "GRPO, DrGRPO, GRPOToken: mean of 1/ratio + log ratio - 1"),
    Column("tpo_target_entropy", "nats", "TPO, TPOFullAction, TPOToken: mean entropy of the target"),
    Column("tpo_target_top_prob", "1", "TPO: mean largest probability of the target"),
    Column("tpo_skill_abs_mean", "1", "GroupPG: mean size of the standardised rewards"),
    Column("tpo_sample_adv_mean", "reward", "TPOFullAction: mean advantage of the taken action"),
    Column("candidate_reward", "reward", "TPOToken, GRPOToken: mean reward of all candidates"),
    Column("behavior_token_reward", "reward", "the same of the candidates that were taken"),
    Column("td_nonzero_frac", "share", "TEMPO: positions whose prefix value changes"),
    Column("log_ratio_mean", "nats", "PMDMean: mean log-ratio of a sequence"),
)

RATIO_COLUMNS: tuple[Column, ...] = (
    Column(
        "importance_ratio_mean", "1", "mean over trained tokens of pi(a) / pi_actor(a), before the last inner epoch"
    ),
    Column("importance_ratio_std", "1", "its standard deviation over those tokens (divisor N)"),
    Column("importance_ratio_max", "1", "its largest value"),
    Column("clip_frac", "share", "trained tokens with a ratio outside [1 - clip_low, 1 + clip_low], or of clip_high"),
)

SAMPLE_COLUMNS: tuple[Column, ...] = (
    Column("mixed_group_rate", "share", "groups with a spread of rewards / groups"),
    Column("retained_group_rate", "share", "groups that are trained on / groups"),
    Column("group_fallback", "1", "1 where no group had a spread and all are kept, else 0"),
    Column("replay_age", "updates", "age of the batch that was trained on"),
    Column("replay_size", "batches", "batches in the replay buffer"),
    Column("replay_priority", "1", "priority of the drawn batch"),
    Column("age_mean", "updates", "mean age of the batches trained on since the last row"),
    Column("age_std", "updates", "their standard deviation (divisor N)"),
    Column("effective_age", "updates", "their mean, weighted with the freshness weight that the loss gives them"),
)

DIAGNOSTIC_COLUMNS: tuple[Column, ...] = (
    Column("batch_entropy_before", "nats", "mean entropy on the batch before the step's updates"),
    Column("batch_entropy_after", "nats", "the same after them"),
    Column("batch_delta_entropy", "nats", "mean of entropy after - before"),
    Column("cov_prob_delta_logit", "1", "covariance of the taken token's probability and the change of its logit"),
    Column("entropy_drop_pos_adv", "nats", "mean of entropy before - after at tokens with a positive advantage"),
    Column("entropy_drop_neg_adv", "nats", "the same with a negative one"),
    Column("entropy_drop_surprisal_low", "nats", "the same in the lowest third of surprisal"),
    Column("entropy_drop_surprisal_mid", "nats", "the same in the middle third"),
    Column("entropy_drop_surprisal_high", "nats", "the same in the highest third"),
    Column("entropy_drop_delight_low", "nats", "the same in the lowest third of advantage x surprisal"),
    Column("entropy_drop_delight_mid", "nats", "the same in the middle third"),
    Column("entropy_drop_delight_high", "nats", "the same in the highest third"),
    Column("cos_method_ce", "1", "cosine of the rule's gradient with that of the oracle's cross-entropy"),
    Column("grad_norm", "1", "norm of the rule's gradient before it is clipped, of the same batch"),
    Column(
        "oracle_fit_delight_correlation", "1",
        "Pearson correlation over trained tokens of advantage x surprisal with the product of the gradients of the "
        "token's log-probability and of the oracle's cross-entropy: negative where delight picks what helps the oracle",
    ),
    Column("oracle_fit_advantage_correlation", "1", "the same of the advantage"),
    Column("oracle_fit_surprisal_correlation", "1", "the same of the surprisal"),
    Column("oracle_fit_gate_correlation", "1", "the same of sigmoid(advantage x surprisal / eta)"),
)  # fmt: skip

TIME_COLUMNS: tuple[Column, ...] = (
    Column("seconds", "s", "since the last row, shared by all runs of the trial"),
    Column("seconds_total", "s", "since the run started, pauses left out"),
)

STEP_COLUMNS: tuple[Column, ...] = (
    *EVALUATION_COLUMNS,
    Column("loss", "1", "the update rule's loss, of the last inner epoch"),
    *RULE_COLUMNS,
    *RATIO_COLUMNS,
    *SAMPLE_COLUMNS,
    *DIAGNOSTIC_COLUMNS,
    *TIME_COLUMNS,
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("final_test_error", "share", "test_error of the last row"),
    Column("final_entropy", "nats", "entropy of the last row"),
    Column("final_test_error_unscored", "share", "test_error_unscored of the last row"),
    Column("final_chain_reward", "reward", "chain_reward of the last row"),
    Column("final_perplexity", "1", "perplexity of the last row"),
    Column("final_greedy_separator_rate", "share", "greedy_separator_rate of the last row"),
    Column("first_step_entropy_low", "steps", "first evaluated step with an entropy of at most 0.1; missing: none"),
    Column("first_step_error_zero", "steps", "first evaluated step with test_error 0; missing: none"),
    Column(
        "mean_entropy", "nats",
        "area under entropy over step (trapezoids between rows, from the first with a value), divided by its length; a "
        "run that a rule stopped keeps its last value to steps_total, any other ends at its last row",
    ),
    Column("mean_replay_age", "updates", "mean age of all batches that were trained on, from age_mean"),
    Column("mean_effective_age", "updates", "the same mean of effective_age"),
)  # fmt: skip

"""Columns that a run of on-policy distillation may write: name, unit, meaning. docs/metrics.md lists them too.

A row is one evaluation, of the weights before the step. Columns of a batch describe the batch of that step, before its
update; the last row has none. Source: the published diagnostics, which have the prefix `diag_`.
"""

from trainable.runs.records import TOY_TIME_COLUMNS, Column

STEP_COLUMNS: tuple[Column, ...] = (
    Column("test_error", "fraction", "wrong tokens among the greedily decoded ones, on new prompts"),
    Column("entropy", "nats", "mean entropy of the student along the greedy sequences"),
    Column("greedy_separator_rate", "fraction", "separators (which are never correct) among the greedy tokens"),
    Column("loss", "1", "the loss of the step"),
    Column("reward", "fraction", "mean reward of the sampled sequences; nothing trains on it"),
    Column("reverse_kl", "nats", "exact KL(student || teacher), mean over the sampled positions"),
    Column("forward_kl", "nats", "exact KL(teacher || student) at the same positions"),
    Column("sampled_reverse_kl", "nats", "mean of log student - log teacher of the sampled tokens"),
    Column("student_entropy", "nats", "mean entropy of the student at the sampled positions"),
    Column("teacher_entropy", "nats", "mean entropy of the teacher at the sampled positions"),
    Column("entropy_gap", "nats", "student_entropy - teacher_entropy"),
    Column("top1_agreement", "fraction", "positions at which both have the same most likely token"),
    Column("overlap_at_k", "fraction", "the student's overlap_k most likely tokens that are among the teacher's too"),
    Column("student_topk_mass", "1", "OPDTopKReverseKL: probability that the student gives to the support"),
    Column("teacher_topk_mass", "1", "OPDTopKReverseKL: probability that the teacher gives to the support"),
    Column("topk_support_size", "tokens", "OPDTopKReverseKL: mean size of the support"),
    Column("is_warmup", "1", "1 in the steps before the switch to the top-k loss, otherwise 0"),
    Column("gradient_projection", "1", "measures_variance: projection of the gradient on a fixed random unit vector"),
    Column("gradient_norm", "1", "measures_variance: norm of the gradient"),
    *TOY_TIME_COLUMNS,
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("late_test_error", "fraction", "mean of test_error over the last 4 planned evaluations"),
    Column("final_test_error", "fraction", "test_error of the last row"),
    Column("final_entropy", "nats", "entropy of the last row"),
    Column("final_greedy_separator_rate", "fraction", "greedy_separator_rate of the last row"),
    Column("last_reverse_kl", "nats", "reverse_kl of the last row with a batch"),
    Column("last_top1_agreement", "fraction", "top1_agreement of the last row with a batch"),
    Column("last_overlap_at_k", "fraction", "overlap_at_k of the last row with a batch"),
    Column("last_reward", "fraction", "reward of the last row with a batch"),
    Column("last_student_topk_mass", "1", "student_topk_mass of the last row with a batch"),
    Column("last_teacher_topk_mass", "1", "teacher_topk_mass of the last row with a batch"),
    Column("switch_test_error", "fraction", "test_error at the switch from the warm-up to the top-k loss"),
    Column("error_since_switch", "fraction", "final_test_error - switch_test_error"),
    Column(
        "gradient_variance",
        "1",
        "measures_variance: variance (divisor n - 1) of gradient_projection over the batches; published as such",
    ),
    Column(
        "log10_gradient_variance",
        "decades",
        "measures_variance: decimal logarithm of gradient_variance",
    ),
    Column("mean_gradient_norm", "1", "measures_variance: mean of gradient_norm over the batches"),
)

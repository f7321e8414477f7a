"""Columns that a run of pedagogical reinforcement learning may write. docs/metrics.md lists them too.

A row is one evaluation, of the weights before the step. Columns of a batch describe the batches of that step; the last
row has none. A student that learns alone has no teacher columns. There is no column for the ratio of the clipped loss,
which is always 1, since every batch is trained on once.
"""

from trainable.runs.records import TOY_TIME_COLUMNS, Column

STEP_COLUMNS: tuple[Column, ...] = (
    Column("test_error", "fraction", "wrong answers of the student's greedy completions to new prompts"),
    Column("entropy", "nats", "mean entropy of the student along its greedy completions"),
    Column("teacher_test_error", "fraction", "wrong answers of the teacher's greedy completions, with the hint"),
    Column("teacher_entropy", "nats", "mean entropy of the teacher along its greedy completions"),
    Column("task_reward", "fraction", "right answers among the completions that a policy is rewarded for"),
    Column("teacher_reward", "reward", "mean reward of the teacher: of the task, with what its method adds"),
    Column("learnability", "1", "mean of exp(-learnability_lambda spike_penalty)"),
    Column("spike_penalty", "nats", "mean soft maximum of the student's surprise gaps in a completion"),
    Column("avg_surprise_gap", "nats", "mean of the student's largest log-probability minus that of the token"),
    Column("max_surprise_gap", "nats", "mean over completions of the largest surprise gap"),
    Column("avg_student_surprisal", "nats", "mean of minus the student's log-probability of the teacher's tokens"),
    Column("teacher_loss", "1", "the teacher's loss in its last update of the step"),
    Column("adv_abs_mean", "1", "mean absolute advantage in groups"),
    Column("mixed_group_rate", "fraction", "groups with right and wrong answers / groups"),
    Column("student_loss", "1", "the student's loss in its last update of the step"),
    Column("gate_mean", "1", "mean gate of the student's imitation; 1 without a gate"),
    Column("lesson_log_prob_mean", "nats", "mean log-probability of the imitated tokens under the student"),
    Column("lesson_task_reward", "fraction", "right answers among the imitated completions"),
    *TOY_TIME_COLUMNS,
)

TRIAL_COLUMNS: tuple[Column, ...] = (
    Column("late_test_error", "fraction", "mean of test_error over the last 4 planned evaluations"),
    Column("late_teacher_test_error", "fraction", "mean of teacher_test_error over the last 4 planned evaluations"),
    Column("final_entropy", "nats", "entropy of the last row"),
    Column("last_mixed_group_rate", "fraction", "mixed_group_rate of the last row with a batch"),
    Column("last_learnability", "1", "learnability of the last row with a batch"),
)

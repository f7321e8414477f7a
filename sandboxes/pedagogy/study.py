"""Does a student learn more from a teacher that sees the answer, and is rewarded for what the student can learn?

The published task is no cold start: a random student is right in one of seven cases, so it can learn alone as well. On
the cold task, with two graded tokens of eleven values, it is right in one of 169.
"""

from collections.abc import Mapping

from sandboxes.pedagogy.settings import PedagogyConfig
from sandboxes.toys.study import (
    Description,
    count_transformer_parameters,
    estimate_toy_bytes,
    make_summary_columns,
    make_toy_family,
    make_toy_study,
)
from search_spaces.declaration.study import Study
from trainable.families import OutcomeColumn, Settings
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
"""A row is one evaluation, of the weights before the step. Columns of a batch describe the batches of that step; the
last row has none. A student that learns alone has no teacher columns. There is no column for the ratio of the clipped
loss, which is always 1, since every batch is trained on once."""
TRIAL_COLUMNS = make_summary_columns(
    STEP_COLUMNS, "late_test_error late_teacher_test_error final_entropy last_mixed_group_rate last_learnability"
)

PEDAGOGY = make_toy_family(
    name="pedagogy",
    trainable="sandboxes.pedagogy.trial:Pedagogy",
    config_class=PedagogyConfig,
    step_columns=STEP_COLUMNS,
    trial_columns=TRIAL_COLUMNS,
    outcomes=(
        OutcomeColumn("late_test_error", 0.05, "it is what the student can do without the hint", is_common=True),
        OutcomeColumn("late_teacher_test_error", 0.05, "it shows whether the teacher uses the hint"),
        OutcomeColumn("final_entropy", 0.1),
    ),
    description=Description(
        label="pedagogical reinforcement learning",
        outcome="test error of the student at the end",
        panels={"test_error": "test error (fraction)", "teacher_test_error": "test error of the teacher (fraction)"},
    ),
    is_higher_better=False,
    get_environment=lambda settings: f"{settings.get('task', '')}-{settings.get('answer_len', '')}",
    estimate_bytes=lambda config, n_parameters: estimate_toy_bytes(count_transformer_parameters(config), n_networks=2),
    estimate_step_seconds=lambda config: 20e-3 * config.batch_size / 96,
    progress_columns={"test_error": "test error", "teacher_test_error": "of the teacher", "entropy": "entropy"},
    log_columns=("test_error", "teacher_test_error", "entropy", "task_reward", "learnability", "student_loss"),
)

ARMS: Mapping[str, Settings] = {method: {"method": method} for method in ("StudentGRPO", "PedagogicalRL", "TeacherRL")}


def _make_study(name: str, question: str, settings: Settings) -> Study:
    return make_toy_study(
        family=PEDAGOGY,
        name=name,
        question=question,
        arms=ARMS,
        baseline="StudentGRPO",
        fixed_settings={"trainer.test_freq": 20, "trainer.resume_every": 100, **settings},
        setting="method",
        contrasts={"PedagogicalRL against TeacherRL": (("PedagogicalRL", "TeacherRL"),)},
    )


STUDY = _make_study("pedagogy", __doc__, {"trainer.total_training_steps": 300})
COLD_STUDY = _make_study(
    "pedagogy-cold",
    "Does a teacher that sees the answer help where the student alone is hardly ever right?",
    {"content_vocab_size": 11, "answer_len": 2, "trainer.total_training_steps": 1000},
)
STUDIES = (STUDY, COLD_STUDY)
SUITES = {"sandbox-companions": tuple(study.name for study in STUDIES)}

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
from trainable.runs.records import TOY_TIME_COLUMNS, Column, read_columns

STEP_COLUMNS: tuple[Column, ...] = (*read_columns(__file__)["step"], *TOY_TIME_COLUMNS)
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

"""Do scores of whole sets over random weights of the objectives teach a policy to cover them, and what does that cost?

The published front has one deployment weight, at which a single compromise is the best: no method can gain from
coverage there. On the large front four objectives are asked for one by one, too. `simplex_score` says on both what a
set is worth over all weights.
"""

from collections.abc import Mapping

from sandboxes.toys.study import (
    Description,
    estimate_toy_bytes,
    make_summary_columns,
    make_toy_family,
    make_toy_study,
    set_length,
)
from sandboxes.vector_rewards.settings import VectorRewardConfig
from search_spaces.declaration.study import Study
from trainable.families import OutcomeColumn, Settings
from trainable.runs.records import TOY_TIME_COLUMNS, Column, read_columns

STEP_COLUMNS: tuple[Column, ...] = (*read_columns(__file__)["step"], *TOY_TIME_COLUMNS)
"""A row is one evaluation, of the weights before the step. Columns of a batch describe the batch of that step; the last
row has none. Deployment scores are means over the task's deployment weights, of which the published front has one."""
TRIAL_COLUMNS = make_summary_columns(
    STEP_COLUMNS,
    "late_simplex_score final_simplex_gap late_best_at_1 late_best_at_3 late_best_at_9 "
    "late_mean_scalar_reward late_pool_diversity_l1 final_entropy",
)


def estimate_bytes(config: VectorRewardConfig, n_parameters: int) -> tuple[int, int]:
    """Estimate the maximum bytes of one run's checkpoint, and of a row with everything derived from it."""
    max_actions = 24  # of the large front
    parameters = config.hidden * (config.num_prompts + config.num_candidates + config.hidden + max_actions + 1)
    return estimate_toy_bytes(parameters + max_actions)


VECTOR_REWARDS = make_toy_family(
    name="vector_rewards",
    trainable="sandboxes.vector_rewards.trial:VectorRewards",
    config_class=VectorRewardConfig,
    step_columns=STEP_COLUMNS,
    trial_columns=TRIAL_COLUMNS,
    outcomes=(
        OutcomeColumn("late_simplex_score", 0.01, "it is what a set is worth over all weights", is_common=True),
        OutcomeColumn("late_best_at_1", 0.02, "it is what a single answer is worth at deployment"),
        OutcomeColumn("late_best_at_3", 0.02),
        OutcomeColumn("late_best_at_9", 0.02, "it is what nine answers are worth at deployment"),
        OutcomeColumn("late_mean_scalar_reward", 0.02),
        OutcomeColumn("late_pool_diversity_l1", 0.1, "it shows whether the candidates of a set differ"),
    ),
    description=Description(
        label="vector rewards",
        outcome="the score of a set over all weights",
        panels={"simplex_score": "score over all weights (reward)", "best_at_9": "best of 9 (reward)"},
    ),
    is_higher_better=True,
    estimate_bytes=estimate_bytes,
    estimate_step_seconds=lambda config: 3e-3 * config.batch_size / 128,
    progress_columns={"simplex_score": "simplex score", "best_at_9": "best@9", "entropy": "entropy"},
    log_columns=(
        *("simplex_score", "mean_scalar_reward", "best_at_1", "best_at_9", "pool_diversity_l1", "entropy", "loss"),
    ),
)

ARMS: Mapping[str, Settings] = {
    "ScalarGRPO": {"method": "ScalarGRPO", "num_candidates": 1},
    "MultiRLVR": {"method": "MultiRLVR"},
    "VPOGRPO": {"method": "VPOGRPO"},
}


def _make_study(name: str, question: str, task: str) -> Study:
    return make_toy_study(
        family=VECTOR_REWARDS,
        name=name,
        question=question,
        arms=ARMS,
        baseline="MultiRLVR",
        fixed_settings={"task": task, **set_length(500, 20, 100)},
        setting="method",
        contrasts={"VPOGRPO against ScalarGRPO": (("VPOGRPO", "ScalarGRPO"),)},
    )


STUDY = _make_study("vpo", __doc__, "pareto_front")
LARGE_STUDY = _make_study(
    "vpo-large",
    "Do scores of whole sets help at deployment where four objectives are asked for one by one?",
    "pareto_large",
)
STUDIES = (STUDY, LARGE_STUDY)
SUITES = {"sandbox-companions": tuple(study.name for study in STUDIES)}

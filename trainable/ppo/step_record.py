"""Records of a training step: one type per part of the step, whose fields are columns of `steps`.

For the unit and formula of each column, see docs/metrics.md and `trainable.runs.records.STEP_COLUMNS`, which a test
compares with the fields here. A field is None if it was not measured in the step.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

Number = float | int | None


@dataclass(frozen=True)
class RolloutSummary:
    """Means over all P x G episodes of the step, before the filter."""

    train_success: float
    train_pass_at_group: float
    train_reward: float
    train_actions: float
    train_invalid_turns: float
    train_response_tokens: float


@dataclass(frozen=True)
class EngineMismatch:
    """Mismatch of log-probs between trainer and engine, for an engine with its own copy of the weights.

    engine_prompt_mismatch: on the fixed prompt after the last sync, or None before the first sync. The others are over
    the sampled tokens, or None if the trainer has not recomputed their log-probs.
    """

    engine_prompt_mismatch: float | None
    engine_mismatch_mean: float | None = None
    engine_mismatch_max: float | None = None
    engine_kl: float | None = None
    engine_ess_fraction: float | None = None


@dataclass(frozen=True)
class FilterDecision:
    """Reward spread of the groups before the filter, and how many groups it selected."""

    reward_std: float
    reward_std_max: float
    zero_std_groups: int
    groups: int
    groups_kept: int
    kept_ratio: float
    reward_std_kept: float


@dataclass(frozen=True)
class BatchSummary:
    """The batch before the update, including copies of episodes."""

    batch_size: int
    trained_tokens: int
    padding_fraction: float
    entropy: float | None
    kl_to_reference: float | None = None
    value_mean: float | None = None
    explained_variance: float | None = None


@dataclass(frozen=True)
class Budget:
    """Optimizer steps, actions and tokens of the step.

    Filters change them, so comparisons of filters must report them. optimizer_steps: applied steps of the policy.
    env_steps: executed actions. trained_tokens: including copies in the batch.
    """

    optimizer_steps: int
    env_steps: int
    sampled_tokens: int
    trained_tokens: int

    def add(self, other: "Budget") -> "Budget":
        """Add both budgets."""
        return Budget(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Validation:
    """Results on all validation levels: sampled, and also greedy before training."""

    val_success: float
    val_success_unseen: float | None
    val_reward: float
    val_invalid_turns: float
    val_kl_to_reference: float | None = None
    val_greedy_success: float | None = None


@dataclass(frozen=True)
class FinalEvaluation:
    """Results that are measured once, at the end of a run, and the wall and CPU seconds that it took.

    test_success, test_greedy_success: None if the run has no test levels.
    """

    val_greedy_success: float
    test_success: float | None
    test_greedy_success: float | None
    seconds: float
    cpu_seconds: float

    def add_to_row(self, row: Mapping[str, Number]) -> dict[str, Number]:
        """Add the results to the last `row` of the run, and the seconds to its time columns."""
        # The evaluation counts as validation, and so in the times of the step and of the run.
        added_seconds = {
            "seconds_validation": self.seconds,
            "seconds_step": self.seconds,
            "seconds_total": self.seconds,
            "cpu_seconds_step": self.cpu_seconds,
        }
        # `seconds_validation` is None if the last step had no validation.
        return {
            **row,
            "val_greedy_success": self.val_greedy_success,
            "test_success": self.test_success,
            "test_greedy_success": self.test_greedy_success,
            **{name: (row.get(name) or 0.0) + seconds for name, seconds in added_seconds.items()},
        }


@dataclass(frozen=True)
class StepTiming:
    """Seconds of the step and of its phases, and the MFU of the phases.

    phases, mfu: by name of the phase, without phases that did not run. seconds_total: sum of seconds_step over the run
    so far, across restarts.
    """

    phases: Mapping[str, float]
    mfu: Mapping[str, float]
    peak_flops_per_s: float
    seconds_step: float
    cpu_seconds_step: float
    seconds_total: float

    def to_row(self) -> dict[str, Number]:
        """Make the columns of times and MFU."""
        return {
            **{f"seconds_{phase}": seconds for phase, seconds in self.phases.items()},
            **{f"mfu_{phase}": fraction for phase, fraction in self.mfu.items()},
            "peak_flops_per_s": self.peak_flops_per_s,
            "seconds_step": self.seconds_step,
            "cpu_seconds_step": self.cpu_seconds_step,
            "seconds_total": self.seconds_total,
        }


@dataclass(frozen=True)
class StepRecord:
    """The record of one training step.

    total_budget: sum of `budget` over all steps so far. batch: None if the filter dropped all groups. base_validation:
    the validation before training, recorded with step 1. update, collapse, measures: columns by name, for the optimizer
    steps of policy and critic, the collapse diagnostics, and the measures of the game. May be empty.
    """

    rollout: RolloutSummary
    filter: FilterDecision
    consecutive_empty_steps: int
    budget: Budget
    total_budget: Budget
    timing: StepTiming
    engine_mismatch: EngineMismatch | None = None
    batch: BatchSummary | None = None
    base_validation: Validation | None = None
    validation: Validation | None = None
    update: Mapping[str, Number] = field(default_factory=dict)
    collapse: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    def to_row(self) -> dict[str, Number]:
        """Make the columns of the step, without those that were not measured (None)."""
        summaries = (self.rollout, self.engine_mismatch, self.filter, self.batch, self.validation)
        columns: dict[str, Number] = {
            "consecutive_empty_steps": self.consecutive_empty_steps,
            **self.update,
            **self.collapse,
            **self.measures,
        }
        for summary in summaries:
            columns |= {} if summary is None else asdict(summary)
        columns |= asdict(self.budget) | {f"total_{name}": number for name, number in asdict(self.total_budget).items()}
        if self.base_validation is not None:
            columns |= {f"base_{name}": number for name, number in asdict(self.base_validation).items()}
        columns |= self.timing.to_row()
        columns["tokens_per_second"] = self.budget.sampled_tokens / self.timing.phases["rollout"]
        return {name: number for name, number in columns.items() if number is not None}

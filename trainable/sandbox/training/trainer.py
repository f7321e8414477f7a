"""Trainer of the update-rule sandbox: trains all seeds of a condition together, step by step."""

import time
from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from trainable.runs.nonfinite import format_names
from trainable.runs.run import LinesByFile, Row, TrainerState
from trainable.runs.training import StepResult
from trainable.sandbox.batch.rngs import MemberRngs
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.batch.slices import flatten_rollouts, slice_member, stack_members, unflatten_rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.kondo import screen_rollouts
from trainable.sandbox.rules.rule import UpdateRule
from trainable.sandbox.tasks.task import Task
from trainable.sandbox.training.optimizer import MemberAdam
from trainable.sandbox.training.prefixes import add_prefix, select_prefix
from trainable.sandbox.training.replay import AgeStatistics, ReplayDraw, make_buffer
from trainable.sandbox.training.update import Learner

UNIFORM_GROUPS = "uniform_groups"
"""Name of the stop rule for too many consecutive batches without a mixed group."""
COSINE_EVERY = 5
"""Evaluations per measurement of the gradient's direction, which costs two more backward passes."""

# Keys of `Rollouts.scalars`, and their columns.
_SAMPLER_COLUMNS = {
    "informative_group_rate": "mixed_group_rate",
    "retained_group_rate": "retained_group_rate",
    "used_group_fallback": "group_fallback",
}


class UpdateRuleTrainer:
    """Trains one model per seed; all models have the same configuration.

    When a member ends, the others continue as if it had never been there, up to rounding in sums whose order depends on
    the number of members.

    Attributes:
        seeds: the members that are still training.
        final_states: last state of each member that a rule or the last step ended. Members that failed have none.

    Args:
        config: the configuration; its own seed is ignored.
        seeds: different numbers, one per member.
        task: the task to learn.
        objective: the function of the update rule that `config` names.
    """

    def __init__(self, config: UpdateRuleConfig, seeds: Sequence[int], task: Task, objective: UpdateRule) -> None:
        if len(set(seeds)) != len(seeds) or not seeds:
            raise ValueError(f"seeds={list(seeds)}: must be one or more different numbers, one per member.")
        self.config, self.task, self.objective = config, task, objective
        self.step_index = 0
        self.final_states: dict[int, TrainerState] = {}
        self._reset_members(seeds)
        self._start_time, self._resumed_seconds, self._seconds_at_last_row = time.perf_counter(), 0.0, 0.0

    def _reset_members(self, seeds: Sequence[int]) -> None:
        """Set up the members of `seeds` as before the first step."""
        self.seeds = tuple(seeds)
        self.rngs = MemberRngs(seeds)
        models = self.task.make_models(self.rngs)
        optimizer = MemberAdam(models.get_parameters(), self.config.lr)
        self.learner = Learner(self.config, self.task, self.objective, models, optimizer)
        self.buffer = make_buffer(self.config)
        self.age_statistics = AgeStatistics(torch.zeros(len(seeds), 5, dtype=torch.float64))
        self.consecutive_uniform_batches = torch.zeros(len(seeds), dtype=torch.int64)

    def step(self) -> StepResult:
        """Train on one batch, in the order of the source: evaluate, sample, delay or replay, screen, update.

        After the last batch, the next call evaluates, and every member ends. A member with too many consecutive uniform
        batches ends before it trains on the last of them; then this call does no update, and the next call repeats the
        step for the other members.
        """
        step = self.step_index
        # The last weights are evaluated too, so the last row is written by a call that trains on nothing.
        if step == self.config.trainer.total_training_steps:
            return self._end_members({seed: {} for seed in self.seeds})
        is_row = self._is_evaluation_step(step)
        evaluation = self._evaluate() if is_row else {}
        replay_draw = self._draw_batch()
        uniform_counts = torch.where(_is_uniform(replay_draw.rollouts), self.consecutive_uniform_batches + 1, 0)
        # Until here nothing of the trainer has changed, and random numbers depend on the step alone. So the members
        # that continue can repeat the step, and draw the same batch.
        if bool((uniform_counts >= self.config.fallback_patience).any()):
            return self._end_members(self._make_stop_columns(uniform_counts))
        self.buffer, self.consecutive_uniform_batches = replay_draw.buffer, uniform_counts
        self.age_statistics.add(replay_draw.rollouts.age, self._compute_freshness(replay_draw.rollouts.age))
        rollouts, screen_metrics = self._screen_batch(replay_draw.rollouts)
        update_result = self.learner.update(rollouts, is_row, is_row and self._is_cosine_step(step))
        self.step_index += 1
        rows = (
            self._make_rows(
                {**evaluation, **update_result.metrics, **screen_metrics, **self._make_sampler_columns(replay_draw)},
                step,
            )
            if is_row
            else {}
        )
        return self._drop_failed_members(rows, update_result.nonfinite_names)

    def _is_evaluation_step(self, step: int) -> bool:
        # Counted from the first step that trains on a batch of the age `delay`, as in the published rows.
        return step >= self.config.delay and (step - self.config.delay) % self.config.trainer.test_freq == 0

    def _is_cosine_step(self, step: int) -> bool:
        is_due = (step - self.config.delay) // self.config.trainer.test_freq % COSINE_EVERY == 0
        return self.config.diagnostics and is_due

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Tensor]:
        return self.task.evaluate(self.learner.models, self.rngs, self.step_index)

    @torch.no_grad()
    def _draw_batch(self) -> ReplayDraw:
        new_rollouts = self.task.sample(self.learner.models, self.rngs, self.step_index)
        return self.buffer.draw(new_rollouts, self.rngs.uniform("sandbox_replay", self.step_index, shape=()))

    def _screen_batch(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, Tensor]]:
        if not self.config.rule.screens_batch:
            return rollouts, {}
        count = rollouts.rewards.shape[1]
        return screen_rollouts(
            rollouts, self.rngs.uniform("sandbox_screen", self.step_index, shape=(count,)), self.config
        )

    def _compute_freshness(self, age: Tensor) -> Tensor:
        """[E], the weight of a batch in the loss because of its age; 1 if the rule does not discount age."""
        # discounts_age is a bool: the exponent is 0 for all other rules.
        return torch.exp(-self.config.replay_age_decay * age.double() * self.config.rule.discounts_age)

    def _make_sampler_columns(self, replay_draw: ReplayDraw) -> dict[str, Tensor]:
        """Columns of the sampler and the replay buffer for the batch that was trained on."""
        scalars = replay_draw.rollouts.scalars
        columns = {column: scalars[name] for name, column in _SAMPLER_COLUMNS.items() if name in scalars}
        if self.config.replay_capacity:
            size = torch.full_like(replay_draw.rollouts.age, len(self.buffer.batches))
            columns |= {
                "replay_age": replay_draw.rollouts.age,
                "replay_size": size,
                "replay_priority": replay_draw.priority,
            }
        return columns

    def _make_rows(self, metrics: dict[str, Tensor], step: int) -> dict[int, Row]:
        """One row per seed; a number that is not finite, such as a mean over nothing, is omitted."""
        # The statistics restart at every row, also when the columns are left out: all ages are 0 then.
        age_columns = self.age_statistics.compute_and_reset()
        if self.config.delay or self.config.replay_capacity:
            metrics = metrics | age_columns
        elapsed = self._measure_elapsed()
        time_columns = {"seconds": elapsed - self._seconds_at_last_row, "seconds_total": elapsed}
        self._seconds_at_last_row = elapsed
        columns = {name: values.tolist() for name, values in metrics.items()}
        return {
            seed: {
                "step": step,
                **{name: values[e] for name, values in columns.items() if isfinite(values[e])},
                **time_columns,
            }
            for e, seed in enumerate(self.seeds)
        }

    def _make_stop_columns(self, uniform_counts: Tensor) -> dict[int, Row]:
        """By seed, the columns that explain the stop of each member with too many consecutive uniform batches."""
        patience = self.config.fallback_patience
        return {
            seed: {
                "stop_rule": UNIFORM_GROUPS,
                "stop_value": float(count),
                "stop_threshold": float(patience),
                "stop_step": self.step_index,
            }
            for seed, count in zip(self.seeds, uniform_counts.tolist(), strict=True)
            if count >= patience
        }

    def _end_members(self, stop_columns: dict[int, Row]) -> StepResult:
        """End the members in `stop_columns`, keep their states, and return the last row of each with these columns."""
        age_sums, seconds_at_last_row = self.age_statistics.sums, self._seconds_at_last_row
        rows = self._make_rows(self._evaluate(), self.step_index)
        # The members that continue get no row here, so their sums and their clock must not start again.
        self.age_statistics.sums, self._seconds_at_last_row = age_sums, seconds_at_last_row
        self.final_states |= {seed: self.get_state(seed) for seed in stop_columns}
        self._keep_members([seed for seed in self.seeds if seed not in stop_columns])
        return StepResult({seed: {**rows[seed], **stop_row} for seed, stop_row in stop_columns.items()})

    def _drop_failed_members(self, rows: dict[int, Row], nonfinite_names: list[list[str]]) -> StepResult:
        """The result of the step, in which members with a loss, gradient or weight that is not finite are failures."""
        step = self.step_index - 1  # step_index already counts the step
        failures = {
            seed: f"values of step {step} were not finite: {format_names(names)}"
            for seed, names in zip(self.seeds, nonfinite_names, strict=True)
            if names
        }
        if not failures:
            return StepResult(rows)
        self._keep_members([seed for seed in self.seeds if seed not in failures])
        return StepResult({seed: row for seed, row in rows.items() if seed not in failures}, failures=failures)

    def _keep_members(self, seeds: Sequence[int]) -> None:
        """Continue with `seeds` only, through their states, exactly as a run that is resumed from a checkpoint."""
        if seeds:
            self.load_states([self.get_state(seed) for seed in seeds])
        self.seeds = tuple(seeds)

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """The last row, unchanged, because every row is an evaluation."""
        return row, {}

    def close(self) -> None:
        """Do nothing: the trainer uses memory only."""

    def _measure_elapsed(self) -> float:
        return self._resumed_seconds + time.perf_counter() - self._start_time

    def get_state(self, seed: int) -> TrainerState:
        """Everything that the member of `seed` needs to continue after its last step."""
        # An ended member has no row in the tensors any more.
        if seed in self.final_states:
            return self.final_states[seed]
        member = self.seeds.index(seed)
        # Tensors of all members at first; `slice_member` below takes this member's.
        tensors = add_prefix(self.learner.optimizer.state_dict(), "adam") | {"ages": self.age_statistics.sums}
        batches = self.buffer.drawable_batches
        for index, stored_batch in enumerate(batches):
            tensors |= add_prefix(flatten_rollouts(stored_batch.rollouts), f"batches/{index}")
        values = {
            "seed": seed,
            "step": self.step_index,
            "uniform_batches": int(self.consecutive_uniform_batches[member]),
            "batches": len(batches),
            "group_size": batches[0].rollouts.group_size if batches else None,
            "seconds": self._measure_elapsed(),
            "seconds_at_row": self._seconds_at_last_row,
        }
        return TrainerState(slice_member(tensors, member), values)

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Continue with the members of `states`, which may come from different trainers.

        Raises ValueError if they do not fit together or to the configuration; then the trainer is unchanged.
        """
        # Loading fills only objects that it has made itself, so a shallow copy is enough to restore the trainer.
        previous_attributes = dict(vars(self))
        try:
            self._load_states(states)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            # Missing keys, wrong types, and shapes that do not stack all mean the same: the states do not fit.
            vars(self).update(previous_attributes)
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _load_states(self, states: Sequence[TrainerState]) -> None:
        first_values = states[0].values
        if len({state.values["step"] for state in states}) > 1:
            raise ValueError(
                f"The states are from the steps {[state.values['step'] for state in states]}, but members that "
                "continue together must have the same step."
            )
        tensors = stack_members([state.tensors for state in states])
        self._reset_members([state.values["seed"] for state in states])
        self.learner.optimizer.load_state_dict(select_prefix(tensors, "adam"))
        self.age_statistics.sums = tensors["ages"]
        for index in range(first_values["batches"]):
            # `with_batch` computes the priority again, which a state does not contain.
            self.buffer = self.buffer.with_batch(
                unflatten_rollouts(select_prefix(tensors, f"batches/{index}"), first_values["group_size"])
            )
        self.consecutive_uniform_batches = torch.tensor([state.values["uniform_batches"] for state in states])
        self.step_index = first_values["step"]
        self._start_time = time.perf_counter()
        self._resumed_seconds = first_values["seconds"]
        self._seconds_at_last_row = first_values["seconds_at_row"]


def _is_uniform(rollouts: Rollouts) -> Tensor:
    """[E], whether the rewards differ in no group of the batch, so that all groups are kept; False without groups."""
    # Only grouped samplers report the flag; a comparison of rewards over different prompts would mean nothing.
    zeros = torch.zeros(len(rollouts.rewards))
    return rollouts.scalars.get("used_group_fallback", zeros) > 0

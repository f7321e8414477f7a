"""One training step of the update-rule sandbox, for all seeds of a condition at once."""

import time
from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

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
COSINE_EVERY = 5
"""Evaluations from one measured direction of the gradient to the next."""

_SAMPLER_COLUMNS = {
    "informative_group_rate": "mixed_group_rate",
    "retained_group_rate": "retained_group_rate",
    "used_group_fallback": "group_fallback",
}


class UpdateRuleTrainer:
    """Trains one model a seed, all of one configuration, side by side.

    config: its own seed is not read. seeds: different ones. task: what is learned. objective: the function of the
    update rule that `config` names.

    A member that has ended leaves: what goes on is what the others would be if it had never been there, up to the
    rounding of sums whose order depends on how many there are. `seeds` are those that go on; `left` holds the last
    state of those that a rule or the last step ended, and none of those that failed.
    """

    def __init__(self, config: UpdateRuleConfig, seeds: Sequence[int], task: Task, objective: UpdateRule) -> None:
        if len(set(seeds)) != len(seeds) or not seeds:
            raise ValueError(f"seeds {list(seeds)} are not different ones, one a member.")
        self.config, self.task, self.objective = config, task, objective
        self.step_index = 0
        self.final_states: dict[int, TrainerState] = {}
        self._reset_members(seeds)
        self._start_time, self._resumed_seconds, self._seconds_at_last_row = time.perf_counter(), 0.0, 0.0

    def _reset_members(self, seeds: Sequence[int]) -> None:
        """Members of `seeds` as they are before the first step."""
        self.seeds = tuple(seeds)
        self.rngs = MemberRngs(seeds)
        models = self.task.make_models(self.rngs)
        optimizer = MemberAdam(models.get_parameters(), self.config.lr)
        self.learner = Learner(self.config, self.task, self.objective, models, optimizer)
        self.buffer = make_buffer(self.config)
        self.age_statistics = AgeStatistics(torch.zeros(len(seeds), 5, dtype=torch.float64))
        self.consecutive_uniform_batches = torch.zeros(len(seeds), dtype=torch.int64)

    def step(self) -> StepResult:
        """One batch of rollouts, in the documents' order: evaluate, sample, delay or replay, screen, update.

        Once all batches are trained on, the next call evaluates, and every member leaves. A member with too many
        uniform batches in a row leaves before it is trained on the last of them; the others take this step anew.
        """
        step = self.step_index
        if step == self.config.trainer.total_training_steps:
            return self._end_members({seed: {} for seed in self.seeds})
        is_row = self._is_evaluation_step(step)
        evaluation = self._evaluate() if is_row else {}
        replay_draw = self._draw_batch()
        uniform_counts = torch.where(_is_uniform(replay_draw.rollouts), self.consecutive_uniform_batches + 1, 0)
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
        return self._drop_failed_members(rows, update_result.is_finite)

    def _is_evaluation_step(self, step: int) -> bool:
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
        """[E], the weight that the loss gives a batch for its age; 1 where the rule does not discount it."""
        return torch.exp(-self.config.replay_age_decay * age.double() * self.config.rule.discounts_age)

    def _make_sampler_columns(self, replay_draw: ReplayDraw) -> dict[str, Tensor]:
        """Columns of the batch that was trained on and of the batches since the last row."""
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
        """A row a member; a number that is not there, such as a mean of nothing, is left out."""
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
        """By seed, what says why a member ended, of those with too many uniform batches in a row."""
        patience = self.config.fallback_patience
        return {
            seed: {
                "stop_rule": UNIFORM_GROUPS, "stop_value": float(count), "stop_threshold": float(patience),
                "stop_step": self.step_index,
            }
            for seed, count in zip(self.seeds, uniform_counts.tolist(), strict=True)
            if count >= patience
        }  # fmt: skip

    def _end_members(self, stop_columns: dict[int, Row]) -> StepResult:
        """The last row of the members in `why`, with what it says there; they leave, and their states are kept."""
        age_sums, seconds_at_last_row = self.age_statistics.sums, self._seconds_at_last_row
        rows = self._make_rows(self._evaluate(), self.step_index)
        self.age_statistics.sums, self._seconds_at_last_row = (
            age_sums,
            seconds_at_last_row,
        )  # of the others, whose row this is not
        self.final_states |= {seed: self.get_state(seed) for seed in stop_columns}
        self._keep_members([seed for seed in self.seeds if seed not in stop_columns])
        return StepResult({seed: {**rows[seed], **said} for seed, said in stop_columns.items()})

    def _drop_failed_members(self, rows: dict[int, Row], is_finite: Tensor) -> StepResult:
        """What the step gave, once the members leave whose losses or gradients were not finite."""
        if bool(is_finite.all()):
            return StepResult(rows)
        is_finite_by_seed = dict(zip(self.seeds, is_finite.tolist(), strict=True))
        message = f"loss or gradient of step {self.step_index - 1} was not finite"
        self._keep_members([seed for seed in self.seeds if is_finite_by_seed[seed]])
        return StepResult(
            {seed: row for seed, row in rows.items() if is_finite_by_seed[seed]},
            failures={seed: message for seed in is_finite_by_seed if not is_finite_by_seed[seed]},
        )

    def _keep_members(self, seeds: Sequence[int]) -> None:
        """Go on with `seeds` alone: what is read back from disk later is put together in the same way."""
        if seeds:
            self.load_states([self.get_state(seed) for seed in seeds])
        self.seeds = tuple(seeds)

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """The last row as it is: each has an evaluation."""
        return row, {}

    def close(self) -> None:
        """Nothing: all is memory."""

    def _measure_elapsed(self) -> float:
        return self._resumed_seconds + time.perf_counter() - self._start_time

    def get_state(self, seed: int) -> TrainerState:
        """Everything that the member of `seed` needs to go on after its last step."""
        if seed in self.final_states:
            return self.final_states[seed]
        member = self.seeds.index(seed)
        tensors = add_prefix(self.learner.optimizer.state_dict(), "adam") | {"ages": self.age_statistics.sums}
        batches = self.buffer.drawable_batches
        for index, stored_batch in enumerate(batches):
            tensors |= add_prefix(flatten_rollouts(stored_batch.rollouts), f"batches/{index}")
        values = {
            "seed": seed, "step": self.step_index, "uniform_batches": int(self.consecutive_uniform_batches[member]),
            "batches": len(batches), "group_size": batches[0].rollouts.group_size if batches else None,
            "seconds": self._measure_elapsed(), "seconds_at_row": self._seconds_at_last_row,
        }  # fmt: skip
        return TrainerState(slice_member(tensors, member), values)

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Go on with the members of `states`, whoever they were beside.

        ValueError where they do not fit, and the members are as they were.
        """
        previous_attributes = dict(vars(self))
        try:
            self._load_states(states)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            vars(self).update(previous_attributes)
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _load_states(self, states: Sequence[TrainerState]) -> None:
        first_values = states[0].values
        if len({state.values["step"] for state in states}) > 1:
            raise ValueError(f"states are of the steps {[state.values['step'] for state in states]}, not of one.")
        tensors = stack_members([state.tensors for state in states])
        self._reset_members([state.values["seed"] for state in states])
        self.learner.optimizer.load_state_dict(select_prefix(tensors, "adam"))
        self.age_statistics.sums = tensors["ages"]
        for index in range(first_values["batches"]):
            self.buffer = self.buffer.with_batch(
                unflatten_rollouts(select_prefix(tensors, f"batches/{index}"), first_values["group_size"])
            )
        self.consecutive_uniform_batches = torch.tensor([state.values["uniform_batches"] for state in states])
        self.step_index = first_values["step"]
        self._start_time, self._resumed_seconds, self._seconds_at_last_row = (
            time.perf_counter(), first_values["seconds"], first_values["seconds_at_row"],
        )  # fmt: skip


def _is_uniform(rollouts: Rollouts) -> Tensor:
    """[E], whether no group of the batch had a spread of rewards, so that all are kept for want of a better one."""
    zeros = torch.zeros(len(rollouts.rewards))
    return rollouts.scalars.get("used_group_fallback", zeros) > 0

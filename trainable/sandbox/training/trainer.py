"""One training step of the update-rule sandbox, for all seeds of a condition at once."""

import time
from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from trainable.runs.run import Lines, Row, State
from trainable.runs.training import StepResult
from trainable.sandbox.batch.members import Streams
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.batch.slices import flat, put_together, taken_apart, unflat
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.rules.kondo import screen
from trainable.sandbox.rules.rule import UpdateRule
from trainable.sandbox.tasks.task import Task
from trainable.sandbox.training.optimizer import MemberAdam
from trainable.sandbox.training.replay import AgeStatistics, Drawn, make_buffer
from trainable.sandbox.training.state import below, named
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
        self.left: dict[int, State] = {}
        self._place(seeds)
        self._begun, self._seconds_before, self._seconds_at_row = time.perf_counter(), 0.0, 0.0

    def _place(self, seeds: Sequence[int]) -> None:
        """Members of `seeds` as they are before the first step."""
        self.seeds = tuple(seeds)
        self.streams = Streams(seeds)
        models = self.task.make_models(self.streams)
        optimizer = MemberAdam(models.parameters_by_name(), self.config.lr)
        self.learner = Learner(self.config, self.task, self.objective, models, optimizer)
        self.buffer = make_buffer(self.config)
        self.ages = AgeStatistics(torch.zeros(len(seeds), 5, dtype=torch.float64))
        self.uniform_batches = torch.zeros(len(seeds), dtype=torch.int64)

    def step(self) -> StepResult:
        """One batch of rollouts, in the documents' order: evaluate, sample, delay or replay, screen, update.

        Once all batches are trained on, the next call evaluates, and every member leaves. A member with too many
        uniform batches in a row leaves before it is trained on the last of them; the others take this step anew.
        """
        step = self.step_index
        if step == self.config.trainer.total_training_steps:
            return self._end({seed: {} for seed in self.seeds})
        is_row = self._is_evaluated(step)
        evaluation = self._evaluate() if is_row else {}
        drawn = self._drawn()
        uniform = torch.where(_is_uniform(drawn.rollouts), self.uniform_batches + 1, 0)
        if bool((uniform >= self.config.fallback_patience).any()):
            return self._end(self._stops(uniform))
        self.buffer, self.uniform_batches = drawn.buffer, uniform
        self.ages.add(drawn.rollouts.age, self._freshness(drawn.rollouts.age))
        rollouts, found = self._screened(drawn.rollouts)
        updated = self.learner.train(rollouts, is_row, is_row and self._has_cosine(step))
        self.step_index += 1
        rows = self._rows({**evaluation, **updated.metrics, **found, **self._sampling(drawn)}, step) if is_row else {}
        return self._without_failed(rows, updated.is_finite)

    def _is_evaluated(self, step: int) -> bool:
        return step >= self.config.delay and (step - self.config.delay) % self.config.trainer.test_freq == 0

    def _has_cosine(self, step: int) -> bool:
        is_due = (step - self.config.delay) // self.config.trainer.test_freq % COSINE_EVERY == 0
        return self.config.diagnostics and is_due

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Tensor]:
        return self.task.evaluate(self.learner.models, self.streams, self.step_index)

    @torch.no_grad()
    def _drawn(self) -> Drawn:
        fresh = self.task.sample(self.learner.models, self.streams, self.step_index)
        return self.buffer.draw(fresh, self.streams.uniform("sandbox_replay", self.step_index, shape=()))

    def _screened(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, Tensor]]:
        if not self.config.rule.screens_batch:
            return rollouts, {}
        count = rollouts.rewards.shape[1]
        return screen(rollouts, self.streams.uniform("sandbox_screen", self.step_index, shape=(count,)), self.config)

    def _freshness(self, age: Tensor) -> Tensor:
        """[E], the weight that the loss gives a batch for its age; 1 where the rule does not discount it."""
        return torch.exp(-self.config.replay_age_decay * age.double() * self.config.rule.discounts_age)

    def _sampling(self, drawn: Drawn) -> dict[str, Tensor]:
        """Columns of the batch that was trained on and of the batches since the last row."""
        scalars = drawn.rollouts.scalars
        found = {column: scalars[name] for name, column in _SAMPLER_COLUMNS.items() if name in scalars}
        if self.config.replay_capacity:
            size = torch.full_like(drawn.rollouts.age, len(self.buffer.batches))
            found |= {"replay_age": drawn.rollouts.age, "replay_size": size, "replay_priority": drawn.priority}
        return found

    def _rows(self, metrics: dict[str, Tensor], step: int) -> dict[int, Row]:
        """A row a member; a number that is not there, such as a mean of nothing, is left out."""
        ages = self.ages.take()
        if self.config.delay or self.config.replay_capacity:
            metrics = metrics | ages
        now = self._seconds()
        times = {"seconds": now - self._seconds_at_row, "seconds_total": now}
        self._seconds_at_row = now
        columns = {name: values.tolist() for name, values in metrics.items()}
        return {
            seed: {
                "step": step,
                **{name: values[e] for name, values in columns.items() if isfinite(values[e])},
                **times,
            }
            for e, seed in enumerate(self.seeds)
        }

    def _stops(self, uniform: Tensor) -> dict[int, Row]:
        """By seed, what says why a member ended, of those with too many uniform batches in a row."""
        patience = self.config.fallback_patience
        return {
            seed: {
                "stop_rule": UNIFORM_GROUPS, "stop_value": float(count), "stop_threshold": float(patience),
                "stop_step": self.step_index,
            }
            for seed, count in zip(self.seeds, uniform.tolist(), strict=True)
            if count >= patience
        }  # fmt: skip

    def _end(self, why: dict[int, Row]) -> StepResult:
        """The last row of the members in `why`, with what it says there; they leave, and their states are kept."""
        ages, at_row = self.ages.sums, self._seconds_at_row
        rows = self._rows(self._evaluate(), self.step_index)
        self.ages.sums, self._seconds_at_row = ages, at_row  # of the others, whose row this is not
        self.left |= {seed: self.state(seed) for seed in why}
        self._keep_only([seed for seed in self.seeds if seed not in why])
        return StepResult({seed: {**rows[seed], **said} for seed, said in why.items()})

    def _without_failed(self, rows: dict[int, Row], is_finite: Tensor) -> StepResult:
        """What the step gave, once the members leave whose losses or gradients were not finite."""
        if bool(is_finite.all()):
            return StepResult(rows)
        whole = dict(zip(self.seeds, is_finite.tolist(), strict=True))
        message = f"loss or gradient of step {self.step_index - 1} was not finite"
        self._keep_only([seed for seed in self.seeds if whole[seed]])
        return StepResult(
            {seed: row for seed, row in rows.items() if whole[seed]},
            failed={seed: message for seed in whole if not whole[seed]},
        )

    def _keep_only(self, seeds: Sequence[int]) -> None:
        """Go on with `seeds` alone: what is read back from disk later is put together in the same way."""
        if seeds:
            self.load_states([self.state(seed) for seed in seeds])
        self.seeds = tuple(seeds)

    def close(self, seed: int, row: Row) -> tuple[Row, Lines]:
        """The last row as it is: each has an evaluation."""
        return row, {}

    def release(self) -> None:
        """Nothing: all is memory."""

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._begun

    def state(self, seed: int) -> State:
        """Everything that the member of `seed` needs to go on after its last step."""
        if seed in self.left:
            return self.left[seed]
        member = self.seeds.index(seed)
        tensors = named(self.learner.optimizer.state(), "adam") | {"ages": self.ages.sums}
        batches = self.buffer.lasting
        for place, stored in enumerate(batches):
            tensors |= named(flat(stored.rollouts), f"batches/{place}")
        values = {
            "seed": seed, "step": self.step_index, "uniform_batches": int(self.uniform_batches[member]),
            "batches": len(batches), "group_size": batches[0].rollouts.group_size if batches else None,
            "seconds": self._seconds(), "seconds_at_row": self._seconds_at_row,
        }  # fmt: skip
        return State(taken_apart(tensors, member), values)

    def load_states(self, states: Sequence[State]) -> None:
        """Go on with the members of `states`, whoever they were beside.

        ValueError where they do not fit, and the members are as they were.
        """
        before = dict(vars(self))
        try:
            self._load(states)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            vars(self).update(before)
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _load(self, states: Sequence[State]) -> None:
        first = states[0].values
        if len({state.values["step"] for state in states}) > 1:
            raise ValueError(f"states are of the steps {[state.values['step'] for state in states]}, not of one.")
        tensors = put_together([state.tensors for state in states])
        self._place([state.values["seed"] for state in states])
        self.learner.optimizer.load_state(below(tensors, "adam"))
        self.ages.sums = tensors["ages"]
        for place in range(first["batches"]):
            self.buffer = self.buffer.with_batch(unflat(below(tensors, f"batches/{place}"), first["group_size"]))
        self.uniform_batches = torch.tensor([state.values["uniform_batches"] for state in states])
        self.step_index = first["step"]
        self._begun, self._seconds_before, self._seconds_at_row = (
            time.perf_counter(), first["seconds"], first["seconds_at_row"],
        )  # fmt: skip


def _is_uniform(rollouts: Rollouts) -> Tensor:
    """[E], whether no group of the batch had a spread of rewards, so that all are kept for want of a better one."""
    none = torch.zeros(len(rollouts.rewards))
    return rollouts.scalars.get("used_group_fallback", none) > 0

"""Train an ensemble: all seeds of a condition together, step by step, for any algorithm."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from sandboxes.toys.optimizer import MemberAdam
from trainable.backend.meter import format_names
from trainable.config.base_config import BaseRunConfig
from trainable.runs.run import LinesByFile, TrainerState
from trainable.runs.run_files import Row
from trainable.runs.training import StepResult

Batch = TypeVar("Batch")


class UpdateResult(NamedTuple):
    """metrics: columns of a row, [E] each, if requested. nonfinite_names: for each member, what was not finite."""

    metrics: dict[str, Tensor]
    nonfinite_names: list[list[str]]


class Algorithm(Generic[Batch]):
    """What E members do in a step. Every tensor has a leading axis of members, which do not affect each other.

    Random numbers are a function of seed, purpose and step (`MemberRngs`), so the methods before `train` can be called
    again for the same step with the same result.
    """

    optimizers: Mapping[str, MemberAdam]
    """All trained weights, by the prefix of their tensors in a checkpoint."""

    def evaluate(self, step: int) -> dict[str, Tensor]:
        """Compute columns that describe the weights, [E] each. Changes nothing."""
        raise NotImplementedError

    def sample(self, step: int) -> Batch:
        """Sample the batch of a step, without gradients. Changes nothing."""
        raise NotImplementedError

    def find_stops(self, batch: Batch, step: int) -> dict[int, Row]:
        """Return, by seed, the stop columns of members that a rule ends before training on `batch`. Changes nothing."""
        return {}

    def train(self, batch: Batch, step: int, is_row: bool) -> UpdateResult:
        """Train on `batch`. With `is_row`, return the columns of the row of this step."""
        raise NotImplementedError

    def measure_open_interval(self) -> dict[str, Tensor]:
        """Compute columns, [E] each, about the steps since the last row, for a member that ends. Changes nothing."""
        return {}

    def get_tensors(self) -> dict[str, Tensor]:
        """Return every tensor that the members need to continue, [E, ...] each: here weights and moments."""
        return {
            name: tensor
            for prefix, optimizer in self.optimizers.items()
            for name, tensor in add_prefix(optimizer.state_dict(), prefix).items()
        }

    def get_values(self, member: int) -> dict[str, Any]:
        """Return every other value that a member needs to continue, as JSON."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], values: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the results of `get_tensors` and `get_values`. Errors if they do not fit: see `load_states`."""
        for prefix, optimizer in self.optimizers.items():
            optimizer.load_state_dict(select_prefix(tensors, prefix))


class EnsembleTrainer:
    """Trains one model per seed, all with the same configuration.

    When a member ends, the others continue as if it had never been there, up to rounding in sums whose order depends on
    the number of members. The seed of `config` is ignored. make_algorithm: maps the configuration and seeds to the
    algorithm of these members before the first step.
    """

    def __init__(
        self,
        config: BaseRunConfig,
        seeds: Sequence[int],
        make_algorithm: Callable[[Any, Sequence[int]], Algorithm[Any]],
    ) -> None:
        if len(set(seeds)) != len(seeds) or not seeds:
            raise ValueError(f"seeds={list(seeds)}: must be one or more different numbers, one per member.")
        self.config, self._make_algorithm = config, make_algorithm
        self.seeds = tuple(seeds)
        """The members that are still training."""
        self.algorithm = make_algorithm(config, self.seeds)
        self.step_index = 0
        self.final_states: dict[int, TrainerState] = {}
        """Last state of each member that ended by a rule or the last step. Members that failed have none."""
        self._start_time, self._resumed_seconds, self._seconds_at_last_row = time.perf_counter(), 0.0, 0.0

    def step(self, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """Train on one batch, in the order of the source: evaluate, sample, check the stop rule, update.

        The call after the last batch evaluates, and ends every member. A member that a rule stops ends before it trains
        on the batch; that call makes no update, and the next one repeats the step for the other members.
        """
        step = self.step_index
        # The final weights are evaluated too, so the last row is written by a call without training.
        if step == self.config.trainer.total_training_steps:
            return self._end_members({seed: {} for seed in self.seeds})
        is_row = step in self.config.get_row_steps(step + 1)
        with torch.no_grad():
            evaluation = self.algorithm.evaluate(step) if is_row else {}
            batch = self.algorithm.sample(step)
        # Nothing in the trainer has changed yet, so the members that continue can repeat the step with the same batch.
        if stop_columns := self.algorithm.find_stops(batch, step):
            return self._end_members(stop_columns)
        before_update()
        update_result = self.algorithm.train(batch, step, is_row)
        self.step_index += 1
        rows = self._make_rows({**evaluation, **update_result.metrics}, step) if is_row else {}
        # A member whose loss, gradient or weights are not finite has failed.
        failures = {
            seed: f"values of step {step} were not finite: {format_names(names)}"
            for seed, names in zip(self.seeds, update_result.nonfinite_names, strict=True)
            if names
        }
        if failures:
            self._keep_members([seed for seed in self.seeds if seed not in failures])
        return StepResult({seed: row for seed, row in rows.items() if seed not in failures}, failures=failures)

    def _make_rows(self, metrics: dict[str, Tensor], step: int) -> dict[int, Row]:
        """Make one row per seed; a number that is not finite, such as a mean over nothing, is omitted."""
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

    def _end_members(self, stop_columns: dict[int, Row]) -> StepResult:
        """End the members in `stop_columns`, keep their states, and return the last row of each with these columns."""
        seconds_at_last_row = self._seconds_at_last_row
        with torch.no_grad():
            evaluation = self.algorithm.evaluate(self.step_index)
        rows = self._make_rows({**evaluation, **self.algorithm.measure_open_interval()}, self.step_index)
        # The members that continue get no row here, so their clock must not restart.
        self._seconds_at_last_row = seconds_at_last_row
        self.final_states |= {seed: self.get_state(seed) for seed in stop_columns}
        self._keep_members([seed for seed in self.seeds if seed not in stop_columns])
        return StepResult({seed: {**rows[seed], **stop_row} for seed, stop_row in stop_columns.items()})

    def _keep_members(self, seeds: Sequence[int]) -> None:
        """Continue with `seeds` only, through their states, exactly like a run resumed from a checkpoint."""
        if seeds:
            self.load_states([self.get_state(seed) for seed in seeds])
        self.seeds = tuple(seeds)

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """Return the last row unchanged, because every row is an evaluation."""
        return row, {}

    def close(self) -> None:
        """Do nothing: the trainer uses memory only."""

    def _measure_elapsed(self) -> float:
        return self._resumed_seconds + time.perf_counter() - self._start_time

    def get_state(self, seed: int) -> TrainerState:
        """Return everything that the member of `seed` needs to continue after its last step."""
        # A member that has ended is no longer in the tensors.
        if seed in self.final_states:
            return self.final_states[seed]
        member = self.seeds.index(seed)
        values = {
            "seed": seed,
            "step": self.step_index,
            **self.algorithm.get_values(member),
            "seconds": self._measure_elapsed(),
            "seconds_at_row": self._seconds_at_last_row,
        }
        # Copies, so that the memory of the other members can be freed.
        tensors = {name: tensor[member].detach().clone() for name, tensor in self.algorithm.get_tensors().items()}
        return TrainerState(tensors, values)

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Continue with the members of `states`, which may come from different trainers.

        Raises ValueError if they do not match each other or the configuration; the trainer is then unchanged.
        """
        try:
            values = [state.values for state in states]
            steps, seeds = [value["step"] for value in values], tuple(value["seed"] for value in values)
            if len(set(steps)) > 1:
                raise ValueError(f"The states are from the steps {steps}, but members continue together at one step.")
            algorithm = self._make_algorithm(self.config, seeds)
            tensors = {name: torch.stack([state.tensors[name] for state in states]) for name in states[0].tensors}
            algorithm.load(tensors, values)
            seconds, seconds_at_row = values[0]["seconds"], values[0]["seconds_at_row"]
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            # Missing keys, wrong types, and shapes that do not stack all mean that the states do not fit.
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self.seeds, self.algorithm, self.step_index = seeds, algorithm, steps[0]
        self._start_time, self._resumed_seconds = time.perf_counter(), seconds
        self._seconds_at_last_row = seconds_at_row


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors whose names start with `prefix`/, and remove that prefix."""
    return {name.removeprefix(f"{prefix}/"): value for name, value in tensors.items() if name.startswith(f"{prefix}/")}


def add_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Add `prefix`/ to the names of the tensors."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}

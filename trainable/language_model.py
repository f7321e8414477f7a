"""Runs that fine-tune a language model with PPO: their trainer, stop rules and columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainable.config.run_config import RunConfig, apply_overrides
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.distributed import DistributedTrainer, make_trainer
from trainable.ppo.evaluation import Evaluation
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.episode_lines import RecordedEpisode
from trainable.runs.records import make_empty_row
from trainable.runs.run import LinesByFile, TrainerState
from trainable.runs.run_files import EPISODES_FILE, GRADIENTS_FILE, LEVELS_FILE, Row
from trainable.runs.stop_rules import ALARM, StopDecision, evaluate_own_rules, evaluate_stop_rules
from trainable.runs.training import StepResult, TrainerFamily


@dataclass(frozen=True)
class SingleRunTrainer:
    """Adapts a PPO trainer, which trains a single run, to the `Trainer` protocol, which trains one run per seed."""

    trainer: PPOTrainer | DistributedTrainer
    seeds: tuple[int]

    @property
    def step_index(self) -> int:
        """Steps trained so far."""
        return self.trainer.step_index

    def step(self, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """Train one step. Return its row, and the lines of its evaluations and gradient analysis."""
        row, evaluations, gradients, trained_episodes = self.trainer.step(before_update)
        lines = {**_make_lines(evaluations, trained_episodes), GRADIENTS_FILE: gradients}
        return StepResult({self.seeds[0]: {"step": self.step_index, **row}}, {self.seeds[0]: lines})

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """Evaluate at the end of the run. Return the last `row` with the results, and the lines of the evaluation."""
        final_row, evaluations = self.trainer.evaluate_final(row)
        return final_row, _make_lines(evaluations)

    def get_state(self, seed: int) -> TrainerState:
        """Return the full state of the trainer, which has a single run."""
        return TrainerState(*self.trainer.get_state())

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Continue from the state of the single run."""
        (state,) = states
        self.trainer.load_state(state.tensors, state.values)

    def close(self) -> None:
        """Release the engine and its memory."""
        self.trainer.close()


def _make_lines(evaluations: Sequence[Evaluation], trained_episodes: Sequence[RecordedEpisode] = ()) -> LinesByFile:
    """Make the lines of evaluations, of the episodes that they recorded, and of trained episodes."""
    episodes = [*trained_episodes, *(episode for evaluation in evaluations for episode in evaluation.episodes)]
    # In order, since readers take a line of an earlier step as a sign that the run was restored.
    episodes.sort(key=lambda episode: episode.step)
    return {
        LEVELS_FILE: [evaluation.to_line() for evaluation in evaluations],
        EPISODES_FILE: [episode.to_line() for episode in episodes],
    }


def _make_ppo_trainer(config: RunConfig, seeds: Sequence[int]) -> SingleRunTrainer:
    """Make the trainer of one run. Only update rules train several seeds together."""
    (seed,) = seeds
    return SingleRunTrainer(make_trainer(apply_overrides(config, {"seed": seed}), DIAGNOSTICS), (seed,))


def _decide(rows: Sequence[Row], config: RunConfig, rules: Sequence[str]) -> StopDecision | None:
    decision = evaluate_stop_rules(rows, config.early_stop, (*rules, ALARM))
    return decision or evaluate_own_rules(rows, config.trainer.own_stop_rules)


TRAINER = TrainerFamily(
    _make_ppo_trainer,
    _decide,
    lambda config: make_empty_row(all_quantities=config.collapse_detection.all_quantities, schedules=config.schedules),
    "val_success",
)

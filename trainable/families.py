"""What the runs of each family of studies are made of: the settings, the trainer and the stop rules they share."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainable.config.run_config import RunConfig, with_overrides
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.evaluation import Evaluation
from trainable.ppo.ranks import RankedTrainer, make_trainer
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.records import empty_row
from trainable.runs.run import Lines, Row, State
from trainable.runs.run_files import GRADIENTS, LEVELS
from trainable.runs.stop_rules import Decision, decide
from trainable.runs.training import StepResult, TrainerFamily
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.training.make import make_trainer as make_update_rule_trainer


@dataclass(frozen=True)
class OneRun:
    """A PPO trainer, which trains one run, as the trainer of that run alone."""

    trainer: PPOTrainer | RankedTrainer
    seeds: tuple[int]

    @property
    def step_index(self) -> int:
        """Steps trained so far."""
        return self.trainer.step_index

    def step(self) -> StepResult:
        """Train once: a row, and the lines of its evaluations and gradients."""
        record, evaluations, gradients = self.trainer.step()
        lines: Lines = {LEVELS: _lines(evaluations), GRADIENTS: gradients}
        return StepResult({self.seeds[0]: {"step": self.step_index, **record.row()}}, {self.seeds[0]: lines})

    def close(self, seed: int, row: Row) -> tuple[Row, Lines]:
        """The last row with the final evaluation."""
        final, evaluations = self.trainer.close()
        return final.added_to(row), {LEVELS: _lines(evaluations)}

    def state(self, seed: int) -> State:
        """The trainer's whole state; ranks have to collect it."""
        return State(*self.trainer.state())

    def load_states(self, states: Sequence[State]) -> None:
        """Continue from the one state."""
        (state,) = states
        self.trainer.load_state(state.tensors, state.values)

    def release(self) -> None:
        """Give back what the engine holds."""
        self.trainer.release()


def _lines(evaluations: Sequence[Evaluation]) -> list[Row]:
    return [evaluation.line() for evaluation in evaluations]


def _make_ppo(config: RunConfig, seeds: Sequence[int]) -> OneRun:
    (seed,) = seeds
    return OneRun(make_trainer(with_overrides(config, {"seed": seed}), DIAGNOSTICS), (seed,))


def _decide(rows: Sequence[Row], config: RunConfig, rules: Sequence[str]) -> Decision | None:
    return decide(rows, config.early_stop, tuple(rules))


def _make_empty_row(config: RunConfig) -> Row:
    return empty_row(all_quantities=config.collapse_detection.all_quantities)


LANGUAGE_MODEL = TrainerFamily(RunConfig, _make_ppo, _decide, _make_empty_row)
UPDATE_RULES = TrainerFamily(UpdateRuleConfig, make_update_rule_trainer)

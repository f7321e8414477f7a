"""A task that is small enough to write down: a table of logits per prompt and position, learned from samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from trainable.runs.training import StepResult

PROMPTS, POSITIONS, ACTIONS = 3, 2, 4


class Table:
    """Logits [E, PROMPTS, POSITIONS, ACTIONS], the sum of two parameters, so that tests see more than one."""

    def __init__(self, logits: Tensor) -> None:
        shift = torch.zeros(len(logits), ACTIONS)
        self.weights = {"logits": logits.requires_grad_(), "shift": shift.requires_grad_()}

    def rows(self, prompts: Tensor) -> Tensor:
        """Return the logits [E, B, POSITIONS, ACTIONS] of prompts [E, B]."""
        members = torch.arange(len(prompts)).unsqueeze(1)
        return self.weights["logits"][members, prompts] + self.weights["shift"][:, None, None]


class TabularTask:
    """The right action at position t of prompt x is (x + t) mod ACTIONS. The reward is the share of right actions.

    `uniform_from` has, by seed, the step from which all groups of the member have equal rewards. `broken_at` has, by
    seed, the step at which a reward is NaN.
    """

    def __init__(
        self,
        config: UpdateRuleConfig,
        uniform_from: dict[int, int] | None = None,
        broken_at: dict[int, int] | None = None,
    ) -> None:
        self.config, self.uniform_from, self.broken_at = config, uniform_from or {}, broken_at or {}

    def make_models(self, rngs: MemberRngs) -> Table:
        return Table(rngs.normal("sandbox_weights", shape=(PROMPTS, POSITIONS, ACTIONS)).float())

    def sample(self, models: Table, rngs: MemberRngs, step: int) -> Rollouts:
        config = self.config
        group_size = config.group_size if config.rule.has_groups else 1
        prompts = rngs.integers("sandbox_prompts", step, high=PROMPTS, shape=(config.batch_size // group_size,))
        prompts = prompts.repeat_interleave(group_size, dim=1)
        probs = models.rows(prompts).softmax(-1)
        uniforms = rngs.uniform("sandbox_samples", step, shape=(config.batch_size, POSITIONS))
        actions = (probs.double().cumsum(-1) <= uniforms.unsqueeze(-1)).sum(-1).clamp(max=ACTIONS - 1)
        labels = get_right_actions(prompts)
        rewards = (actions == labels).float().mean(-1)
        for seed, broken_step in self.broken_at.items():
            if seed in rngs.seeds and broken_step == step:
                rewards[rngs.seeds.index(seed), 0] = torch.nan
        log_probs = probs.log().gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        keep_mask = torch.ones_like(rewards, dtype=torch.bool)
        ages = torch.zeros(len(prompts), dtype=torch.int64)
        batch = Rollouts(prompts, actions, labels, rewards, log_probs, probs.square().sum(-1), keep_mask, ages)
        return batch if group_size == 1 else self._set_groups(batch, rngs.seeds, step, group_size)

    def _set_groups(self, batch: Rollouts, seeds: Sequence[int], step: int, group_size: int) -> Rollouts:
        is_uniform = torch.tensor([step >= self.uniform_from.get(seed, 10**9) for seed in seeds])
        rate = 1.0 - is_uniform.float()
        scalars = {
            "informative_group_rate": rate,
            "retained_group_rate": torch.ones_like(rate),
            "used_group_fallback": is_uniform.float(),
        }
        return replace(batch, group_size=group_size, scalars=scalars)

    def compute_logits(self, models: Table, rollouts: Rollouts) -> Tensor:
        return models.rows(rollouts.observations)

    def compute_oracle_log_probs(self, models: Table, rollouts: Rollouts) -> Tensor:
        return self.compute_logits(models, rollouts).log_softmax(-1)

    def evaluate(self, models: Table, rngs: MemberRngs, step: int) -> dict[str, Tensor]:
        prompts = torch.arange(PROMPTS).expand(len(rngs.seeds), PROMPTS)
        log_probs = models.rows(prompts).log_softmax(-1)
        error = 1 - (log_probs.argmax(-1) == get_right_actions(prompts)).float().mean((1, 2))
        return {"test_error": error, "entropy": -(log_probs.exp() * log_probs).sum(-1).mean((1, 2))}


def get_right_actions(prompts: Tensor) -> Tensor:
    """Return the right actions [E, B, POSITIONS] of prompts [E, B]."""
    return (prompts.unsqueeze(-1) + torch.arange(POSITIONS)) % ACTIONS


def train_to_next_rows(trainer: EnsembleTrainer) -> StepResult:
    """Train up to the next rows or the next failure. The result is empty if no member continues."""
    while trainer.seeds:
        progress = trainer.step()
        if progress.rows or progress.failures:
            return progress
    return StepResult()

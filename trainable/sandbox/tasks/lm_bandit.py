"""The language-model bandit: a stretch of text is the observation, the token that follows it the action worth 1."""

import torch
from torch import Tensor

from trainable.models.load import load_policy
from trainable.sandbox.batch.members import Streams
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.models.decoding import taken
from trainable.sandbox.models.language_models import LanguageModels
from trainable.sandbox.tasks.bandits import bandit_rollouts, prompts_a_step
from trainable.sandbox.tasks.task import Models
from trainable.sandbox.tasks.texts import read_tokens

WINDOWS = 500
WINDOWS_AT_ONCE = 16


class LanguageModelBandit:
    """lm_bandit (see `trainable.sandbox.tasks.task.Task`): T is 1, observations are context_len tokens.

    The reward is whether the token is the text's own, noise included, less kl_weight (log pi(a) - log pi_first(a)).
    """

    def __init__(self, config: UpdateRuleConfig) -> None:
        self.config = config
        self.policy = load_policy(config.model_name, torch.device("cpu"))
        longest = self.policy.model.shape.max_position_embeddings
        if config.context_len > longest:
            raise ValueError(
                f"context_len={config.context_len} is more than the {longest} tokens that {config.model_name} reads: "
                f"set context_len={longest}, or less."
            )
        self.text = read_tokens(config.text_file, self.policy.tokenizer, config.context_len)
        windows = self.text.test.unfold(0, config.context_len + 1, config.context_len + 1)[:WINDOWS]
        self.contexts, self.targets = windows[:, :-1], windows[:, -1]
        self.thirds = self._thirds()

    @property
    def actions(self) -> int:
        """The vocabulary."""
        return self.policy.model.shape.vocab_size

    def make_models(self, streams: Streams) -> LanguageModels:
        """The loaded weights, for every member."""
        return LanguageModels(self.policy, len(streams.seeds))

    @torch.no_grad()
    def sample(self, models: Models, streams: Streams, step: int) -> Rollouts:
        """One batch: batch_size tokens, after as many contexts, or batch_size / group_size for grouped rules."""
        own = _own(models)
        contexts, labels = self._contexts(streams, step, prompts_a_step(self.config))
        log_probs = own.logits(contexts).log_softmax(-1)
        price = self._price(own, contexts, log_probs)
        return bandit_rollouts(self.config, streams, step, contexts, labels, log_probs, price)

    def log_probs(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, 1, A] log-probabilities; with gradients."""
        return self.raw_logits(models, rollouts).log_softmax(-1)

    def raw_logits(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, 1, A] logits; with gradients."""
        return _own(models).logits(rollouts.observations)[:, :, None]

    def oracle_log_probs(self, models: Models, rollouts: Rollouts) -> Tensor:
        """Those of `log_probs`: no token comes before the action."""
        return self.log_probs(models, rollouts)

    @torch.no_grad()
    def evaluate(self, models: Models, streams: Streams, step: int) -> dict[str, Tensor]:
        """Over up to WINDOWS windows of the evaluated text, side by side: the likeliest token's error, and more."""
        own, members = _own(models), len(streams.seeds)
        parts = [
            own.logits(rows.expand(members, -1, -1)).log_softmax(-1) for rows in self.contexts.split(WINDOWS_AT_ONCE)
        ]
        log_probs = torch.cat(parts, dim=1)
        wrong = (log_probs.argmax(-1) != self.targets).float()
        surprisal = -taken(log_probs, self.targets.expand(members, -1))
        thirds = zip(("easy", "medium", "hard"), self.thirds, strict=True)
        return {
            "test_error": wrong.mean(-1),
            "perplexity": surprisal.mean(-1).exp(),
            "entropy": -(log_probs.exp() * log_probs).sum(-1).mean(-1),
            **{f"error_{name}": wrong[:, rows].mean(-1) for name, rows in thirds},
        }

    def _thirds(self) -> tuple[Tensor, ...]:
        """Windows [.] by how surprised the first weights are at their next token: the least third first."""
        first = LanguageModels(self.policy, 1)
        log_probs = torch.cat([first.first_log_probs(rows) for rows in self.contexts.split(WINDOWS_AT_ONCE)])
        return (-taken(log_probs, self.targets)).argsort(stable=True).tensor_split(3)

    def _contexts(self, streams: Streams, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Contexts [E, rows, context_len] from random places of the text, and the tokens [E, rows] that follow."""
        length = self.config.context_len
        starts = streams.integers("sandbox_prompts", step, below=len(self.text.train) - length, shape=(rows,))
        stretches = self.text.train[starts[..., None] + torch.arange(length + 1)]
        return stretches[..., :-1], stretches[..., -1]

    def _price(self, models: LanguageModels, contexts: Tensor, log_probs: Tensor) -> Tensor:
        """[E, B, A] kl_weight (log pi - log pi_first) of every token after contexts [E, B, context_len]."""
        if self.config.kl_weight == 0:
            return torch.zeros_like(log_probs)
        return self.config.kl_weight * (log_probs - models.first_log_probs(contexts))


def _own(models: Models) -> LanguageModels:
    assert isinstance(models, LanguageModels), "models are those of make_models"
    return models

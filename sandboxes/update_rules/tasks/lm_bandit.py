"""The language-model bandit: the observation is a piece of text, and the token that follows it has reward 1.

The default text has dialogues in which a solver plays Sokoban, like those that sokoban-tiny was trained on, but on
other levels.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.func import functional_call

from sandboxes.toys.decoding import select_log_probs
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.tasks.bandits import BanditTask, make_bandit_rollouts
from trainable.config.seeds import make_rng
from trainable.envs.level_sets import make_demonstration_levels
from trainable.models.load import Policy, load_policy
from trainable.tiny.dialogues import Habits
from trainable.tiny.policies import SOKOBAN_TINY

NUM_PASSAGES = 480  # of the default text, which results depend on
_FIRST_LEVEL = 40_000_000  # beyond the levels that sokoban-tiny was trained on
EVAL_DIVISOR = 4  # the last quarter of a text's passages is for evaluation


class Tokens(NamedTuple):
    """Tokens [N] to train on, and [M] to evaluate on."""

    train: Tensor
    test: Tensor


def read_tokens(text_file: str | None, tokenizer: Tokenizer, context_len: int) -> Tokens:
    """Read the tokens of a text, or of the default one. ValueError, with what to do, if it is missing or too short."""
    texts = make_sokoban_passages() if text_file is None else read_passages(Path(text_file).expanduser())
    # Tokenized separately, so that no token spans two passages and the split below falls between tokens.
    encodings = [tokenizer.encode("\n" * (n > 0) + text, add_special_tokens=False) for n, text in enumerate(texts)]
    num_train = len(texts) - max(1, len(texts) // EVAL_DIVISOR)
    train, test = (
        torch.tensor([token_id for encoding in split for token_id in encoding.ids])
        for split in (encodings[:num_train], encodings[num_train:])
    )
    # Training needs one context with its next token; evaluation needs one per third by difficulty.
    if len(train) <= context_len or len(test) < 3 * (context_len + 1):
        raise ValueError(
            f"text_file={text_file} has {len(train)} tokens for training and {len(test)} for "
            f"evaluation (the last quarter of its passages); context_len={context_len} needs {context_len + 1} and "
            f"{3 * (context_len + 1)}. Use a longer text, or lower context_len."
        )
    return Tokens(train, test)


def read_passages(path: Path) -> list[str]:
    """Read the non-blank lines of a text; for a .jsonl file, the string that each line encodes."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a line is not a string")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"text_file={path} cannot be read: {error}. Use UTF-8, with one passage per line, or a JSON string per "
            "line (.jsonl)."
        ) from None
    return texts


@cache  # it takes two seconds, and all conditions of a process share it
def make_sokoban_passages() -> list[str]:
    """Make the dialogues of the default text, on levels never used for validation or tests."""
    levels = make_demonstration_levels(SOKOBAN_TINY.source, NUM_PASSAGES, _FIRST_LEVEL)
    rngs = make_rng(0, "sandbox_data", 2), make_rng(0, "sandbox_data", 2, 1)
    demonstrations = SOKOBAN_TINY.make_dialogues(levels, Habits(), *rngs)
    return ["".join(segment.text for segment in segments) for segments in demonstrations]


class _NextTokenModel(nn.Module):
    """The policy's model as a function from contexts to the logits of the next token."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy.model

    def forward(self, contexts: Tensor) -> Tensor:
        """Compute logits [B, V] of the token after each of contexts [B, L]."""
        # Hidden states are selected by position in the flattened batch: the last one of each row.
        rows, length = contexts.shape
        last_positions = torch.arange(1, rows + 1) * length - 1
        logits: Tensor = self.policy.lm_head(self.policy.model.compute_hidden_states(contexts, last_positions))
        return logits.float()


class LanguageModelEnsemble:
    """E language models, run one after another. weights: [E, ...] each; the policy keeps the initial ones."""

    def __init__(self, policy: Policy, num_members: int) -> None:
        # Members have separate tensors. The model keeps the policy's weights, for the KL to it.
        self.initial_model = _NextTokenModel(policy).requires_grad_(False)
        self.weights = {
            name: weight.expand(num_members, *weight.shape).clone().requires_grad_()
            for name, weight in self.initial_model.named_parameters()
        }

    def compute_logits(self, contexts: Tensor) -> Tensor:
        """Compute logits [E, B, V] of the token after each of contexts [E, B, L], with gradients."""
        members = zip(*(weight.unbind() for weight in self.weights.values()), strict=True)
        weights = [dict(zip(self.weights, tensors, strict=True)) for tensors in members]
        return torch.stack(
            [functional_call(self.initial_model, weights[e], (rows,)) for e, rows in enumerate(contexts)]
        )

    @torch.no_grad()
    def compute_initial_log_probs(self, contexts: Tensor) -> Tensor:
        """Compute log-probabilities [..., B, V] of the token after contexts [..., B, L], under the initial weights."""
        flat_log_probs: Tensor = self.initial_model(contexts.flatten(0, -2)).log_softmax(-1)
        return flat_log_probs.unflatten(0, contexts.shape[:-1])


MAX_WINDOWS = 500
WINDOW_BATCH_SIZE = 16  # windows per forward pass of an evaluation, to bound its memory


class LanguageModelBandit(BanditTask):
    """lm_bandit: observations are context_len tokens.

    The reward is 1 for the text's token and 0 for others, with noise applied, minus kl_weight (log pi(a) - log
    pi_first(a)), where pi_first has the initial weights.
    """

    def __init__(self, config: UpdateRuleConfig) -> None:
        self.config = config
        self.policy = load_policy(config.model_name, torch.device("cpu"))
        max_context = self.policy.model.shape.max_position_embeddings
        if config.context_len > max_context:
            raise ValueError(
                f"context_len={config.context_len} is more than the {max_context} tokens that {config.model_name} can "
                f"read: set context_len={max_context}, or less."
            )
        self.tokens = read_tokens(config.text_file, self.policy.tokenizer, config.context_len)
        # Non-overlapping windows, each a context and its target.
        windows = self.tokens.test.unfold(0, config.context_len + 1, config.context_len + 1)[:MAX_WINDOWS]
        self.contexts, self.targets = windows[:, :-1], windows[:, -1]
        # Indices of the easy, medium and hard third of windows, by the initial weights' surprisal of the target.
        initial_ensemble = LanguageModelEnsemble(self.policy, num_members=1)
        log_probs = torch.cat(
            [initial_ensemble.compute_initial_log_probs(rows) for rows in self.contexts.split(WINDOW_BATCH_SIZE)]
        )
        self.difficulty_thirds = (-select_log_probs(log_probs, self.targets)).argsort(stable=True).tensor_split(3)

    def make_models(self, rngs: MemberRngs) -> LanguageModelEnsemble:
        """Make models that all start with the loaded weights."""
        return LanguageModelEnsemble(self.policy, len(rngs.seeds))

    @torch.no_grad()
    def sample(self, models: LanguageModelEnsemble, rngs: MemberRngs, step: int) -> Rollouts:
        """Sample a batch: batch_size tokens after as many contexts, or batch_size / group_size for grouped rules."""
        contexts, labels = self._sample_contexts(rngs, step, self.config.batch_size // self.config.samples_per_prompt)
        log_probs = models.compute_logits(contexts).log_softmax(-1)
        action_cost = torch.zeros_like(log_probs)  # kl_weight (log pi - log pi_first) of every token
        if self.config.kl_weight > 0:
            action_cost = self.config.kl_weight * (log_probs - models.compute_initial_log_probs(contexts))
        return make_bandit_rollouts(self.config, rngs, step, contexts, labels, log_probs, action_cost)

    @torch.no_grad()
    def evaluate(self, models: LanguageModelEnsemble, rngs: MemberRngs, step: int) -> dict[str, Tensor]:
        """Compute error of the likeliest token, perplexity and entropy, over up to MAX_WINDOWS evaluation windows."""
        num_members = len(rngs.seeds)
        chunks = [rows.expand(num_members, -1, -1) for rows in self.contexts.split(WINDOW_BATCH_SIZE)]
        log_probs = torch.cat([models.compute_logits(rows).log_softmax(-1) for rows in chunks], dim=1)
        is_wrong = (log_probs.argmax(-1) != self.targets).float()
        surprisal = -select_log_probs(log_probs, self.targets.expand(num_members, -1))
        named_thirds = zip(("easy", "medium", "hard"), self.difficulty_thirds, strict=True)
        return {
            "test_error": is_wrong.mean(-1),
            "perplexity": surprisal.mean(-1).exp(),
            "entropy": -(log_probs.exp() * log_probs).sum(-1).mean(-1),
            **{f"error_{name}": is_wrong[:, rows].mean(-1) for name, rows in named_thirds},
        }

    def _sample_contexts(self, rngs: MemberRngs, step: int, num_contexts: int) -> tuple[Tensor, Tensor]:
        """Sample contexts [E, num_contexts, context_len] at random positions, and the next tokens [E, num_contexts]."""
        length = self.config.context_len
        starts = rngs.integers("sandbox_prompts", step, high=len(self.tokens.train) - length, shape=(num_contexts,))
        windows = self.tokens.train[starts[..., None] + torch.arange(length + 1)]
        return windows[..., :-1], windows[..., -1]

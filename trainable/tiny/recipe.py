"""Train a tiny policy on a solver's demonstrations: first clean ones, then ones with bad habits that PPO can fix.

The first stage teaches the game. The second stage teaches the policy to make bad plans (visible in greedy play) and to
be careless at times (visible only in sampled play), so that the shipped policy can do better than it does.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from trainable.algo.losses import logprobs_from_logits
from trainable.config.constants import QWEN2_ARCHITECTURE
from trainable.config.seeds import make_rng
from trainable.envs.environment import Environment, LevelSource, TurnLimits
from trainable.envs.level_sets import make_demonstration_levels
from trainable.envs.prompts import END_OF_MESSAGE, make_prompt_template
from trainable.models.qwen2 import Qwen2
from trainable.models.qwen2_shape import Qwen2Shape
from trainable.tiny.dialogues import Demonstrator, Habits, Segment, make_dialogue
from trainable.tiny.tokenizer import PAD, Vocabulary, build_tokenizer, list_pieces, write_tokenizer


@dataclass(frozen=True)
class Stage:
    """A stage of supervised training: one epoch over `dialogues` demonstrations with certain habits.

    The learning rate decays linearly from `lr` to `last_lr`.
    """

    dialogues: int
    lr: float
    last_lr: float
    habits: Habits


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The numbers that determine the shipped weights. A policy's page in docs/ explains how they were chosen."""

    seed: int = 0
    batch: int = 32
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class PolicyRecipe(ABC):
    """Defines the weights and the tokenizer of a tiny policy."""

    source: LevelSource[Any]
    """The levels of the game."""
    limits: TurnLimits
    """Limits of demonstrations, which are the game's defaults."""
    recipe: Recipe
    response_length: int
    """Maximum tokens of a reply."""
    width: int = 64
    """Width of the model, a multiple of the head size of 32, which is the smallest that vLLM supports."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Further run settings that the game needs."""

    @property
    @abstractmethod
    def pieces(self) -> list[str]:
        """The pieces of the tokenizer, in the order of their ids. The shipped weights depend on this order."""

    def build_tokenizer(self) -> Tokenizer:
        """Build the tokenizer of the pieces."""
        return build_tokenizer(self.pieces)

    def make_shape(self) -> Qwen2Shape:
        """Return the sizes of the model."""
        pieces = self.pieces
        return Qwen2Shape(
            vocab_size=len(pieces),
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=2,
            num_attention_heads=self.width // 32,
            num_key_value_heads=1,
            max_position_embeddings=512,
            rope_theta=10_000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            eos_token_id=pieces.index(END_OF_MESSAGE),
        )

    @abstractmethod
    def make_dialogues(
        self, levels: Sequence[Any], habits: Habits, rng: np.random.Generator, luck_rng: np.random.Generator
    ) -> Iterator[list[Segment]]:
        """Yield one demonstration per level, with bad habits."""


@dataclass(frozen=True, kw_only=True)
class TinyPolicy(PolicyRecipe):
    """A tiny policy for one turn-based game."""

    source: Environment[Any]
    vocabulary: Vocabulary
    demonstrator: Demonstrator
    response_length: int = 24

    @property
    def pieces(self) -> list[str]:  # noqa: D102
        return list_pieces(self.source.title, self.vocabulary, self.limits)

    def make_dialogues(
        self, levels: Sequence[Any], habits: Habits, rng: np.random.Generator, luck_rng: np.random.Generator
    ) -> Iterator[list[Segment]]:
        """Yield one demonstration per level, with bad habits, on a random symmetric twin of the level."""
        template = make_prompt_template(self.source, "compact", self.limits.actions)
        for level in levels:
            (state,) = self.source.start([level])
            twin = self.demonstrator.turn(state, rng)
            yield make_dialogue(self.source, twin, template, self.demonstrator, habits, self.limits, rng, luck_rng)


STAGE_LEVEL_STRIDE = 10_000_000
"""Distance between the first level seeds of two stages: far more than a stage's levels, so stages share no seed."""


def make_model(folder: Path, policy: PolicyRecipe, log: Callable[[str], None], n_stages: int | None = None) -> None:
    """Run the recipe of a policy and write weights, config, tokenizer and recipe to `folder`.

    n_stages: number of first stages to run; None for all. The first stage alone makes the policy's teacher.
    """
    torch.set_num_threads(1)
    recipe = replace(policy.recipe, stages=policy.recipe.stages[:n_stages])
    start_time = time.process_time()
    model = make_initial_model(policy.make_shape(), recipe.seed)
    for number, stage in enumerate(recipe.stages):
        rng = make_rng(recipe.seed, "demonstrations", number)
        luck_rng = make_rng(recipe.seed, "demonstrations", number, 1)
        examples = make_examples(policy, stage, number * STAGE_LEVEL_STRIDE, rng, luck_rng)
        log(f"stage {number + 1}: {len(examples)} dialogues, {time.process_time() - start_time:.0f} s")
        loss = train(model, examples, stage, recipe.batch, rng)
        log(f"stage {number + 1}: loss {loss:.3f} nats per token, {time.process_time() - start_time:.0f} s")
    write_model(model, folder, policy.pieces)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")


def make_initial_model(shape: Qwen2Shape, seed: int) -> Qwen2:
    """Initialize normal weights (std 0.02 for the embedding, 0.5 / sqrt(inputs) for matrices) and biases of 0."""
    model = Qwen2(shape)
    generator = torch.Generator().manual_seed(int(make_rng(seed, "weights").integers(2**62)))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        elif weight.dim() == 2:
            std = 0.02 if "embed" in name else weight.shape[1] ** -0.5 * 0.5
            torch.nn.init.normal_(weight, std=std, generator=generator)
    return model


@dataclass(frozen=True)
class Example:
    """A dialogue as tokens (T,), and a mask (T,) of the trained tokens."""

    tokens: np.ndarray
    loss_mask: np.ndarray


def make_examples(
    policy: PolicyRecipe, stage: Stage, first_index: int, rng: np.random.Generator, luck_rng: np.random.Generator
) -> list[Example]:
    """Tokenize the stage's dialogues, one per demonstration level from `first_index` on."""
    tokenizer, examples = policy.build_tokenizer(), []
    levels = make_demonstration_levels(policy.source, stage.dialogues, first_index)
    for segments in policy.make_dialogues(levels, stage.habits, rng, luck_rng):
        ids = [encoding.ids for encoding in tokenizer.encode_batch([segment.text for segment in segments])]
        loss_masks = [np.full(len(tokens), segment.is_trained) for tokens, segment in zip(ids, segments, strict=True)]
        examples.append(Example(np.concatenate([np.array(tokens) for tokens in ids]), np.concatenate(loss_masks)))
    return examples


def train(model: Qwen2, examples: Sequence[Example], stage: Stage, batch_size: int, rng: np.random.Generator) -> float:
    """Train for one epoch; return the mean loss of the last tenth of the steps, in nats per token."""
    steps = len(examples) // batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    for step, (tokens, flat_positions, targets) in enumerate(_iter_batches(examples, batch_size, rng)):
        for group in optimizer.param_groups:
            group["lr"] = stage.lr + (stage.last_lr - stage.lr) * step / steps
        hidden = model.model.compute_hidden_states(tokens, flat_positions)
        loss = -logprobs_from_logits(model.lm_head(hidden), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses[-max(1, steps // 10) :]))


def _iter_batches(
    examples: Sequence[Example], batch_size: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens (B, T), the flat positions (N,) that predict trained tokens, and the trained tokens (N,)."""
    order = rng.permutation(len(examples))
    # The last, smaller batch is dropped, consistently with the number of steps in `train`.
    for start in range(0, len(order) - batch_size + 1, batch_size):
        batch_examples = [examples[index] for index in order[start : start + batch_size]]
        longest = max(len(example.tokens) for example in batch_examples)
        tokens = np.zeros((batch_size, longest), dtype=np.int64)
        loss_mask = np.zeros((batch_size, longest), dtype=bool)
        for row, example in enumerate(batch_examples):
            tokens[row, : len(example.tokens)] = example.tokens
            loss_mask[row, : len(example.tokens)] = example.loss_mask
        rows, columns = np.nonzero(loss_mask)
        yield (
            torch.from_numpy(tokens),
            torch.from_numpy(rows * longest + columns - 1),  # a token is predicted from the position before it
            torch.from_numpy(tokens[rows, columns]),
        )


def write_model(model: Qwen2, folder: Path, pieces: list[str]) -> None:
    """Write the model and its tokenizer in the hub's layout: config.json, model.safetensors, tokenizer files."""
    shape = model.shape
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [QWEN2_ARCHITECTURE],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "bos_token_id": None,
        "pad_token_id": pieces.index(PAD),
        "use_cache": True,
        "use_sliding_window": False,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        **{name: value for name, value in asdict(shape).items() if name != "rope_theta"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, pieces)

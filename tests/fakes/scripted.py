"""Fakes for the tests of trainable: a sampler that replays replies, random episodes, small models and settings."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.models.qwen2 import Qwen2
from trainable.models.qwen2_shape import Qwen2Shape
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams
from tune_study.placement.resources import TORCH_SETTINGS, find_compiled_obstacle

SMALL_SETTINGS = {
    **PRESETS["laptop"].settings,
    "env.env_groups": 2,
    "env.group_size": 4,
    "env.val_env_groups": 16,
    "env.test_env_groups": 8,
    "actor.ppo_mini_batch_size": 4,
    "actor.ppo_micro_batch_size_per_gpu": 2,
    "critic.ppo_mini_batch_size": 4,
    "critic.ppo_micro_batch_size_per_gpu": 2,
    "trainer.total_training_steps": 3,
    "trainer.test_freq": 2,
    # Most tests of trials go back to the step before.
    "trainer.resume_every": 1,
}


def make_small_config(**overrides: object) -> RunConfig:
    """Make a small version of the laptop preset; in keys of `overrides`, `__` stands for the dot.

    As in a study, torch takes the place of compiled code where that cannot run the model and no override names another.
    """
    chosen_settings = {key.replace("__", "."): value for key, value in overrides.items()}
    config = apply_overrides(RunConfig(), {**SMALL_SETTINGS, **chosen_settings})
    if find_compiled_obstacle(config, os.environ):
        config = apply_overrides(RunConfig(), {**SMALL_SETTINGS, **TORCH_SETTINGS, **chosen_settings})
    return config


def make_qwen2_shape(**sizes: object) -> Qwen2Shape:
    """Make a shape of a few thousand parameters."""
    default_sizes = {
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    return Qwen2Shape(**{**default_sizes, **sizes})


def make_random_model(sizes: Qwen2Shape, seed: int = 0, std: float = 0.4) -> Qwen2:
    """Make a model in which every parameter is drawn at random, including biases and gains."""
    generator = torch.Generator().manual_seed(seed)
    model = Qwen2(sizes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else std * noise)
    return model


def make_hub_twin(model: Qwen2) -> torch.nn.Module:
    """Make the Qwen2 of transformers with the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = model.shape
    config = Qwen2Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        max_position_embeddings=sizes.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        rms_norm_eps=sizes.rms_norm_eps,
        tie_word_embeddings=sizes.tie_word_embeddings,
        eos_token_id=sizes.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        attention_dropout=0.0,
    )
    twin = Qwen2ForCausalLM(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


# ---------------------------------------------------------------------------- a sampler that replays


@dataclass
class ScriptedSampler(Conversation):
    """Replay `script`, which has the replies of each row in order, as token ids; record the requests and samples.

    The log-prob of token n of turn t of row r is -(r + t/10 + n/1000). Its entropy is the negative of its log-prob.
    """

    script: Sequence[Sequence[Sequence[int]]]
    prompts: list[list[int]] = field(default_factory=list)
    requests: list[dict[int, list[int]]] = field(default_factory=list)
    samples: list[dict[int, SampledReply]] = field(default_factory=list)

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> "ScriptedSampler":
        assert len(self.script) == len(rngs)
        self.prompts = [list(prompt) for prompt in prompts for _ in range(len(rngs) // len(prompts))]
        self.params = params
        return self

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        previous_rows = list(self.requests[-1]) if self.requests else list(range(len(self.script)))
        assert list(rows) == sorted(set(rows))
        assert set(rows) <= set(previous_rows)
        turn = len(self.requests)
        self.requests.append({row: list(ids) for row, ids in zip(rows, new_tokens, strict=True)})
        self.samples.append({row: self._make_reply(row, turn) for row in rows})
        return [self.samples[-1][row] for row in rows]

    def _make_reply(self, row: int, turn: int) -> SampledReply:
        ids = np.array(self.script[row][turn], dtype=np.int64)
        entropies = (row + turn / 10 + np.arange(len(ids)) / 1000).astype(np.float32)
        return SampledReply(ids, -entropies, entropies, bool(ids[-1] == self.params.stop_token))


# ---------------------------------------------------------------------------- episodes


def make_episode(
    turns: Sequence[tuple[int, int, float]], group: int = 0, rng: np.random.Generator | None = None, vocab: int = 23
) -> Episode:
    """Make an episode with random tokens and log-probs; a turn is (prompt tokens, sampled tokens, reward)."""
    rng = rng or np.random.default_rng(0)
    mask = np.concatenate(
        [
            np.repeat([False, True], [n_prompt_tokens, n_sampled_tokens])
            for n_prompt_tokens, n_sampled_tokens, _ in turns
        ]
    )
    length = len(mask)
    return Episode(
        level_seed=100 + group,
        group=group,
        tokens=rng.integers(0, vocab, length),
        mask=mask,
        logprobs=np.where(mask, -3 * rng.random(length), 0).astype(np.float32),
        entropies=np.where(mask, rng.random(length), 0).astype(np.float32),
        turns=np.repeat(
            np.arange(len(turns)),
            [n_prompt_tokens + n_sampled_tokens for n_prompt_tokens, n_sampled_tokens, _ in turns],
        ),
        turn_rewards=tuple(reward for _, _, reward in turns),
        turn_actions=(("Up",),) * len(turns),
        turn_validity=(True,) * len(turns),
        stop_reason=StopReason.OUT_OF_TURNS,
        texts=("",) * len(turns),
    )


def make_random_episodes(count: int, group_size: int, seed: int = 0, vocab: int = 23) -> list[Episode]:
    """Make episodes of one to three turns of different lengths; the episodes of a group are consecutive."""
    rng = np.random.default_rng(seed)
    return [
        make_episode(
            [
                (int(rng.integers(1, 6)), int(rng.integers(1, 7)), float(rng.normal()))
                for _ in range(int(rng.integers(1, 4)))
            ],
            number // group_size,
            rng,
            vocab,
        )
        for number in range(count)
    ]


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}

"""The settings of the paper on a model in the format of the hub: byte-level tokenizer and published prompt."""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from search_spaces.language_model.kl import STUDY
from tests.fakes.scripted import make_qwen2_shape
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.envs.level_sets import make_validation_levels
from trainable.envs.prompts import END_OF_MESSAGE, Observation, make_prompt_template
from trainable.envs.sokoban.game import Sokoban
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.recipe import write_model


def make_byte_level_tokenizer() -> Tokenizer:
    prompt_template = make_prompt_template(Sokoban(), "full", 10)
    levels = make_validation_levels(Sokoban(), 20)
    texts = [prompt_template.format_first_turn(Observation(1, level.cells, 10)) for level in levels]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    specials = ["<|endoftext|>", "<|im_start|>", END_OF_MESSAGE]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return tokenizer


@pytest.fixture(scope="module")
def hub_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "Qwen-small"
    tokenizer = make_byte_level_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END_OF_MESSAGE)}
    shape = make_qwen2_shape(**sizes, **tokens, max_position_embeddings=4096, rope_theta=1e6)
    write_model(Qwen2(shape), folder, SOKOBAN_TINY.pieces)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.long
def test_the_paper_settings_train_a_step(hub_model: Path) -> None:
    small = {
        "model.path": str(hub_model),
        "rollout.response_length": 6,
        "env.env_groups": 2,
        "env.group_size": 4,
        "env.val_env_groups": 4,
        "env.test_env_groups": 2,
        "env.max_turn": 2,
        "actor.ppo_mini_batch_size": 4,
        "critic.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": 1,
        "trainer.device": "cpu",
        "actor.lr": 1e-3,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.01,
        "rollout.name": "torch",
    }
    trainer = PPOTrainer(apply_overrides(RunConfig(), {**STUDY.fixed_settings, **small}))
    old_head = trainer.model.lm_head.weight.detach().clone()
    step = trainer.step()
    row, evaluations = step.row, step.evaluations
    assert row["optimizer_steps"] == 2
    assert row["train_invalid_turns"] == 1.0
    assert row["train_reward"] == pytest.approx(-0.2)
    assert not torch.equal(old_head, trainer.model.lm_head.weight)
    assert {evaluation.mode for evaluation in evaluations} == {"sampled", "greedy"}

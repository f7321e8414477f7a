import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.scripted import make_hub_twin
from tests.strategies.examples import thin_out
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.seeds import make_rng
from trainable.envs.level_sets import make_demonstration_levels
from trainable.envs.prompts import parse_reply
from trainable.envs.sokoban.game import Sokoban
from trainable.models.load import find_model, load_policy
from trainable.ppo.trainer import PPOTrainer
from trainable.tiny import __main__ as command
from trainable.tiny.dialogues import Habits
from trainable.tiny.policies import POLICIES, SOKOBAN_TINY, TURN_POLICIES
from trainable.tiny.recipe import (
    Recipe,
    Stage,
    make_examples,
    make_initial_model,
    make_model,
    train,
)

SHORT = Recipe(seed=3, batch=16, stages=(Stage(160, 3e-3, 1e-3, Habits()), Stage(48, 1e-3, 1e-4, Habits(detour=1.0))))
SHORT_POLICY = replace(SOKOBAN_TINY, recipe=SHORT)


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder, lines = tmp_path_factory.mktemp("made"), []
    make_model(folder, SHORT_POLICY, lines.append)
    return folder, lines


def test_the_width_changes_the_size_and_nothing_else() -> None:
    sizes = []
    for width in (32, 64, 128):
        shape = replace(SOKOBAN_TINY, width=width).make_shape()
        assert (shape.head_dim, shape.hidden_size, shape.vocab_size) == (
            32,
            width,
            SOKOBAN_TINY.make_shape().vocab_size,
        )
        sizes.append(sum(weight.numel() for weight in make_initial_model(shape, 0).parameters()))
    assert sizes[0] < 0.35 * sizes[1] < 0.35**2 * sizes[2]


def test_only_replies_are_learned_and_each_level_comes_once() -> None:
    stage, tokenizer = Stage(12, 1e-3, 1e-3, Habits()), SOKOBAN_TINY.build_tokenizer()
    examples = make_examples(SOKOBAN_TINY, stage, 500, np.random.default_rng(0), np.random.default_rng(1))
    levels = make_demonstration_levels(Sokoban(), 12, 500)
    assert len(examples) == 12
    for example, level in zip(examples, levels, strict=True):
        text = tokenizer.decode(example.tokens.tolist(), skip_special_tokens=False)
        replies = [reply.split("<|im_end|>")[0] for reply in text.split("<think>")[1:]]
        trained_text = tokenizer.decode(example.tokens[example.loss_mask].tolist(), skip_special_tokens=False)
        assert trained_text == "".join(reply + "<|im_end|>" for reply in replies)
        assert not any(parse_reply(reply, 2, Sokoban().read_action).invalid for reply in replies)
        assert text.count("X") >= 1
        assert level.seed >= 700_000_500


@pytest.mark.long
def test_training_lowers_the_loss() -> None:
    stage = Stage(320, 3e-3, 1e-4, Habits())
    rng = make_rng(0, "demonstrations", 0)
    examples = make_examples(SOKOBAN_TINY, stage, 0, rng, np.random.default_rng(1))
    model = make_initial_model(SOKOBAN_TINY.make_shape(), 0)
    first_loss = train(model, examples[:16], Stage(16, 1e-9, 1e-9, Habits()), 16, rng)
    assert first_loss == pytest.approx(np.log(SOKOBAN_TINY.make_shape().vocab_size), rel=1e-2)
    assert train(model, examples, stage, 16, rng) < 4.0


def test_the_loss_is_that_of_the_replies_predicted_from_what_stands_before_them() -> None:
    stage = Stage(16, 1e-12, 1e-12, Habits())
    examples = make_examples(SOKOBAN_TINY, stage, 0, np.random.default_rng(0), np.random.default_rng(1))
    model = load_policy("sokoban-tiny", torch.device("cpu")).model
    twin, losses = make_hub_twin(model), []
    for example in examples:
        tokens = torch.from_numpy(example.tokens)
        with torch.no_grad():
            logprobs = twin(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        losses += (-logprobs.gather(1, tokens[1:, None])[example.loss_mask[1:], 0]).tolist()
    assert train(model, examples, stage, 16, np.random.default_rng(0)) == pytest.approx(np.mean(losses), rel=1e-4)
    assert np.mean(losses) < 1.0


@pytest.mark.slow
def test_making_the_model_twice_gives_the_same_weights(made_model: tuple[Path, list[str]], tmp_path: Path) -> None:
    make_model(tmp_path / "again", SHORT_POLICY, lambda line: None)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "recipe.json"):
        assert (tmp_path / "again" / name).read_bytes() == (made_model[0] / name).read_bytes(), name


def test_a_written_model_has_its_recipe_and_transformers_loads_it(made_model: tuple[Path, list[str]]) -> None:
    from transformers import AutoModelForCausalLM

    folder, lines = made_model
    assert json.loads((folder / "recipe.json").read_text()) == json.loads(json.dumps(asdict(SHORT)))
    assert [line.split(":")[0] for line in lines] == ["stage 1", "stage 1", "stage 2", "stage 2"]
    assert "160 dialogues" in lines[0]
    twin = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(twin).__name__ == "Qwen2ForCausalLM"
    assert twin.config.eos_token_id == SOKOBAN_TINY.make_shape().eos_token_id
    model = load_policy(str(folder), torch.device("cpu")).model
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        logits = model.lm_head(model.model.compute_hidden_states(tokens, torch.arange(60)))
        torch.testing.assert_close(logits, twin(input_ids=tokens).logits.flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_shipped_models_are_of_the_recipes_in_the_code(name: str) -> None:
    folder, policy = find_model(name), POLICIES[name]
    assert SHIPPED_MODELS[name].game == policy.source.name
    assert json.loads((folder / "recipe.json").read_text()) == json.loads(json.dumps(asdict(policy.recipe)))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 600_000
    assert (folder / "model.safetensors").stat().st_size < 500_000
    loaded_policy = load_policy(name, torch.device("cpu"))
    assert loaded_policy.model.shape == policy.make_shape()
    assert loaded_policy.tokenizer.get_vocab() == policy.build_tokenizer().get_vocab()
    text = "<think>P32 X31 O21 DLU</think><answer>Down || Left</answer><|im_end|>10 actions left\n"
    assert loaded_policy.tokenizer.encode(text).ids == policy.build_tokenizer().encode(text).ids


@pytest.mark.long
@pytest.mark.parametrize("name", thin_out(TURN_POLICIES))
def test_a_shipped_policy_knows_more_than_it_shows(name: str) -> None:
    """Sampled it is above chance and below greedy, and both are below the best policy."""
    policy = TURN_POLICIES[name]
    trainer = PPOTrainer(command.make_config(name, policy))
    levels = trainer.val_levels
    chance = float(np.mean(policy.source.compute_chance(levels, policy.limits)))
    best = float(np.mean(policy.source.compute_best(levels, policy.limits)))
    sampled, greedy = (trainer.evaluate("val", mode).success for mode in ("sampled", "greedy"))
    assert chance + 0.05 < sampled < greedy - 0.05
    assert greedy < best - 0.2


# ---------------------------------------------------------------------------- the command


def test_the_command_does_not_write_into_a_folder_that_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["trainable.tiny", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "is not empty: choose a new folder with --output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]

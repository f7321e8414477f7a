"""Trials on a model of another architecture with its own chat template, resumed by hand."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.command_line import assert_refused, type_words
from tests.fakes.hub_models import NO_SYSTEM_TEMPLATE, write_small_model
from tests.fakes.trials import Row, clean_up_trials, drop_times, find_newest_checkpoint, read_run_files, start_trial
from trainable.models.load import load_policy
from trainable.ppo.trainer import PPOTrainer
from trainable.trial import PPO

pytestmark = pytest.mark.long

SETTINGS = {
    "actor__use_kl_loss": True,
    "actor__kl_loss_coef": 0.01,
    "rollout__response_length": 8,
    "env__max_turn": 2,
    "trainer__total_training_steps": 2,
    "trainer__test_freq": 1,
    "trainer__save_freq": 1,
    "collapse_detection__compute_freq": 1,
    "rollout__name": "torch",  # compiled code runs Qwen2 only
    "model__compiled_passes": False,
}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    clean_up_trials()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("hub") / "small-llama")


def get_trainer(trial: PPO) -> PPOTrainer:
    return trial.begin().trainer.trainer


def play_opening(trainer: PPOTrainer) -> str:
    """Play the first validation level and return the conversation as text."""
    tokenizer = load_policy(trainer.config.model.path, trainer.device).tokenizer
    episodes = trainer.roll_out(trainer.val_levels[:1], 1, "sampling")
    text: str = tokenizer.decode(episodes[0].tokens.tolist(), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("settings", [{}, {"critic__shared_trunk": True, "model__dtype": "bfloat16"}])
def test_it_trains_and_resumed_equals_straight_through(llama: Path, tmp_path: Path, settings: Row) -> None:
    settings = SETTINGS | settings | {"model__path": str(llama)}
    uninterrupted_trial = start_trial(tmp_path / "straight", **settings)
    expected_rows = [uninterrupted_trial.step() for _ in range(2)]
    conversation = play_opening(get_trainer(uninterrupted_trial))
    assert conversation.startswith("<s><|turn|>system\n\nSokoban<|end|><|turn|>user\n\nTurn 1:")
    trainer = get_trainer(uninterrupted_trial)
    assert trainer.stop_token == load_policy(str(llama), trainer.device).stop_token
    clean_up_trials()
    interrupted_trial = start_trial(tmp_path / "cut", **settings)
    first_row = interrupted_trial.step()
    clean_up_trials()
    assert find_newest_checkpoint(tmp_path / "cut").is_dir()
    resumed_trial = start_trial(tmp_path / "cut", **settings)
    second_row = resumed_trial.step()
    clean_up_trials()
    assert "training continues after step 1" in second_row.pop("note")
    expected_rows[1].pop("note")
    for row, expected_row in zip((first_row, second_row), expected_rows, strict=True):
        assert drop_times(row) == pytest.approx(drop_times(expected_row), nan_ok=True)
    rows, levels = read_run_files(tmp_path / "straight")
    assert [row["optimizer_steps"] for row in rows] == [2, 2]
    assert rows[0]["actor_grad_norm"] > 0
    assert levels


def test_a_template_without_a_place_for_the_system(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", "gemma", NO_SYSTEM_TEMPLATE)
    trial = start_trial(tmp_path, **SETTINGS, model__path=str(folder))
    assert trial.step()["optimizer_steps"] == 2
    assert play_opening(get_trainer(trial)).startswith("<s><|turn|>user\nSokoban\n\nTurn 1:")


def test_a_model_that_is_not_run_starts_nothing(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert_refused(
        type_words("run", "kl", "--preset=laptop", "--model", model, "--output", tmp_path / "out"),
        "is a LlamaForCausalLM, and its weights are quantized",
    )
    assert not (tmp_path / "out").exists()

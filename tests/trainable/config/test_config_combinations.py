import pytest

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, resolve_key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.path": "sokoban-tiny"}, "compact prompt only"),
        ({"model.path": "sokoban-tiny", "model.prompt_style": "compact", "env.name": "mastermind"}, "mastermind-tiny"),
        ({"env.name": "chess"}, "frozenlake"),
        ({"env.frozenlake.success_rate": 1.5}, "success_rate"),
        ({"critic.shared_trunk": True, "trainer.critic_warmup": 5}, "one update for policy and critic"),
        ({"env.seed_val": 10**12}, "200000000"),
        ({"trainer.total_training_steps": 10**9}, "100000"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RunConfig(), changes)


def test_bare_words_in_a_list_are_words() -> None:
    assert apply_overrides(RunConfig(), {"trainer.logger": "[console,wandb]"}).trainer.logger == ("console", "wandb")


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("env.success_rate", "env.frozenlake.success_rate"),
        ("success_rate", "env.frozenlake.success_rate"),
        ("env.colors", "env.mastermind.colors"),
        ("algorithm.horizon", "algorithm.kl_ctrl.horizon"),
        ("actor.lr", "actor.lr"),
    ],
)
def test_inner_sections_may_be_left_out(key: str, field: str) -> None:
    assert resolve_key(key) == field


def test_a_setting_of_another_section_is_not_meant() -> None:
    with pytest.raises(ConfigError, match=r"There is no setting `actor.success_rate`.*env.frozenlake.success_rate"):
        resolve_key("actor.success_rate")


def test_the_settings_of_games_that_are_not_played_are_not_hashed() -> None:
    sokoban = RunConfig()
    assert apply_overrides(sokoban, {"env.success_rate": 0.5, "env.colors": 6}).compute_hash() == sokoban.compute_hash()
    lake = apply_overrides(sokoban, {"env.name": "frozenlake"})
    assert lake.compute_hash() != sokoban.compute_hash()
    assert apply_overrides(lake, {"env.colors": 6}).compute_hash() == lake.compute_hash()
    assert apply_overrides(lake, {"env.success_rate": 0.5}).compute_hash() != lake.compute_hash()

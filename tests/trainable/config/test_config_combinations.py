import pytest

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.path": "sokoban-tiny"}, "compact prompt only"),
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

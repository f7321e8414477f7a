"""Two scales of one experiment. `paper` is the published one: RunConfig's defaults. Here is what `laptop` changes."""

from types import MappingProxyType

from search_spaces.declaration.family import Settings

PRESETS: dict[str, Settings] = {
    "paper": MappingProxyType({}),
    "laptop": MappingProxyType(
        {
            # The model, its prompt and its learning rates.
            "model.path": "sokoban-tiny",
            "model.prompt_style": "compact",
            "model.dtype": "float32",
            "model.enable_gradient_checkpointing": False,
            "rollout.name": "torch",
            "rollout.max_model_len": None,
            "rollout.response_length": 24,
            "actor.lr": 3e-4,
            "critic.lr": 1e-3,
            # Length and rhythm.
            "trainer.total_training_steps": 60,
            "trainer.test_freq": 5,
            "trainer.resume_every": 1,
            # The published validation temperature makes the tiny model nearly greedy.
            "rollout.val_temperature": 1.0,
            # The published `kl` does not anchor when it is used as a loss.
            "actor.kl_loss_type": "low_var_kl",
            # The tiny model's gradients can be kept whole.
            "trainer.gradient_analysis_sketch": None,
            # One core, no GPU.
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": 0,
        }
    ),
}

DEFAULT_SEEDS: dict[str, int] = {"paper": 3, "laptop": 1}

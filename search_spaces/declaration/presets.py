"""The presets: `paper` is the published scale, RunConfig's defaults; `laptop` changes them to run on one CPU core."""

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
            # Length of training and intervals. A rolling checkpoint takes milliseconds here, so every step writes one.
            "trainer.total_training_steps": 60,
            "trainer.test_freq": 5,
            # A pass of the tiny reference over the validation episodes is cheap, and shows how far a policy without a
            # KL term moves.
            "trainer.measure_val_kl": True,
            "trainer.resume_every": 1,
            # The published validation temperature makes the tiny model nearly greedy.
            "rollout.val_temperature": 1.0,
            # The published `kl` (k1), used as a loss, does not pull the policy toward the reference.
            "actor.kl_loss_type": "low_var_kl",
            # The tiny model's gradients are small enough to keep without a sketch.
            "trainer.gradient_analysis_sketch": None,
            # One core, no GPU.
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": 0,
        }
    ),
}

DEFAULT_SEEDS: dict[str, int] = {"paper": 3, "laptop": 1}
"""The default number of seeds per arm, by preset."""

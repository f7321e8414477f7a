"""Not Tree-GRPO (arXiv 2509.21240): does the credit of children decide whether a model asks them, and does it pay?

A root answers a question about papers in a Python REPL, and its code may call children. All rollouts of a tree share
the advantage of its root. As published (root-and-children), a tree that called children has twice the weight of one
that did not; one-per-tree gives both the same weight. In root-only the children are not trained, and in no-children
none may be called.
"""

from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.family import PPO
from trainable.families import Settings

ARMS: dict[str, Settings] = {
    "root-and-children": {"algorithm.tree_weighting": "root-and-children"},
    "one-per-tree": {"algorithm.tree_weighting": "one-per-tree"},
    "root-only": {"algorithm.train_children": False},
    "no-children": {"env.papers.max_children": 0},
}
CREDIT_ARMS = tuple(ARMS)

_PAPER_SETTINGS: Settings = {
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct", "model.lora_rank": 16, "model.lora_alpha": 32, "env.env_groups": 1,
    "env.group_size": 4, "env.max_turn": 10, "env.val_env_groups": 64, "env.test_env_groups": 64,
    "env.papers.num_papers": 4, "env.papers.num_sentences": 40, "rollout.response_length": 384,
    "rollout.max_model_len": 8_192, "actor.lr": 1e-5, "actor.ppo_mini_batch_size": 4,
    "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.total_training_steps": 100,
}  # fmt: skip
# execution_seconds: code of a tiny policy finishes at once, or never.
_LAPTOP_SETTINGS: Settings = {
    "model.path": "papers-tiny", "env.env_groups": 4, "env.group_size": 8, "env.max_turn": 3,
    "env.val_env_groups": 128, "env.test_env_groups": 128, "env.papers.execution_seconds": 5.0,
    "rollout.response_length": 32, "trainer.total_training_steps": 60, "trainer.test_freq": 10,
}  # fmt: skip
_SMALL_SETTINGS: Settings = {"env.max_turn": 3, "env.group_size": 4, "env.papers.execution_seconds": 5.0}

_FIXED_SETTINGS: Settings = {
    "env.name": "papers", "env.format_penalty": 0.0, "env.val_group_size": 1, "trainer.log_train_generations": 8,
    "algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True, "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2, "actor.ppo_epochs": 1, "actor.weight_decay": 0.0, "actor.entropy_coeff": 0.0,
    "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01, "actor.kl_loss_type": "low_var_kl",
    "filter.rollout_filter_value": 1.0, "collapse_detection.first_turn_enabled": False,
    "collapse_detection.multi_turn_enabled": False,
}  # fmt: skip
"""The trained trees of a question are recorded, to show how a reward at the root is credited to every segment."""

STUDY = Study(
    name="tree-grpo",
    family=PPO,
    game="papers",
    question=__doc__.splitlines()[0],
    axis=Axis(
        setting="credit of children",
        option="--arms",
        grids={"paper": CREDIT_ARMS, "laptop": CREDIT_ARMS},
        named_settings=ARMS,
    ),
    fixed_settings=_FIXED_SETTINGS,
    presets={"paper": _PAPER_SETTINGS, "laptop": _LAPTOP_SETTINGS, "small": _SMALL_SETTINGS},
    baseline="root-and-children",
    smoke_settings={
        "trainer.total_training_steps": 1,
        # Enough trees that some call children, and all are recorded.
        "trainer.log_train_generations": 32,
        "env.env_groups": 4,
        "env.group_size": 8,
        "env.val_env_groups": 16,
        "env.test_env_groups": 0,
    },
)

STUDIES = (STUDY,)
SUITES: dict[str, tuple[str, ...]] = {}

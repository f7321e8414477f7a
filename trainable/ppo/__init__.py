"""The PPO trainer: steps, updates, targets, evaluation, ranks."""

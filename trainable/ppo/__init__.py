"""the trainer: its step, updates, targets, evaluation, ranks."""

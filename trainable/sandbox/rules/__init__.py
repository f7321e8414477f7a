"""The update rules as pure functions, a file a family; `trainable.sandbox.update_rules` lists them by name."""

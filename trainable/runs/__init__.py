"""One run on disk: its rows, checkpoints, stop rules, failures and orphan processes."""

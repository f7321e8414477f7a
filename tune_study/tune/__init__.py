"""Ray Tune and Ray: experiment, callbacks, stoppers, workers, W&B."""

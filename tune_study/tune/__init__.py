"""Run a study with Ray Tune: experiment, callbacks, stoppers, workers and W&B."""

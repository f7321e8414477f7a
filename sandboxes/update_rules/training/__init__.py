"""Trainer of the sandbox: steps, replay, checkpoints, diagnostics."""

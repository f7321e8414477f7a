"""Trainer of the sandbox: steps, replay, optimizer, checkpoints."""

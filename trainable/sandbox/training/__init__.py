"""the trainer of the sandbox: batches, replay, optimizer, states."""

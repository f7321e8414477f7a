"""Tasks of seconds on models of 0.1 M parameters, where the training step itself can be watched."""

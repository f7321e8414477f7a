"""This machine: memory, GPUs, terminal, signals, orphaned processes."""

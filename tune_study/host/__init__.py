"""This machine: memory, GPUs, terminal, signals, and orphaned processes."""

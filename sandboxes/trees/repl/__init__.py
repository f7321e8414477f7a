"""A Python REPL for code that a model wrote, in a process that can compute and talk to its parent, and nothing else."""

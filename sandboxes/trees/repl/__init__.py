"""A Python REPL for model-written code, in a process that can only compute and talk to its parent."""

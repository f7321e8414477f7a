"""The other games, each in its own file, and the function that makes the environment of a run."""

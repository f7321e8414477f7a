"""All settings of a run, typed, bounded and documented, and the only way to override them."""

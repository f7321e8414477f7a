"""Trees of rollouts: the code that a root agent writes can call child agents."""

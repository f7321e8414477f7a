"""Trees of rollouts: a root asks children in the code that it writes."""

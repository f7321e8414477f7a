"""Studies of trees of rollouts."""

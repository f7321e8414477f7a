"""Pedagogical reinforcement learning: a teacher that sees a hint learns to write what its student can learn from."""

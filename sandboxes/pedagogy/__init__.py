"""Pedagogical reinforcement learning: a teacher that sees the answer writes for a student."""

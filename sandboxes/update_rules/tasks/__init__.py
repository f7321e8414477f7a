"""Sequence tasks, and bandits over images and text, with their models and rewards."""

"""Sequence tasks, and bandits over images and text."""

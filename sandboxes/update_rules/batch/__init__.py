"""Rollouts of several members at once, and reward noise."""

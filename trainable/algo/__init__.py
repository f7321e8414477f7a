"""Filters, advantages, losses, estimators: pure tensor functions."""

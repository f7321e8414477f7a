"""Diagnostics, oracle fits, and the columns of a row."""

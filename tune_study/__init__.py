"""Run: the only package that starts Ray."""

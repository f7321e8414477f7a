"""Declare: a question, its axis, its contrasts; every study by name."""

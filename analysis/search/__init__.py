"""Points of a search and their outcomes."""

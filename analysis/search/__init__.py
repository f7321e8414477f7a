"""Points of a search: their outcomes, and the importances of its settings."""

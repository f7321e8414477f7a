"""Points of a search: outcomes, importances, and their section of a report."""

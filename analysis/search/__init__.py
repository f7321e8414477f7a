"""The points of a search: their outcomes, which settings matter, and the section of the report."""

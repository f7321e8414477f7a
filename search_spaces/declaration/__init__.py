"""what a study, a family of studies and a preset are, as data."""

"""Train: one run, with no knowledge of the study it belongs to."""
